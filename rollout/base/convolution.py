"""Convolutions whose gradients are fast in loops on a CPU.

Use `rollout.networks.conv_general_dilated`, which is defined here.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


class _Window(NamedTuple):
    """Options of `jax.lax.conv_general_dilated`; tuples have an entry per axis."""

    dimension_numbers: lax.ConvDimensionNumbers
    window_strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    feature_group_count: int
    precision: Any
    preferred_element_type: Any


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Convolves like `jax.lax.conv_general_dilated`, with fast gradients in CPU loops.

    Pass it to the layers of a network:
    `nn.Conv(32, (8, 8), strides=4, conv_general_dilated=conv_general_dilated)`.

    XLA:CPU is fast if the operands of a convolution are channels-last. It transposes
    other operands, but not in loops. The derivatives of a convolution are convolutions
    with other layouts, so in a `jax.lax.scan` they are many times slower than outside.
    On a CPU this function transposes the operands itself. Convolutions of few channels
    with a small kernel, such as the first layer for MinAtar, are products over patches,
    which are faster. If `jax.vmap` maps over both operands, a loop replaces XLA's
    grouped convolution, which is slow.

    The result and all derivatives are the same up to rounding. On other platforms,
    inside of `jax.shard_map`, and for layouts that are not channels-last (flax's are),
    the function calls `jax.lax.conv_general_dilated`, whose documentation describes the
    arguments. It does the same for a single image without derivatives, as in `predict`,
    so that exporters need not know this function.
    """

    def convolve(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            lhs,
            rhs,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )

    jax.eval_shape(convolve, lhs, rhs)  # raises for wrong arguments
    layouts = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    # Inside of `jax.shard_map`, types name mesh axes, such as `float32[3]{V:lanes}`.
    is_sharded = any("{V:" in str(jax.typeof(x)) for x in (lhs, rhs))
    if layouts != _channels_last(lhs.ndim) or is_sharded:
        return convolve(lhs, rhs)
    ones = (1,) * (lhs.ndim - 2)
    dilation = tuple(rhs_dilation or ones)
    if isinstance(padding, str):
        lengths = _lengths(rhs.shape[:-2], dilation)
        pads = lax.padtype_to_pads(lhs.shape[1:-1], lengths, window_strides, padding)
    else:
        pads = padding
    window = _Window(
        layouts,
        tuple(window_strides),
        tuple((low, high) for low, high in pads),
        tuple(lhs_dilation or ones),
        dilation,
        feature_group_count,
        precision,
        preferred_element_type,
    )
    return _convolve(window, lhs, rhs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _convolve(window: _Window, inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves channels-last operands."""
    if len(inputs) == 1:
        return _convolve_by_xla(inputs, kernel, window=window)
    return _bind(inputs, kernel, window)


def _convolve_jvp(window: _Window, primals: tuple, tangents: tuple) -> tuple:
    """Differentiates `_convolve`, which is linear in each operand.

    Calls the primitive also for one image: `jax.vmap` may map over many.
    """
    (inputs, kernel), (d_inputs, d_kernel) = primals, tangents
    terms = []
    if not isinstance(d_inputs, SymbolicZero):
        terms.append(_bind(d_inputs, kernel, window))
    if not isinstance(d_kernel, SymbolicZero):
        terms.append(_bind(inputs, d_kernel, window))
    output = _bind(inputs, kernel, window)
    return output, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(output)


_convolve.defjvp(_convolve_jvp, symbolic_zeros=True)


def _convolve_by_xla(
    inputs: jax.Array, kernel: jax.Array, *, window: _Window
) -> jax.Array:
    return lax.conv_general_dilated(inputs, kernel, **window._asdict())


def _convolve_on_cpu(
    inputs: jax.Array, kernel: jax.Array, *, window: _Window
) -> jax.Array:
    return _transposed(_convolve_channels_last, inputs, kernel, window)


def _convolve_channels_last(
    inputs: jax.Array, kernel: jax.Array, window: _Window
) -> jax.Array:
    # XLA takes 1.5 to 7 times as long as a product for inputs of few channels.
    is_small = inputs.shape[-1] < 16 and math.prod(kernel.shape[:-1]) <= 128
    is_plain = window.feature_group_count == max(window.lhs_dilation) == 1
    if is_small and is_plain and math.prod(kernel.shape[:-2]) > 1:
        return _multiply_patches(inputs, kernel, window)
    return _convolve_by_xla(inputs, kernel, window=window)


def _transposed(
    convolve: Any, inputs: jax.Array, kernel: jax.Array, window: _Window
) -> jax.Array:
    """Calls `convolve` with channels-last operands, and restores the output's axes."""
    layouts = window.dimension_numbers
    inputs_axes, kernel_axes, output_axes = (
        (batch, *axes, channels) for batch, channels, *axes in layouts
    )
    output_channels, *axes, input_channels = kernel_axes
    output = convolve(
        lax.transpose(inputs, inputs_axes),
        lax.transpose(kernel, (*axes, input_channels, output_channels)),
        window._replace(dimension_numbers=_channels_last(inputs.ndim)),
    )
    return lax.transpose(output, np.argsort(output_axes))


# A primitive, because its derivatives depend on what `jax.vmap` maps: a mapped batch
# becomes a part of the batch axis, also in the derivative of an unmapped kernel.
_convolve_p = Primitive("convolve_channels_last")


def _bind(inputs: jax.Array, kernel: jax.Array, window: _Window) -> jax.Array:
    return _convolve_p.bind(inputs, kernel, window=window)


@functools.partial(jax.jit, static_argnames="window")
def _call(inputs: jax.Array, kernel: jax.Array, *, window: _Window) -> jax.Array:
    return _convolve_p.bind(inputs, kernel, window=window)


def _output_type(inputs: Any, kernel: Any, *, window: _Window) -> Any:
    convolve = functools.partial(_convolve_by_xla, window=window)
    return jax.make_jaxpr(convolve)(inputs, kernel).out_avals[0]


def _map(operands: Any, axes: Any, *, window: _Window) -> tuple[jax.Array, int]:
    """Applies the primitive to mapped operands; `jax.vmap` calls this function."""
    (inputs, kernel), (inputs_axis, kernel_axis) = operands, axes
    layouts = window.dimension_numbers
    batch, channels, output_axes = layouts[0][0], layouts[1][0], layouts[2][:2]
    if kernel_axis is None:  # enlarge the batch
        inputs = jnp.moveaxis(inputs, inputs_axis, batch)
        size, axis = inputs.shape[batch], output_axes[0]
        inputs = lax.collapse(inputs, batch, batch + 2)
        output = _bind(inputs, kernel, window)
    elif inputs_axis is None and window.feature_group_count == 1:  # more channels
        kernel = jnp.moveaxis(kernel, kernel_axis, channels)
        size, axis = kernel.shape[channels], output_axes[1]
        kernel = lax.collapse(kernel, channels, channels + 2)
        output = _bind(inputs, kernel, window)
    else:
        convolve = functools.partial(_convolve_by_xla, window=window)

        def loop(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
            if inputs_axis is None:
                return lax.map(lambda x: _bind(inputs, x, window), kernel)
            return lax.map(lambda x: _bind(x[0], x[1], window), (inputs, kernel))

        if inputs_axis is not None:
            inputs = jnp.moveaxis(inputs, inputs_axis, 0)
        kernel = jnp.moveaxis(kernel, kernel_axis, 0)
        in_axes = None if inputs_axis is None else 0, 0
        # XLA:CPU computes the grouped convolution of `jax.vmap` slowly.
        grouped = jax.vmap(convolve, in_axes)
        output = lax.platform_dependent(inputs, kernel, cpu=loop, default=grouped)
        # `_convolve` calls XLA's convolution for one image, whose rule puts the axis
        # here. JAX assumes that its derivative does the same.
        return jnp.moveaxis(output, 0, output_axes[1]), output_axes[1]
    shape = list(output.shape)
    shape[axis : axis + 1] = [size, shape[axis] // size]
    return output.reshape(shape), axis


def _channels_last(ndim: int) -> lax.ConvDimensionNumbers:
    inputs = (0, ndim - 1, *range(1, ndim - 1))
    kernel = (ndim - 1, ndim - 2, *range(ndim - 2))
    return lax.ConvDimensionNumbers(inputs, kernel, inputs)


def _lengths(sizes: Sequence[int], dilation: Sequence[int]) -> list[int]:
    return [(size - 1) * d + 1 for size, d in zip(sizes, dilation, strict=True)]


def _multiply_patches(
    inputs: jax.Array, kernel: jax.Array, window: _Window
) -> jax.Array:
    padding = [(0, 0, 0), *((*pads, 0) for pads in window.padding), (0, 0, 0)]
    patches = lax.pad(inputs, jnp.zeros((), inputs.dtype), padding)
    # The last axis first: the slices of the other axes are then contiguous.
    for i in reversed(range(inputs.ndim - 2)):
        stride, dilation = window.window_strides[i], window.rhs_dilation[i]
        starts = range(0, kernel.shape[i] * dilation, dilation)
        span = (patches.shape[i + 1] - starts[-1] - 1) // stride * stride + 1
        slices = [
            lax.slice_in_dim(patches, start, start + span, stride, axis=i + 1)
            for start in starts
        ]
        patches = lax.concatenate(slices, patches.ndim - 1)
    return lax.dot_general(
        patches,
        lax.collapse(kernel, 0, kernel.ndim - 1),
        (((patches.ndim - 1,), (0,)), ((), ())),
        window.precision,
        window.preferred_element_type,
    )


def _sizes(inputs: Any, kernel: Any, output: Any, window: _Window) -> list[Any]:
    """Returns low padding and dilated lengths of inputs, kernel and output, by axis."""
    return [
        (low, *lengths)
        for (low, _), *lengths in zip(
            window.padding,
            _lengths(inputs.shape[1:-1], window.lhs_dilation),
            _lengths(kernel.shape[:-2], window.rhs_dilation),
            _lengths(output.shape[1:-1], window.window_strides),
            strict=True,
        )
    ]


def _transpose_inputs(
    cotangent: jax.Array, inputs: Any, kernel: jax.Array, *, window: _Window
) -> jax.Array:
    """Convolves the cotangent with the reversed kernel, whose channels are swapped."""
    layouts = _channels_last(kernel.ndim)
    if window.dimension_numbers != layouts:
        fn = functools.partial(_transposed, _bind, kernel=kernel, window=window)
        return jax.linear_transpose(fn, inputs.aval)(cotangent)[0]
    sizes = _sizes(inputs.aval, kernel, cotangent, window)
    kernel = lax.rev(kernel, range(kernel.ndim - 2)).astype(cotangent.dtype)
    if window.feature_group_count == 1:
        out, channels, *axes = layouts.rhs_spec
        layouts = layouts._replace(rhs_spec=(channels, out, *axes))
    else:
        kernel = _swap(kernel, kernel.ndim - 2, window.feature_group_count)
    window = window._replace(
        dimension_numbers=layouts,
        window_strides=window.lhs_dilation,
        padding=tuple((k - 1 - low, n - out + low) for low, n, k, out in sizes),
        lhs_dilation=window.window_strides,
        preferred_element_type=None,
    )
    return _bind(cotangent, kernel, window).astype(inputs.aval.dtype)


def _transpose_kernel(
    cotangent: jax.Array, inputs: jax.Array, kernel: Any, *, window: _Window
) -> jax.Array:
    """Convolves the inputs with the cotangent, where batch and channels are swapped."""
    layouts = _channels_last(inputs.ndim)
    if window.dimension_numbers != layouts:
        fn = lambda x: _transposed(_bind, inputs, x, window)  # noqa: E731
        return jax.linear_transpose(fn, kernel.aval)(cotangent)[0]
    sizes = _sizes(inputs, kernel.aval, cotangent, window)
    inputs = inputs.astype(cotangent.dtype)
    batch, channels, *axes = layouts.lhs_spec
    swapped = channels, batch, *axes
    output = inputs.ndim - 2, inputs.ndim - 1, *range(len(axes))
    if window.feature_group_count > 1:
        inputs = _swap(inputs, 0, window.feature_group_count)
        swapped = layouts.lhs_spec
    window = window._replace(
        dimension_numbers=lax.ConvDimensionNumbers(
            swapped, (channels, batch, *axes), output
        ),
        window_strides=window.rhs_dilation,
        padding=tuple((low, out + k - 1 - n - low) for low, n, k, out in sizes),
        rhs_dilation=window.window_strides,
        preferred_element_type=None,
    )
    return _bind(inputs, cotangent, window).astype(kernel.aval.dtype)


def _swap(x: jax.Array, axis: int, groups: int) -> jax.Array:
    """Swaps an axis with the channels of each group."""
    grouped = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    return lax.collapse(jnp.swapaxes(grouped, axis, -1), x.ndim - 1)


_convolve_p.def_impl(_call)
_convolve_p.def_abstract_eval(_output_type)
ad.defbilinear(_convolve_p, _transpose_inputs, _transpose_kernel)
batching.primitive_batchers[_convolve_p] = _map
for _platform, _function in ((None, _convolve_by_xla), ("cpu", _convolve_on_cpu)):
    _lowering = mlir.lower_fun(_function, multiple_results=False)
    mlir.register_lowering(_convolve_p, _lowering, _platform)
