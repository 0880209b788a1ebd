"""`mean_gradient` agrees with `jax.grad`, and `dot_general` agrees with lax."""

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
from rollout.platform import dot_general

# Sums of float32 in another order.
close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
Dense = functools.partial(nn.Dense, dot_general=dot_general)


def mlp() -> nn.Module:
    return nn.Sequential([Dense(64), nn.tanh, Dense(64), nn.tanh, Dense(2)])


def make_loss(coefficient=1.0):
    """The loss of rows `(x, target)` by a network, and two metrics."""

    def loss(params, batch):
        x, target = batch
        outputs = coefficient * mlp().apply(params, x)
        losses = ((outputs - target[:, None]) ** 2).mean(axis=-1)
        return losses, {"loss": losses, "nested": (outputs.max(axis=-1),)}

    return loss


def make_rows(num_rows):
    """Rows of which a third is masked out, with weights that differ."""
    rng = np.random.default_rng(num_rows)
    x, target = rng.normal(size=(num_rows, 5)), rng.normal(size=num_rows)
    weight = rng.random(num_rows) * (np.arange(num_rows) % 3 != 1)
    return (np.float32(x), np.float32(target)), np.float32(weight)


def plain_gradient(loss_fn, params, batch, weight):
    """`jax.grad` of the weighted mean."""

    def mean(x):
        return jnp.sum(x * weight) / jnp.sum(weight)

    def mean_loss(params):
        loss, metrics = loss_fn(params, batch)
        return mean(loss), jax.tree.map(mean, metrics)

    return jax.grad(mean_loss, has_aux=True)(params)


def check(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(close, *jax.device_get((got, expected)))


def gradients(loss, params, rows, microbatch_size):
    """The gradient of a weighted mean, and that of `jax.grad`."""
    mean = mean_gradient(loss, params, *rows, microbatch_size=microbatch_size)
    return mean, plain_gradient(loss, params, *rows)


SIZES = 1, 256, 257, 1000, 4096


@pytest.mark.parametrize(
    ("platform", "microbatch_size"),
    [
        ("cpu", None),
        ("cpu", 256),
        pytest.param("gpu", None, marks=pytest.mark.slow),
        pytest.param("gpu", 256, marks=pytest.mark.slow),
    ],
)
def test_any_number_of_rows_has_the_gradient_of_jax(platform, microbatch_size):
    """A number that is prime, or below `microbatch_size`, is not divided."""

    @quick_jit
    def compute(key, rows):
        params, loss = mlp().init(key, jnp.zeros((1, 5))), make_loss()
        return [gradients(loss, params, x, microbatch_size) for x in rows]

    with on_a_gpu() if platform == "gpu" else contextlib.nullcontext():
        pairs = compute(jax.random.key(0), [make_rows(x) for x in SIZES])
    for pair in pairs:
        check(*pair)


def test_rows_of_weight_0_do_not_count():
    """Even if their losses are NaN; without other rows, the gradient is 0."""

    def loss(params, batch):
        losses, metrics = make_loss()(params, batch[:2])
        return losses + batch[2], {"metric": losses + batch[2]} | metrics

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
        check(got, expected)
    for leaf in jax.tree.leaves(jax.device_get(zero)):
        assert (leaf == 0).all()


def test_rows_may_be_sequences():
    """Of a weight for each step, with data for each sequence beside them."""
    rng = np.random.default_rng(0)
    x, start, weight = rng.normal(size=(6, 4)), rng.normal(size=(1, 4)), rng.random(24)
    batch, weight = np.float32(x), np.float32(weight.reshape(6, 4))

    def loss(params, batch):
        x, start = batch
        total = start + jnp.cumsum(params * x, axis=0)
        return jnp.sin(total), {"total": total}

    @quick_jit
    def compute(params, batch, weight):
        mean = mean_gradient(loss, params, batch, weight)
        return mean, plain_gradient(loss, params, batch, weight)

    check(*compute(0.7, (batch, np.float32(start)), weight))


def test_gradients_have_derivatives_of_both_modes():
    """Under `vmap`; forward over reverse; and meta-gradients by a coefficient."""

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
    check(got, expected)
    assert abs(got["meta-gradient"]) > 1e-3


@pytest.mark.parametrize("layout", ["Auto", "Explicit", "shard_map"])
def test_rows_may_be_divided_among_devices(layout):
    """As `jax.grad` has it: by a mesh of either kind, and inside of a `shard_map`."""
    loss, rows = make_loss(), make_rows(32)
    kind = AxisType.Explicit if layout == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("lanes",), axis_types=(kind,))
    # `jax.lax.scan` over an axis of an explicit mesh raises.
    sizes = (None,) if layout == "Explicit" else (None, 4)

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
        check(got, expected)


def test_loss_and_metrics_must_have_one_value_per_row():
    weight = np.ones(6, np.float32)
    losses = {
        "`loss`": lambda params, x: (jnp.mean(params * x), {}),
        r"`metrics\['a'\]`": lambda params, x: (params * x, {"a": x[:, None]}),
    }
    for name, loss in losses.items():
        with pytest.raises(ValueError, match=f"{name} must have one value per row"):
            mean_gradient(loss, 1.0, weight, weight)
    for size in (0, 1.5):
        with pytest.raises(ValueError, match="`microbatch_size` must be"):
            mean_gradient(losses["`loss`"], 1.0, weight, weight, microbatch_size=size)


PRODUCTS = {
    "64 columns": ((6, 64), (64, 8), ((1,), (0,))),
    "128 columns": ((2, 6, 128), (128, 64), ((2,), (0,))),
    "5 columns": ((6, 5), (5, 64), ((1,), (0,))),
    "other axes": ((64, 6), (8, 64), ((0,), (1,))),
    "one row": ((1, 64), (64, 8), ((1,), (0,))),
    "no batch axis": ((64,), (64, 8), ((0,), (0,))),
}
PADDED = {"64 columns", "128 columns", "other axes"}


@functools.cache
def products():
    """Values and derivatives of both products, and the text of each program."""

    def compute(multiply, inputs, kernel, axes, tangents):
        def product(inputs, kernel):
            return multiply(inputs, kernel, (axes, ((), ())))

        def loss(inputs, kernel):
            return jnp.sum(jnp.sin(product(inputs, kernel)))

        return {
            "value": product(inputs, kernel),
            "grad": jax.grad(loss, (0, 1))(inputs, kernel),
            "forward over reverse": jax.jvp(
                jax.grad(loss, (0, 1)), (inputs, kernel), tangents
            ),
            "vmap": jax.vmap(jax.grad(loss, (0, 1)))(
                *jax.tree.map(lambda x: jnp.stack([x, 2 * x]), (inputs, kernel))
            ),
        }

    @quick_jit
    def compare(operands):
        pairs = {}
        for name, (inputs, kernel, tangents) in operands.items():
            arguments = inputs, kernel, PRODUCTS[name][2], tangents
            multiplies = dot_general, jax.lax.dot_general
            pairs[name] = [compute(x, *arguments) for x in multiplies]
        return pairs

    rng = np.random.default_rng(0)

    def normal(shape):
        return np.float32(rng.normal(size=shape))

    operands = {
        name: (normal(a), normal(b), (normal(a), normal(b)))
        for name, (a, b, _) in PRODUCTS.items()
    }
    return jax.device_get(compare(operands)), operands


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_their_derivatives_are_those_of_lax(name):
    pairs, operands = products()
    check(*pairs[name])
    inputs, kernel, _ = operands[name]
    numbers = PRODUCTS[name][2], ((), ())
    text = jax.jit(lambda x, y: dot_general(x, y, numbers)).lower(inputs, kernel)
    assert ("stablehlo.pad" in text.as_text()) == (name in PADDED)


def test_products_keep_the_dtype_of_lax():
    numbers = ((1,), (0,)), ((), ())
    inputs, kernel = np.ones((3, 64), jnp.bfloat16), np.ones((64, 2), jnp.bfloat16)
    for dtype in (None, jnp.float32):
        shapes = [
            jax.eval_shape(
                lambda x, y, multiply=multiply, dtype=dtype: multiply(
                    x, y, numbers, preferred_element_type=dtype
                ),
                inputs,
                kernel,
            )
            for multiply in (dot_general, jax.lax.dot_general)
        ]
        assert shapes[0] == shapes[1]


def test_products_may_contract_several_axes_or_have_batch_axes():
    """As `nn.DenseGeneral` does after attention, and `jnp.einsum`."""
    rng = np.random.default_rng(0)
    inputs = np.float32(rng.normal(size=(6, 4, 64)))
    several = np.float32(rng.normal(size=(4, 64, 8))), (((1, 2), (0, 1)), ((), ()))
    batched = np.float32(rng.normal(size=(6, 64, 8))), (((2,), (1,)), ((0,), (0,)))
    for kernel, numbers in (several, batched):
        multiplies = dot_general, jax.lax.dot_general
        close(*(multiply(inputs, kernel, numbers) for multiply in multiplies))


@pytest.mark.parametrize("num_rows", [2, 3])
def test_ensembles_of_few_rows_compile(num_rows):
    """XLA aborted on a CPU for products of few rows that were padded otherwise."""

    @quick_jit
    def compute(keys, x):
        pairs = {}
        for size in (2, 3):
            layer, plain = Dense(64), nn.Dense(64)
            params = jax.vmap(layer.init, (0, None))(keys[:size], x)

            def loss(params, layer):
                outputs = jax.vmap(layer.apply, (0, None))(params, x)
                return jnp.sum(jnp.sin(outputs))

            pairs[size] = [jax.grad(loss)(params, net) for net in (layer, plain)]
        return pairs

    keys = jax.random.split(jax.random.key(0), 3)
    x = np.float32(np.random.default_rng(0).normal(size=(num_rows, 64)))
    for got, expected in compute(keys, x).values():
        check(got, expected)


def test_normalize_takes_weights_whose_sum_is_below_1():
    x = np.float32([1.0, 2.0, 4.0, 100.0])
    weight = np.float32([0.1, 0.2, 0.1, 0.0])
    mean = np.average(x, weights=weight)
    std = np.sqrt(np.average((x - mean) ** 2, weights=weight))
    close(normalize(x, weight), (x - mean) / std)
