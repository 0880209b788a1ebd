"""Compact auto-reset: exact for any number of done lanes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit, raw

from rollout.envs import auto_reset, masked_update, prng
from rollout.envs.types import RESET, Lanes

pytestmark = pytest.mark.usefixtures("key_reuse")


def patterns(num_envs):
    """Done flags with 0, 1, K, K + 1 and all lanes, at both ends and at random."""
    num_slots = max(1, num_envs // 16)
    rng = np.random.default_rng(0)
    for count in sorted({0, 1, num_slots, num_slots + 1, num_envs}):
        if count <= num_envs:
            yield np.arange(num_envs) < count
            yield np.arange(num_envs) >= num_envs - count
            yield np.isin(np.arange(num_envs), rng.permutation(num_envs)[:count])
    for chance in (0.05, 0.5, 0.95):
        yield rng.random(num_envs) < chance


# Below, at and above the words of 32 flags, and 1, 2, 4 and 6 lanes at a time.
@pytest.mark.parametrize("num_envs", [1, 31, 32, 33, 64, 100])
def test_compact_resets_the_done_lanes_and_no_other(num_envs):
    lane = np.arange(num_envs, dtype=np.int32)
    lanes = Lanes(episode_key=lane, state=lane + 1000, obs=lane[:, None] * np.ones(2))

    def start(env, lane):
        obs = -lane[:, None] * jnp.ones((1, 2))
        return Lanes(episode_key=lane + env, state=lane + 2 * env, obs=obs)

    done = np.stack(list(patterns(num_envs)))
    reset = lambda done: auto_reset.reset("compact", 5000, start, done, lanes)  # noqa: E731
    # One program for all patterns, which come one after the other as steps do.
    got = quick_jit(lambda done: jax.lax.map(reset, done))(done)
    np.testing.assert_array_equal(got.episode_key, np.where(done, lane + 5000, lane))
    np.testing.assert_array_equal(got.state, lane + np.where(done, 10_000, 1000))
    sign = np.where(done, -1.0, 1.0)[:, :, None]
    np.testing.assert_array_equal(got.obs, sign * np.asarray(lanes.obs)[None])


def test_all_ways_are_equal_bit_for_bit_with_typed_keys():
    num_envs = 33  # two at a time
    env, lane = CountEnv(), jnp.arange(num_envs)

    def start(env, some):
        key = prng.fold_in(jax.random.key(2), lane[some])
        state, obs = jax.vmap(env.reset)(prng.fold_in(key, RESET))
        return Lanes(episode_key=key, state=state, obs=obs)

    @quick_jit
    def both(done):
        lane_keys = prng.fold_in(jax.random.key(1), lane)
        state, _ = jax.vmap(env.reset)(lane_keys)
        step = jax.vmap(env.step)(lane_keys, state, jnp.zeros(num_envs, jnp.int32))
        lanes = Lanes(episode_key=lane_keys, state=step.state, obs=step.obs)

        def one(done):
            switched = masked_update.switch(done, lambda at: start(env, at), lanes)
            ways = [
                auto_reset.reset(way, env, start, done, lanes)
                for way in ("select", "compact", "auto")
            ]
            return [raw(lanes) for lanes in (*ways, switched)]

        return jax.lax.map(one, done), raw(lanes.episode_key)

    done = np.stack(list(patterns(num_envs)))
    (select, *others), before = both(done)
    for other in others:
        chex.assert_trees_all_equal(other, select)
    # And both did what they should: fresh counters where done, others untouched.
    np.testing.assert_array_equal(select.state["n"], np.where(done, 0, 1))
    changed = (select.episode_key != np.asarray(before)[None]).any(axis=-1)
    np.testing.assert_array_equal(changed, done)


def test_derivatives_pass_through_the_lanes_that_are_not_done():
    done = np.array([False, True, False])

    def start(env, lane):
        return Lanes(episode_key=lane, state=lane.astype(jnp.float32), obs=lane)

    def total(state):
        lane = jnp.arange(3)
        lanes = Lanes(episode_key=lane, state=state, obs=lane)
        reset = auto_reset.reset("compact", (), start, done, lanes)
        return reset.state @ jnp.ones(3)

    value, slope = jax.jit(jax.value_and_grad(total))(jnp.full(3, 10.0))
    assert value == 10.0 + 1.0 + 10.0
    np.testing.assert_array_equal(slope, [1.0, 0.0, 1.0])
