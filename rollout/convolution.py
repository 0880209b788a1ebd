"""Convolutions whose gradients are fast in loops on a CPU.

Use `rollout.platform.conv_general_dilated`, which is defined here.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class _Window(NamedTuple):
    """Options of `jax.lax.conv_general_dilated`; tuples have an entry per axis."""

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

    The result and all derivatives are the same up to rounding. Reverse mode may be
    nested, but `jax.jvp` raises on every platform. On other platforms, and for layouts
    that are not channels-last (flax's are), the function calls
    `jax.lax.conv_general_dilated`, whose documentation describes the arguments. It does
    the same for a single image, as in `predict`, so that programs of one image do not
    depend on the platform and can be exported.
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
    if layouts != _channels_last(lhs.ndim) or lhs.shape[0] == 1:
        return convolve(lhs, rhs)
    ones = (1,) * (lhs.ndim - 2)
    dilation = tuple(rhs_dilation or ones)
    if isinstance(padding, str):
        lengths = _lengths(rhs.shape[:-2], dilation)
        pads = lax.padtype_to_pads(lhs.shape[1:-1], lengths, window_strides, padding)
    else:
        pads = padding
    window = _Window(
        tuple(window_strides),
        tuple((low, high) for low, high in pads),
        tuple(lhs_dilation or ones),
        dilation,
        feature_group_count,
        precision,
        preferred_element_type,
    )
    return lax.platform_dependent(
        lhs, rhs, cpu=lambda lhs, rhs: _convolve(lhs, rhs, window), default=convolve
    )


def _channels_last(ndim: int) -> lax.ConvDimensionNumbers:
    inputs = (0, ndim - 1, *range(1, ndim - 1))
    kernel = (ndim - 1, ndim - 2, *range(ndim - 2))
    return lax.ConvDimensionNumbers(inputs, kernel, inputs)


def _lengths(sizes: Sequence[int], dilation: Sequence[int]) -> list[int]:
    return [(size - 1) * d + 1 for size, d in zip(sizes, dilation, strict=True)]


def _convolve_primal(
    inputs: jax.Array, kernel: jax.Array, window: _Window
) -> jax.Array:
    """Convolves channels-last operands; the derivatives call it again."""
    # XLA takes 1.5 to 7 times as long as a product for inputs of few channels.
    is_small = inputs.shape[-1] < 16 and math.prod(kernel.shape[:-1]) <= 128
    is_plain = window.feature_group_count == max(window.lhs_dilation) == 1
    is_product = is_small and is_plain and math.prod(kernel.shape[:-2]) > 1

    def convolve(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
        if is_product:
            return _multiply_patches(inputs, kernel, window)
        layouts = _channels_last(inputs.ndim)
        return lax.conv_general_dilated(
            inputs, kernel, dimension_numbers=layouts, **window._asdict()
        )

    mapped_convolve = jax.custom_batching.custom_vmap(convolve)

    @mapped_convolve.def_vmap
    def _(size: int, is_mapped: list, *operands: jax.Array) -> tuple:
        del size
        if all(is_mapped):
            return lax.map(lambda pair: mapped_convolve(*pair), operands), True
        # JAX enlarges the batch of the inputs or the output channels of the kernel.
        in_axes = [0 if x else None for x in is_mapped]
        return jax.vmap(convolve, in_axes)(*operands), True

    return mapped_convolve(inputs, kernel)


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


def _convolve_forward(
    inputs: jax.Array, kernel: jax.Array, window: _Window
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolve(inputs, kernel, window), (inputs, kernel)


def _convolve_backward(
    window: _Window, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    inputs, kernel = residuals
    groups = window.feature_group_count
    sizes = [
        (low, *lengths)
        for (low, _), *lengths in zip(
            window.padding,
            _lengths(inputs.shape[1:-1], window.lhs_dilation),
            _lengths(kernel.shape[:-2], window.rhs_dilation),
            _lengths(cotangent.shape[1:-1], window.window_strides),
            strict=True,
        )
    ]
    # Convolve the cotangent with the reversed kernel, whose channels are swapped.
    reversed_kernel = lax.rev(kernel, range(kernel.ndim - 2)).astype(cotangent.dtype)
    input_window = window._replace(
        window_strides=window.lhs_dilation,
        padding=tuple((k - 1 - low, n - out + low) for low, n, k, out in sizes),
        lhs_dilation=window.window_strides,
        preferred_element_type=None,
    )
    input_grads = _convolve(
        cotangent, _swap(reversed_kernel, kernel.ndim - 2, groups), input_window
    )
    # Convolve the inputs with the cotangent, where batch and channels are swapped.
    kernel_window = window._replace(
        window_strides=window.rhs_dilation,
        padding=tuple((low, out + k - 1 - n - low) for low, n, k, out in sizes),
        rhs_dilation=window.window_strides,
        preferred_element_type=None,
    )
    swapped_inputs = _swap(inputs.astype(cotangent.dtype), 0, groups)
    kernel_grads = _convolve(
        swapped_inputs, jnp.moveaxis(cotangent, 0, -2), kernel_window
    )
    kernel_grads = jnp.moveaxis(kernel_grads, 0, -2)
    return input_grads.astype(inputs.dtype), kernel_grads.astype(kernel.dtype)


def _swap(x: jax.Array, axis: int, groups: int) -> jax.Array:
    """Swaps an axis with the channels of each group."""
    grouped = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    return lax.collapse(jnp.swapaxes(grouped, axis, -1), x.ndim - 1)


_convolve = jax.custom_vjp(_convolve_primal, nondiff_argnums=(2,))
_convolve.defvjp(_convolve_forward, _convolve_backward)
