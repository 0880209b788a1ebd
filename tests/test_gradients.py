"""Derivatives of `dot_general` and `mean_gradient` are those of plain JAX."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rollout.minibatches import mean_gradient
from rollout.platform import dot_general

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)

WIDTHS = {  # inputs and outputs of a layer
    "widens": (3, 5),
    "square": (64, 64),
    "widens from 64": (64, 96),
    "narrows": (64, 2),
    "narrows to 64": (80, 64),
    "bfloat16": (64, 3),
    "one row at a time": (64, 64),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_derivatives_of_layers_are_those_of_the_plain_product(name):
    num_inputs, num_outputs = WIDTHS[name]
    dtype = jnp.bfloat16 if name == "bfloat16" else None
    plain = nn.Dense(num_outputs, dtype=dtype)
    padded = nn.Dense(num_outputs, dtype=dtype, dot_general=dot_general)
    rng = np.random.default_rng(0)
    obs = np.float32(rng.normal(size=(2, 6, num_inputs)))
    scale = np.float32(rng.normal(size=(2, 6, 1)))

    def derivatives(layer, params, obs):
        apply = layer.apply
        if name == "one row at a time":
            apply = jax.vmap(jax.vmap(apply, (None, 0)), (None, 0))

        def loss(params, obs):
            return jnp.sum(scale * jnp.sin(apply(params, obs)))

        return jax.value_and_grad(loss, (0, 1))(params, obs)

    @quick_jit
    def use(obs):
        params = plain.init(jax.random.key(0), obs[0, 0])
        return [derivatives(layer, params, obs) for layer in (plain, padded)]

    # Products of 64 columns have one more column on a CPU.
    is_padded = f"x{num_inputs + 1}xf32" in use.lower(obs).as_text()
    assert is_padded == (num_inputs % 64 == 0 and name != "bfloat16")
    tolerance = 2e-2 if name == "bfloat16" else 1e-4
    expected, result = jax.device_get(use(obs))
    jax.tree.map(
        functools.partial(assert_close, rtol=tolerance, atol=tolerance),
        expected,
        result,
    )


def make_problem():
    """Makes a network, its loss per row, and 32 rows with weights."""
    layers = (nn.Dense(64, dot_general=dot_general) for _ in range(2))
    network = nn.Sequential([next(layers), nn.tanh, next(layers), nn.Dense(2)])
    rng = np.random.default_rng(0)
    obs, target = np.float32(rng.normal(size=(2, 32, 4)))
    weight = np.float32(np.arange(32) % 7 < np.arange(32) // 8 + 2)

    def loss(params, batch):
        obs, target = batch
        error = ((network.apply(params, obs) - target[:, :2]) ** 2).sum(-1)
        return error, {"error": error}

    params = quick_jit(network.init)(jax.random.key(0), obs[:1])
    return loss, params, (obs, target), weight


def plain_gradient(loss, params, batch, weight):
    """Differentiates the weighted mean with `jax.grad`."""

    def mean_loss(params):
        values, metrics = loss(params, batch)
        means = jax.tree.map(lambda x: (x * weight).sum() / weight.sum(), metrics)
        return (values * weight).sum() / weight.sum(), means

    return jax.grad(mean_loss, has_aux=True)(params)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_gradient_of_sharded_rows_is_that_of_all_rows(axis_type):
    loss, params, batch, weight = make_problem()
    expected = quick_jit(functools.partial(plain_gradient, loss))(params, batch, weight)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(axis_type,))
    rows = jax.device_put((batch, weight), NamedSharding(mesh, P("rows")))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    result = quick_jit(functools.partial(mean_gradient, loss))(params, *rows)
    jax.tree.map(assert_close, jax.device_get(expected), jax.device_get(result))


def test_gradient_under_shard_map_is_the_sum_of_the_shards():
    loss, params, batch, weight = make_problem()
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("rows"), P("rows")), "out_specs": P()}

    def gradient(params, batch, weight):
        return mean_gradient(loss, params, batch, weight)[0]

    result = quick_jit(jax.shard_map(gradient, mesh=mesh, **specs))(
        params, batch, weight
    )
    shards = (slice(16), slice(16, None))

    @quick_jit
    def expected():
        shard_grads = [
            plain_gradient(loss, params, [x[s] for x in batch], weight[s])[0]
            for s in shards
        ]
        return jax.tree.map(jnp.add, *shard_grads)

    jax.tree.map(assert_close, jax.device_get(expected()), jax.device_get(result))


def test_microbatches_have_the_gradient_and_derivatives_of_the_batch():
    """Also if the microbatches have unequal numbers of valid rows."""
    loss, params, batch, weight = make_problem()

    def derivatives(gradient):
        moved = jax.jvp(gradient, (params,), (params,))
        _, pull, metrics = jax.vjp(gradient, params, has_aux=True)
        several = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
        return jax.vmap(gradient)(several), moved, pull(params), metrics

    @quick_jit
    def use(batch, weight):
        inputs = {"batch": batch, "weight": weight}
        gradients = [
            functools.partial(plain_gradient, loss, **inputs),
            *(
                functools.partial(mean_gradient, loss, microbatch_size=size, **inputs)
                for size in (None, 8, 7)
            ),
        ]
        return [derivatives(gradient) for gradient in gradients]

    expected, *results = jax.device_get(use(batch, weight))
    for result in results:
        jax.tree.map(
            functools.partial(assert_close, rtol=1e-3, atol=1e-4), expected, result
        )


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.grad])
@pytest.mark.parametrize("microbatch_size", [None, 4])
def test_gradient_has_derivatives_by_values_that_the_loss_closes_over(
    mode, microbatch_size
):
    x, y = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)

    def squared_gradient(scale):
        def loss(params, batch):
            x, y = batch
            return scale * (params * x - y) ** 2, {}

        options = {"microbatch_size": microbatch_size}
        return (
            mean_gradient(loss, 3.0, (x, y), np.ones(8, np.float32), **options)[0] ** 2
        )

    value, slope = jax.device_get(
        quick_jit(
            lambda scale: (squared_gradient(scale), mode(squared_gradient)(scale))
        )(2.0)
    )
    assert_close(value, slope)  # c * 2**2 and 2 * c * 2
