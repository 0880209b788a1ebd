"""Compares `unroll` over recorded rows with the collector."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv

import rollout
from rollout import envs
from rollout.policies import unroll
from rollout.types import EpisodeKey, Persistent

B, T = 4, 16


def empty(num_envs):
    return {"sum": jnp.zeros(num_envs), "all": Persistent(jnp.zeros(num_envs))}


def core(state, obs):
    total = 0.5 * state["sum"] + obs[:, 0] + 1
    count = state["all"].value + 1
    return {"sum": total, "all": Persistent(count)}, (total, count)


def act(params, obs, state, key):
    state, out = core(state, obs)
    return jnp.zeros(len(obs), jnp.int32), state, {"out": out}


@pytest.fixture(scope="module")
def recorded():
    """Returns the first policy state, the rows and the last policy state."""
    env = envs.vectorize(CountEnv(), B)
    policy = rollout.recurrent_policy(act, empty)
    collector = rollout.Collector(env=env, policy=policy)
    carry, _ = collector.collect_steps(collector.init(jax.random.key(0)), (), 3)
    next_carry, t = collector.collect_steps(carry, (), T)
    return jax.device_get((carry.policy_state, t, next_carry.policy_state))


def test_unroll_equals_the_collected_outputs(recorded):
    start, t, policy_state = recorded
    assert t.first[1:].any()
    state, out = unroll(core, start, t.obs, t.first, empty)
    jax.tree.map(np.testing.assert_array_equal, out, t.extras["out"])
    # The collector resets lanes whose last row ends an episode.
    continues = ~t.done[-1]
    np.testing.assert_array_equal(
        state["sum"][continues], policy_state["sum"][continues]
    )
    np.testing.assert_array_equal(state["all"].value, policy_state["all"].value)


def test_unroll_keeps_the_memory_of_idle_agents(recorded):
    start, t, _ = recorded
    acting = np.random.default_rng(0).random((T, B)) < 0.6
    rows = t.obs, t.first, empty
    _, (out, count) = unroll(core, start, *rows, acting=jnp.asarray(acting))
    total, number = np.asarray(start["sum"]), np.asarray(start["all"].value)
    for row in range(T):
        total = np.where(t.first[row], 0, total)
        got = 0.5 * total + t.obs[row, :, 0] + 1
        np.testing.assert_allclose(out[row], got)
        np.testing.assert_array_equal(count[row], number + 1)
        total = np.where(acting[row], got, total)
        number = np.where(acting[row], number + 1, number)


def test_gradients_stop_at_episode_boundaries(recorded):
    _, t, _ = recorded

    def final_sum(start):
        start = {"sum": start, "all": Persistent(jnp.zeros(B))}
        return unroll(core, start, t.obs, t.first, empty)[0]["sum"].sum()

    gradient = jax.grad(final_sum)(jnp.zeros(B))
    has_boundary = t.first.any(axis=0)
    assert has_boundary.any()
    np.testing.assert_allclose(gradient, np.where(has_boundary, 0.0, 0.5**T))


def test_unroll_rejects_episode_keys(recorded):
    start, t, _ = recorded
    rows = t.obs, t.first
    keys = EpisodeKey(jax.random.split(jax.random.key(0), B))
    with pytest.raises(ValueError, match="different types"):
        unroll(core, (start, keys), *rows, lambda n: (empty(n), EpisodeKey()))
