"""Compares `conv_general_dilated` with `jax.lax` and checks its layouts."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rollout.minibatches import mean_gradient
from rollout.networks import conv_general_dilated

LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}
LAYOUTS[3] = ("NDHWC", "DHWIO", "NDHWC")
# Shapes of inputs and kernel, and options. The defaults are stride 1 and "VALID".
CASES = {
    "Nature CNN, first layer": ((2, 84, 84, 4), (8, 8, 4, 32), {"strides": (4, 4)}),
    "Nature CNN, second layer": ((2, 20, 20, 32), (4, 4, 32, 64), {"strides": (2, 2)}),
    "Nature CNN, third layer": ((2, 9, 9, 64), (3, 3, 64, 64), {}),
    "MinAtar": ((2, 10, 10, 4), (3, 3, 4, 16), {}),
    "MinAtar, same size": ((2, 10, 10, 7), (3, 3, 7, 16), {"padding": "SAME"}),
    "MiniGrid": ((2, 7, 7, 3), (2, 2, 3, 16), {}),
    "uneven padding": ((2, 7, 6, 3), (3, 2, 3, 4), {"padding": ((2, 1), (0, 3))}),
    "remainder of strides": ((2, 8, 9, 3), (3, 2, 3, 4), {"strides": (2, 3)}),
    "one stride": ((2, 7, 6, 3), (3, 3, 3, 4), {"strides": (2, 1), "padding": "SAME"}),
    "cropped": ((2, 9, 9, 3), (3, 3, 3, 4), {"padding": ((-1, -2), (0, -1))}),
    "groups": ((2, 6, 6, 4), (3, 3, 2, 6), {"feature_group_count": 2}),
    "depthwise": ((2, 6, 6, 4), (3, 3, 1, 8), {"feature_group_count": 4}),
    "dilated kernel": ((2, 9, 9, 3), (3, 2, 3, 4), {"rhs_dilation": (2, 3)}),
    "dilated inputs": (
        (2, 5, 5, 4),
        (3, 3, 2, 4),
        {
            "lhs_dilation": (2, 3),
            "feature_group_count": 2,
            "strides": (1, 2),
            "padding": ((1, 0), (0, 2)),
        },
    ),
    "one axis": ((2, 9, 3), (3, 3, 4), {"strides": (2,), "padding": "SAME"}),
    "three axes": ((2, 5, 6, 4, 2), (3, 2, 2, 2, 3), {"strides": (2, 1, 1)}),
    "channels first": ((2, 3, 7, 7), (4, 3, 3, 3), {"dimension_numbers": None}),
}
# Sums of up to 1,024 float32 products have another order.
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


def check_close(tree, expected):
    jax.tree.map(assert_close, tree, expected)


def normal(shape, seed):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


def make_convolve(case, convolve):
    """Returns a function of the inputs and the kernel of a case."""
    inputs_shape, _, options = case
    num_axes = len(inputs_shape) - 2
    options = {"padding": "VALID", "strides": (1,) * num_axes, **options}
    options.setdefault("dimension_numbers", LAYOUTS[num_axes])
    strides, padding = options.pop("strides"), options.pop("padding")
    return lambda x, kernel: convolve(x, kernel, strides, padding, **options)


def compare(compute, operands):
    """Calls `compute(name, convolve, *operands)` with both implementations."""

    @quick_jit
    def run(operands):
        convolutions = conv_general_dilated, jax.lax.conv_general_dilated
        return [
            {name: compute(name, convolve, *x) for name, x in operands.items()}
            for convolve in convolutions
        ]

    return jax.device_get(run(operands))


def value_and_grads(fn, inputs, kernel):
    """Returns the gradients of a nonlinear loss, and the outputs."""

    def loss(inputs, kernel):
        outputs = fn(inputs, kernel)
        return jnp.sum(jnp.sin(outputs)), outputs

    return jax.grad(loss, (0, 1), has_aux=True)(inputs, kernel)


@functools.cache
def results():
    operands = {
        name: (normal(inputs, 0), normal(kernel, 1))
        for name, (inputs, kernel, _) in CASES.items()
    }

    def compute(name, convolve, inputs, kernel):
        return value_and_grads(make_convolve(CASES[name], convolve), inputs, kernel)

    return compare(compute, operands)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_lax(name):
    ours, expected = results()
    check_close(ours[name], expected[name])


def test_second_derivatives_equal_lax():
    def compute(name, convolve, inputs, kernel):
        fn = make_convolve(CASES[name], convolve)

        def loss(inputs, kernel):
            grads = value_and_grads(fn, inputs, kernel)[0]
            return sum(jnp.sum(jnp.sin(x)) for x in grads)

        return jax.grad(loss, (0, 1))(inputs, kernel)

    names = "remainder of strides", "groups", "one axis"
    operands = {x: (normal(CASES[x][0], 0), normal(CASES[x][1], 1)) for x in names}
    check_close(*compare(compute, operands))


AXES = {
    "inputs": (0, None),
    "kernel": (None, 0),
    "both": (0, 0),
    "last axes": (4, 4),
    "none": (None, None),
}


@functools.cache
def mapped_results():
    case = CASES["one stride"]

    def compute(name, convolve, inputs, kernel):
        del name
        fn = make_convolve(case, convolve)
        results = {}
        for name, axes in AXES.items():
            operands = [
                x if axis is None else jnp.stack([x, 2 * x, -x], axis)
                for x, axis in zip((inputs, kernel), axes, strict=True)
            ]
            size = {"axis_size": 3}
            vmap = functools.partial(jax.vmap, in_axes=axes, **size)
            grads = functools.partial(value_and_grads, fn)
            results[name] = {
                "map of gradients": vmap(grads)(*operands),
                "gradient of a map": value_and_grads(vmap(fn), *operands),
            }
            outer = [jnp.stack([x, x + 1]) for x in operands]
            results[f"{name}, twice"] = jax.vmap(vmap(grads))(*outer)
        return results

    operands = {"all": (normal(case[0], 0), normal(case[1], 1))}
    ours, expected = compare(compute, operands)
    return ours["all"], expected["all"]


@pytest.mark.parametrize("name", [*AXES, *(f"{x}, twice" for x in AXES)])
def test_mapped_gradients_equal_lax(name):
    ours, expected = mapped_results()
    check_close(ours[name], expected[name])


class Network(nn.Module):
    """A small network of flax with strides and padding that wraps around."""

    convolve: object

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, conv_general_dilated=self.convolve)
        x = nn.relu(conv(4, (3, 3), strides=2)(x))
        x = nn.relu(conv(5, (2, 2), padding="CIRCULAR")(x))
        x = conv(6, (3,), kernel_dilation=2)(x)
        return nn.Dense(2)(x.reshape(*x.shape[:-3], -1))


def test_flax_networks_train_in_a_scan():
    obs = normal((6, 9, 9, 3), 0)
    params = jax.eval_shape(Network(None).init, jax.random.key(0), obs)
    params = jax.tree.map(lambda x: 0.1 * normal(x.shape, 1), params)
    weight = np.ones(6, "f4")

    def compute(microbatch_size, convolve, obs, params):
        def loss(params, obs):
            return jnp.mean(jnp.sin(Network(convolve).apply(params, obs))), ()

        def update(params, _):
            options = {"microbatch_size": microbatch_size}
            grads, _ = mean_gradient(loss, params, obs, weight, **options)
            return jax.tree.map(lambda x, y: x - y, params, grads), None

        return jax.lax.scan(update, params, length=3)[0]

    check_close(*compare(compute, dict.fromkeys((2, 6), (obs, params))))


@pytest.mark.parametrize("sharding", ["shard_map", "shard_map, unchecked", "mesh"])
def test_gradients_on_two_devices_equal_lax(sharding):
    auto = {"axis_types": (AxisType.Auto,), "devices": jax.devices()[:2]}
    mesh = jax.make_mesh((2,), ("lanes",), **auto)
    images = jax.random.normal(jax.random.key(0), (4, 10, 10, 4))
    params = quick_jit(nn.Conv(8, (3, 3)).init)(jax.random.key(1), images)

    def compute(conv):
        network = nn.Conv(8, (3, 3), conv_general_dilated=conv)
        loss = lambda params, x: (jnp.sin(network.apply(params, x)).sum(), {})  # noqa: E731

        def gradient(images, **options):
            weight = jnp.ones_like(images[:, 0, 0, 0])
            return mean_gradient(loss, params, images, weight, **options)[0]

        if sharding == "mesh":
            return gradient(images, mesh=mesh)
        return jax.shard_map(
            lambda images: jax.lax.pmean(gradient(images), "lanes"),
            mesh=mesh,
            in_specs=P("lanes"),
            out_specs=P(),
            check_vma=sharding == "shard_map",
        )(images)

    convolutions = conv_general_dilated, jax.lax.conv_general_dilated
    jax.tree.map(assert_close, *quick_jit(lambda: [*map(compute, convolutions)])())


def test_dtypes_equal_lax():
    inputs, kernel, _ = CASES["MinAtar"]
    inputs, kernel = np.ones(inputs, jnp.bfloat16), np.ones(kernel, jnp.bfloat16)
    for dtype in (None, jnp.float32):
        case = (*CASES["MinAtar"][:2], {"preferred_element_type": dtype})
        shapes = [
            jax.eval_shape(
                functools.partial(value_and_grads, make_convolve(case, convolve)),
                *(inputs, kernel),
            )
            for convolve in (conv_general_dilated, jax.lax.conv_general_dilated)
        ]
        assert shapes[0] == shapes[1]


def lower(convolve, platform, name="Nature CNN, second layer"):
    """Lowers the gradient in a scan for a platform."""
    case = CASES[name]
    fn = make_convolve(case, convolve)

    def run(inputs, kernel):
        def body(operands, _):
            return value_and_grads(fn, *operands)[0], None

        return jax.lax.scan(body, (inputs, kernel), length=2)[0]

    traced = jax.jit(run).trace(np.zeros(case[0], "f4"), np.zeros(case[1], "f4"))
    return traced.lower(lowering_platforms=(platform,))


def test_single_image_does_not_depend_on_the_platform():
    """Exporters to ONNX accept the program of `predict`."""
    case = ((1, *CASES["MinAtar"][0][1:]), *CASES["MinAtar"][1:])
    operands = np.zeros(case[0], "f4"), np.zeros(case[1], "f4")
    text = str(jax.make_jaxpr(make_convolve(case, conv_general_dilated))(*operands))
    assert "platform_index" not in text
    assert "conv_general_dilated" in text


def test_derivatives_on_a_cpu_are_channels_last():
    """XLA:CPU passes only these convolutions of a loop to its fast implementation."""
    text = lower(conv_general_dilated, "cpu").compile().as_text()
    layouts = re.findall(r"convolution\(.*dim_labels=([^,\s]+)", text)
    assert len(layouts) >= 2
    assert set(layouts) == {"b01f_01io->b01f"}
    plain = lower(jax.lax.conv_general_dilated, "cpu").compile().as_text()
    assert set(re.findall(r"dim_labels=([^,\s]+)", plain)) > set(layouts)


def test_few_channels_use_patches_on_a_cpu():
    def count(name, platform):
        fn = make_convolve(CASES[name], conv_general_dilated)
        traced = jax.jit(fn).trace(*(np.zeros(x, "f4") for x in CASES[name][:2]))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return text.count("stablehlo.convolution")

    names = "MinAtar", "MiniGrid", "Nature CNN, first layer", "groups"
    assert [count(x, "cpu") for x in names] == [0, 0, 1, 1]
    assert [count(x, "cuda") for x in names] == [1, 1, 1, 1]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_accelerators_use_the_convolutions_of_lax(platform):
    layouts, expected = (
        re.findall(r"dim_numbers = (\S+)", lower(convolve, platform).as_text())
        for convolve in (conv_general_dilated, jax.lax.conv_general_dilated)
    )
    assert len(expected) >= 2
    assert sorted(layouts) == sorted(expected)


def test_wrong_operands_raise_as_in_lax():
    inputs, kernel = np.zeros((2, 7, 7, 3), "f4"), np.zeros((2, 2, 4, 5), "f4")
    with pytest.raises(ValueError, match="feature dimension"):
        conv_general_dilated(
            inputs, kernel, (1, 1), "SAME", dimension_numbers=LAYOUTS[2]
        )
