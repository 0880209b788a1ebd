"""Compares `mean_gradient` with `jax.grad` of the mean over mapped rows."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import on_a_gpu, quick_jit
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rollout.minibatches import mean_gradient, normalize
from rollout.networks import conv_general_dilated

# Sums of float32 have another order.
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def mlp() -> nn.Module:
    sizes = [nn.Dense(64), nn.tanh, nn.Dense(64), nn.tanh, nn.Dense(2)]
    return nn.Sequential(sizes)


def make_loss(coefficient=1.0):
    """Returns a loss for one row `(x, target)`, with two metrics."""

    def loss(params, row):
        x, target = row
        outputs = coefficient * mlp().apply(params, x)
        loss = jnp.mean((outputs - target) ** 2)
        return loss, {"loss": loss, "nested": (outputs.max(),)}

    return loss


def make_rows(num_rows):
    """Returns rows with random weights. The weight of every third row is 0."""
    rng = np.random.default_rng(num_rows)
    x, target = rng.normal(size=(num_rows, 5)), rng.normal(size=num_rows)
    weight = rng.random(num_rows) * (np.arange(num_rows) % 3 != 1)
    return (np.float32(x), np.float32(target)), np.float32(weight)


def plain_gradient(loss_fn, params, batch, weight, axis=0):
    """Applies `jax.grad` to the weighted mean over mapped rows."""

    def mean(x):
        return jnp.sum(x * weight) / jnp.sum(weight)

    def mean_loss(params):
        mapped = jax.vmap(loss_fn, (None, axis), axis)
        loss, metrics = mapped(params, batch)
        return mean(loss), jax.tree.map(mean, metrics)

    return jax.grad(mean_loss, has_aux=True)(params)


def check_gradients(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(assert_close, *jax.device_get((got, expected)))


def gradients(loss, params, rows, microbatch_size):
    """Returns the results of `mean_gradient` and `plain_gradient`."""
    mean = mean_gradient(loss, params, *rows, microbatch_size=microbatch_size)
    return mean, plain_gradient(loss, params, *rows)


SIZES = 1, 255, 256, 257, 1000, 8192, 12_288


@pytest.mark.parametrize(
    ("platform", "microbatch_size"),
    [
        ("cpu", "auto"),
        ("cpu", 256),
        pytest.param("cpu", None, marks=pytest.mark.slow),
        pytest.param("gpu", "auto", marks=pytest.mark.slow),
        pytest.param("gpu", 256, marks=pytest.mark.slow),
    ],
)
def test_gradient_equals_jax_for_any_number_of_rows(platform, microbatch_size):
    """Prime numbers and numbers below `microbatch_size` are not split."""

    @quick_jit
    def compute(key, rows):
        params, loss = mlp().init(key, jnp.zeros((1, 5))), make_loss()
        return [gradients(loss, params, x, microbatch_size) for x in rows]

    with on_a_gpu() if platform == "gpu" else contextlib.nullcontext():
        pairs = compute(jax.random.key(0), [make_rows(x) for x in SIZES])
    for pair in pairs:
        check_gradients(*pair)


def test_rows_with_weight_0_are_ignored():
    """Losses of ignored rows may be NaN. Without valid rows, the gradient is 0."""

    def loss(params, row):
        loss, metrics = make_loss()(params, row[:2])
        return loss + row[2], {"metric": loss + row[2]} | metrics

    @quick_jit
    def compute(key, rows, valid_rows):
        params, (batch, weight) = mlp().init(key, jnp.zeros((1, 5))), rows
        gradients = [
            mean_gradient(loss, params, batch, weight, microbatch_size=size)
            for size in (None, 4)
        ]
        zero = mean_gradient(loss, params, batch, jnp.zeros_like(weight))
        return gradients, plain_gradient(loss, params, *valid_rows), zero

    (x, target), weight = make_rows(12)
    is_valid = weight > 0
    x[~is_valid], target[~is_valid] = 1e6, -1e6
    batch = x, target, np.where(is_valid, np.float32(2), np.nan)
    valid_rows = tuple(leaf[is_valid] for leaf in batch), weight[is_valid]
    gradients, expected, zero = compute(jax.random.key(0), (batch, weight), valid_rows)
    for got in gradients:
        check_gradients(got, expected)
    for leaf in jax.tree.leaves(jax.device_get(zero)):
        assert (leaf == 0).all()


def test_rows_may_be_sequences():
    """Each step has a weight, and each sequence has data without a time axis."""
    rng = np.random.default_rng(0)
    x, start, weight = rng.normal(size=(6, 4)), rng.normal(size=(1, 4)), rng.random(24)
    batch, weight = np.float32(x), np.float32(weight.reshape(6, 4))

    def loss(params, row):
        x, start = row
        total = start + jnp.cumsum(params * x)
        return jnp.sin(total), {"total": total}

    @quick_jit
    def compute(params, batch, weight):
        means = [
            mean_gradient(loss, params, batch, weight, axis=1, microbatch_size=size)
            for size in (None, 2)
        ]
        return means, plain_gradient(loss, params, batch, weight, axis=1)

    means, expected = compute(0.7, (batch, np.float32(start)), weight)
    for got in means:
        check_gradients(got, expected)


class Convolutional(nn.Module):
    """A convolution that accepts an image or a batch."""

    convolve: object

    @nn.compact
    def __call__(self, image):
        conv = nn.Conv(4, (3, 3), conv_general_dilated=self.convolve)
        x = nn.relu(conv(image.reshape(*image.shape[:-1], 3, 4, 1)))
        return nn.Dense(2)(x.reshape(*x.shape[:-3], -1))


class Loop(nn.Module):
    """A layer that a scan repeats."""

    @nn.compact
    def __call__(self, x):
        def step(layer, x, _):
            return nn.tanh(layer(x)), None

        options = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        return nn.scan(step, length=3, **options)(nn.Dense(12), x, None)[0]


class Attention(nn.Module):
    """Attention over the entries of an observation."""

    @nn.compact
    def __call__(self, x):
        x = x.reshape(*x.shape[:-1], 4, 3)
        return nn.MultiHeadDotProductAttention(num_heads=1)(x, x).sum(-2)


ENSEMBLE = nn.vmap(
    nn.Dense, {"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3
)
NETWORKS = {
    "convolution": Convolutional(jax.lax.conv_general_dilated),
    "convolution of rollout": Convolutional(conv_general_dilated),
    "layer norm": nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.relu]),
    "ensemble": ENSEMBLE(2),
    "scan": Loop(),
    "remat": nn.Sequential([nn.remat(nn.Dense)(8), nn.tanh, nn.Dense(2)]),
    "bfloat16": nn.Dense(2, dtype=jnp.bfloat16),
    "spectral": nn.Sequential([nn.Einsum((12, 2), "...i,ij->...j"), nn.gelu]),
    "attention": Attention(),
    "general": nn.DenseGeneral((2, 3)),
}


@functools.cache
def network_gradients():
    """Computes gradients of all networks with `mean_gradient` and `jax.grad`."""
    rng = np.random.default_rng(0)
    x, weight = np.float32(rng.normal(size=(12, 12))), np.float32(rng.random(12))
    keys = jax.random.split(jax.random.key(1), 12)

    @quick_jit
    def compute(key, x, keys, weight):
        pairs = {}
        for name, network in NETWORKS.items():

            def loss(params, row, network=network):
                x, key = row
                keep = jax.random.bernoulli(key, 0.8, x.shape)  # dropout
                outputs = network.apply(params, x * keep).astype(jnp.float32)
                return jnp.sum(jnp.sin(outputs)), {"mean": outputs.mean()}

            params = network.init(key, x)
            rows = (x, keys), weight
            pairs[name] = (
                mean_gradient(loss, params, *rows, microbatch_size=4),
                plain_gradient(loss, params, *rows),
            )
        return pairs

    with jax.debug_key_reuse(False):
        return jax.device_get(compute(jax.random.key(0), x, keys, weight))


@pytest.mark.compiles(30)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradient_equals_jax_for_any_network(name):
    got, expected = network_gradients()[name]
    tolerance = 2e-2 if name == "bfloat16" else 2e-4
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance / 10)


def test_bfloat16_gradients_are_accumulated_in_float32():
    """A bfloat16 sum of 256 equal terms would lose nine tenths of the value."""
    x, weight = np.full(256, 0.1, np.float32), np.ones(256, np.float32)

    @quick_jit
    def compute(params, x, weight):
        loss = lambda params, x: (params.astype(jnp.float32) * x, ())  # noqa: E731
        return mean_gradient(loss, params, x, weight, microbatch_size=1)[0]

    gradient = compute(jnp.bfloat16(1), x, weight)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(gradient), 0.1, rtol=1e-2)


def test_gradient_is_differentiable():
    """The gradient supports `vmap`, forward over reverse, and meta-gradients."""

    def derivatives(gradient_fn, params, batch, weight):
        def gradient(params, coefficient):
            loss = make_loss(coefficient)
            return gradient_fn(loss, params, batch, weight)

        def size_after_step(coefficient):
            grads, _ = gradient(params, coefficient)
            new = jax.tree.map(lambda x, y: x - 0.1 * y, params, grads)
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(new))

        return {
            "vmap": jax.vmap(gradient, (None, 0))(params, jnp.array([0.3, 1.3])),
            "forward over reverse": jax.jvp(
                lambda x: gradient(x, 0.3), (params,), (params,)
            ),
            "meta-gradient": jax.grad(size_after_step)(0.3),
        }

    @quick_jit
    def compute(key, batch, weight):
        params = mlp().init(key, jnp.zeros((1, 5)))
        fast = functools.partial(mean_gradient, microbatch_size=4)
        pair = fast, plain_gradient
        return [derivatives(fn, params, batch, weight) for fn in pair]

    got, expected = compute(jax.random.key(0), *make_rows(12))
    check_gradients(got, expected)
    assert abs(got["meta-gradient"]) > 1e-3


@pytest.mark.parametrize("layout", ["Auto", "Explicit", "shard_map"])
def test_rows_may_be_sharded(layout):
    """`jax.grad` also supports both types of mesh axes and `shard_map`."""
    loss, rows = make_loss(), make_rows(32)
    axis_type = AxisType.Explicit if layout == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("lanes",), axis_types=(axis_type,))
    sizes = None, 4

    def compute(params, batch, weight):
        grads = [
            mean_gradient(loss, params, batch, weight, microbatch_size=size)[0]
            for size in sizes
        ]
        return grads, plain_gradient(loss, params, batch, weight)[0]

    params = quick_jit(mlp().init)(jax.random.key(0), np.zeros((1, 5)))
    if layout == "shard_map":
        rows_spec = P("lanes")
        specs = {"in_specs": (P(), rows_spec, rows_spec), "out_specs": P()}
        gradients, expected = quick_jit(jax.shard_map(compute, mesh=mesh, **specs))(
            params, *rows
        )
    else:
        params = jax.device_put(params, NamedSharding(mesh, P()))
        rows = jax.device_put(rows, NamedSharding(mesh, P("lanes")))
        gradients, expected = quick_jit(compute)(params, *rows)
    for got in gradients:
        check_gradients(got, expected)


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)],
)
def test_gradient_on_a_mesh_equals_one_device(dtype):
    """One device or all devices may have no valid row."""
    (x, target), weight = make_rows(32)
    mesh = jax.make_mesh((4,), ("lanes",), devices=jax.devices()[:4])
    params = {"w": jnp.full((5,), 0.5, dtype), "scale": jnp.float32(2)}

    def loss(params, row):
        x, target = row
        error = params["scale"] * x @ params["w"] - target
        return 100 * error**2, {"error": error}

    def make_compute(mesh, **options):
        fn = functools.partial(mean_gradient, loss, mesh=mesh, **options)
        return jax.jit(lambda weight: fn(params, (x, target), weight))

    compute_expected = make_compute(None)
    computes = [make_compute(mesh), make_compute(mesh, microbatch_size=2)]
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    for num_masked in (0, 9, 16, 32):
        masked_weight = np.where(np.arange(32) < num_masked, 0, weight)
        expected = compute_expected(masked_weight)
        for compute in computes:
            got = compute(masked_weight)
            for x1, x2 in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
                assert x1.dtype == x2.dtype
                x1, x2 = np.float32(x1), np.float32(x2)
                np.testing.assert_allclose(x1, x2, rtol=tolerance, atol=tolerance)


def test_sequences_may_be_sharded():
    mesh = jax.make_mesh((2,), ("lanes",), devices=jax.devices()[:2])
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    weight = np.float32(x > -1)
    loss = lambda params, row: (params * jnp.cumsum(row), {"x": row})  # noqa: E731
    got, expected = quick_jit(
        lambda params: [
            mean_gradient(loss, params, x, weight, axis=1, mesh=y) for y in (mesh, None)
        ]
    )(2.0)
    check_gradients(got, expected)


def test_loss_and_metrics_of_a_row_must_be_scalars():
    """The loss receives one row and must not return an array."""
    weight = np.ones(6, np.float32)
    losses = {
        "`loss`": lambda params, x: (params * x[None], {}),
        r"`metrics\['a'\]`": lambda params, x: (params * x, {"a": x[None]}),
    }
    for name, loss in losses.items():
        with pytest.raises(ValueError, match=f"{name} of one row must be a scalar"):
            mean_gradient(loss, 1.0, weight, weight)
    loss = lambda params, x: (params * x.mean(), {})  # noqa: E731
    with pytest.raises(ValueError, match="must be one value per step"):
        mean_gradient(loss, 1.0, weight[None], weight[None], axis=1)
    for size in (0, 1.5, "all"):
        with pytest.raises(ValueError, match="`microbatch_size` must be"):
            mean_gradient(losses["`loss`"], 1.0, weight, weight, microbatch_size=size)


def test_normalize_accepts_small_weights():
    x = np.float32([1.0, 2.0, 4.0, 100.0])
    weight = np.float32([0.1, 0.2, 0.1, 0.0])
    mean = np.average(x, weights=weight)
    std = np.sqrt(np.average((x - mean) ** 2, weights=weight))
    assert_close(normalize(x, weight), (x - mean) / std)


def test_normalize_of_equal_rows_is_zero():
    values = np.float32([0.1, 1000.1, 1e6 + 0.5, -3.0, 0.0, 5.0, 7.0, 1.0])[:, None]
    x, weight = np.repeat(values, 1000, 1), np.ones((8, 1000), np.float32)
    x[5, 0], weight[5, 0] = -1e6, 0  # an ignored row
    x[6, 0] = np.nan
    x[7, :500] = (
        1 + 2e-6
    )  # half of the rows are higher by a few units in the last place
    normalized = quick_jit(jax.vmap(normalize))(x, weight)
    np.testing.assert_array_equal(normalized[:6], 0)
    assert np.isnan(normalized[6]).all()
    np.testing.assert_allclose(normalized[7], np.repeat([1.0, -1.0], 500), atol=0.3)
