"""Gradients of networks are those of `jax.grad`, whatever makes them faster."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rollout
from rollout import envs
from rollout.recipes import gradients, ppo
from rollout.recipes.ppo import PPO

near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def doubled(*args, **options):
    return 2 * jax.lax.dot_general(*args, **options)


LAYERS = {
    "widens": nn.Dense(5),
    "is square": nn.Dense(64),
    "widens from 64": nn.Dense(96),
    "narrows": nn.Dense(2, use_bias=False),
    "narrows to 64": nn.Sequential([nn.Dense(80), nn.Dense(64)]),
    "to one": nn.Dense(1),
    "of few digits": nn.Dense(3, dtype=jnp.bfloat16),
    "another product": nn.Dense(3, dot_general=doubled),
    "of a memory": nn.RNN(nn.GRUCell(64)),
    "row by row": nn.Dense(64),
    "by name": nn.Sequential([lambda x: {"inputs": x}, nn.Dense(64)]),
}
PADDED = {"is square", "widens from 64", "narrows to 64", "by name"}


@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_of_layers_are_those_of_jax(name):
    layer, rng = LAYERS[name], np.random.default_rng(0)
    apply = layer.apply
    if name == "row by row":
        apply = jax.vmap(jax.vmap(apply, (None, 0)), (None, 0))
    width = 3 if name == "widens" else 64
    obs, weights = np.float32(rng.normal(size=(2, 2, 6, width)))

    def cost(params, obs, scale):
        out = apply(params, obs)
        return jnp.sum(scale * jnp.sin(out)), out.mean()

    @quick_jit
    def both(obs, scale):
        one_row = obs[0, 0] if name == "row by row" else obs
        params = layer.init(jax.random.key(0), one_row)
        one = jax.grad(lambda *args: cost(*args)[0], (0, 1))(params, obs, scale)
        # By the inputs, too, as of a layer in the middle.
        fast = gradients.differentiate(lambda x, y: cost(*x, y), (params, obs), scale)
        return one, fast[0]

    scale = weights[..., :1]
    expected, got = jax.device_get(both(obs, scale))
    # With one column more than the 64.
    is_padded = "2x6x65xf32" in both.lower(obs, scale).as_text()
    assert is_padded == (name in PADDED)
    rtol = 2e-2 if "digits" in name else 1e-4
    jax.tree.map(functools.partial(near, rtol=rtol, atol=rtol), expected, got)


@pytest.mark.parametrize("layout", ["Auto", "Explicit", "shard_map"])
def test_rows_may_be_divided_among_devices(layout):
    """As `jax.grad` has it: by a mesh of either kind, and inside of a `shard_map`."""
    network = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(64), nn.Dense(2)])
    obs = np.float32(np.random.default_rng(0).normal(size=(32, 4)))

    def cost(params, obs):
        return jnp.sum(jnp.sin(network.apply(params, obs))), {}

    kind = AxisType.Explicit if layout == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("lanes",), axis_types=(kind,))
    params = quick_jit(network.init)(jax.random.key(0), obs[:1])
    expected = quick_jit(jax.grad(cost, has_aux=True))(params, obs)
    grad = functools.partial(gradients.differentiate, cost)
    if layout == "shard_map":
        specs = {"in_specs": (P(), P("lanes")), "out_specs": P()}
        got = quick_jit(jax.shard_map(grad, mesh=mesh, **specs))(params, obs)
    else:
        params = jax.device_put(params, NamedSharding(mesh, P()))
        got = quick_jit(grad)(
            params, jax.device_put(obs, NamedSharding(mesh, P("lanes")))
        )
    jax.tree.map(near, jax.device_get(expected), jax.device_get(got))


def test_gradient_of_parts_is_that_of_the_minibatch(monkeypatch):
    """Also where steps are masked out, unequally many in each part."""
    monkeypatch.setattr(gradients, "num_cores", lambda: 1)
    agent, key = PPO(envs.Discrete(3), ppo.Config(hidden=64)), jax.random.key(0)
    rng, shape = np.random.default_rng(0), (32,)
    obs, floats = rng.normal(size=(32, 4)), rng.normal(size=(5, 32))
    names = "reward", "value", "log_prob", "advantage", "final_value"
    floats = dict(zip(names, np.float32(floats), strict=True))
    extras = {"value": floats["value"], "log_prob": floats["log_prob"] - 1}
    flag, number = np.zeros(shape, bool), np.zeros(shape, np.int32)
    t = rollout.Transition(
        obs=np.float32(obs),
        action=rng.integers(0, 3, 32).astype(np.int32),
        reward=floats["reward"],
        terminated=flag,
        truncated=flag,
        next_obs=np.float32(obs),
        mask=np.arange(32) % 7 < np.arange(32) // 8 + 2,
        episode_id=number,
        episode_return=floats["reward"],
        episode_length=number,
        extras=extras,
        info=(),
        accumulated=(),
        final_value=floats["final_value"],
    )

    def derivatives(params, one, *rows):
        grad = functools.partial(agent.gradient, t=rows[0], advantage=rows[1])
        moved = jax.jvp(grad, (one,), (one,))
        _, pull, _ = jax.vjp(grad, one, has_aux=True)
        return jax.vmap(grad)(params), moved, pull(one)

    @quick_jit
    def both(t, advantage):
        """The gradients of two seeds, and derivatives of those of one in both modes."""
        keys, found = jax.random.split(key), []
        params = jax.vmap(lambda key: agent.init(key, t.obs)[0])(keys)
        one = jax.tree.map(lambda x: x[0], params)
        for rows in (8, 32):
            with monkeypatch.context() as patched:
                patched.setattr(gradients, "ROWS_OF_ONE_CORE", rows)
                found.append(derivatives(params, one, t, advantage))
        return found

    parts, whole = jax.device_get(both(t, floats["advantage"]))
    jax.tree.map(near, parts, whole)
    (_, log), *_ = whole
    assert (log["entropy"] > 0.5).all()


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.grad])
def test_coefficients_of_the_loss_have_derivatives(mode):
    """Of a minibatch of one part: meta-gradients by what a cost closes over."""
    x, y = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)

    def size(weight):
        def cost(params, x, y):
            return weight * jnp.mean((params * x - y) ** 2), ()

        return gradients.gradient(cost, 3.0, x, y)[0] ** 2

    found = quick_jit(lambda weight: (size(weight), mode(size)(weight)))(2.0)
    near(*jax.device_get(found))  # of 4 c and 2 * 2 c
