"""The replay of a memory over recorded rows is what the collector computed."""

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
def played():
    """The state before some rows, the rows, and the state after them."""
    env = envs.vectorize(CountEnv(), B)
    policy = rollout.recurrent_policy(act, empty)
    collector = rollout.Collector(env=env, policy=policy)
    carry, _ = collector.collect_steps(collector.init(jax.random.key(0)), (), 3)
    after, t = collector.collect_steps(carry, (), T)
    return jax.device_get((carry.policy_state, t, after.policy_state))


def test_replay_gives_what_the_policy_computed(played):
    start, t, after = played
    assert t.first[1:].any()
    state, out = unroll(core, start, t.obs, t.first, empty)
    jax.tree.map(np.testing.assert_array_equal, out, t.extras["out"])
    # The collector has reset the lanes whose last row ended an episode.
    going = ~t.done[-1]
    np.testing.assert_array_equal(state["sum"][going], after["sum"][going])
    np.testing.assert_array_equal(state["all"].value, after["all"].value)


def test_replay_leaves_the_memory_where_nobody_acts(played):
    start, t, _ = played
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


def test_no_gradient_passes_the_end_of_an_episode(played):
    _, t, _ = played

    def last(start):
        start = {"sum": start, "all": Persistent(jnp.zeros(B))}
        return unroll(core, start, t.obs, t.first, empty)[0]["sum"].sum()

    slope = jax.grad(last)(jnp.zeros(B))
    ended = t.first.any(axis=0)
    assert ended.any()
    np.testing.assert_allclose(slope, np.where(ended, 0.0, 0.5**T))


def test_keys_of_episodes_cannot_be_replayed(played):
    start, t, _ = played
    rows = t.obs, t.first
    keys = EpisodeKey(jax.random.split(jax.random.key(0), B))
    with pytest.raises(ValueError, match="different types"):
        unroll(core, (start, keys), *rows, lambda n: (empty(n), EpisodeKey()))
