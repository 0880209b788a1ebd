"""Compact auto-reset: exact for any number of done lanes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, raw

from envs import auto_reset, keys
from envs.types import RESET, Lanes

pytestmark = pytest.mark.usefixtures("key_reuse")


def make_lanes(num_envs):
    env = CountEnv()
    root = jax.random.key(1)
    lane_keys = keys.fold_in(root, jnp.arange(num_envs))
    state, _ = jax.vmap(env.reset)(lane_keys)
    step = jax.vmap(env.step)(lane_keys, state, jnp.zeros(num_envs, jnp.int32))
    lanes = Lanes(episode_key=lane_keys, state=step.state, obs=step.obs)
    fresh_root = jax.random.key(2)

    def start(env, lane):
        key = keys.fold_in(fresh_root, lane)
        state, obs = jax.vmap(env.reset)(keys.fold_in(key, RESET))
        return Lanes(episode_key=key, state=state, obs=obs)

    return env, start, lanes


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


@pytest.mark.parametrize("num_envs", [1, 33, 100])
def test_compact_equals_select_for_every_number_of_done_lanes(num_envs):
    env, start, lanes = make_lanes(num_envs)
    compact, select = (
        jax.jit(lambda done, reset=reset: raw(reset(env, start, done, lanes)))
        for reset in (auto_reset.reset_compact, auto_reset.reset_select)
    )
    for done in patterns(num_envs):
        got = compact(done)
        chex.assert_trees_all_equal(got, select(done))
        # And both did what they should: fresh counters where done, others untouched.
        np.testing.assert_array_equal(got.state["n"], np.where(done, 0, 1))
        changed = (got.episode_key != raw(lanes.episode_key)).any(axis=1)
        np.testing.assert_array_equal(changed, done)


@pytest.mark.parametrize("num_envs", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_first_true_finds_positions_in_order(num_envs, size):
    find = jax.jit(lambda flag: auto_reset._first_true(flag, size))
    for flag in patterns(num_envs):
        position, found = (np.asarray(x) for x in find(flag))
        want = np.flatnonzero(flag)[:size]
        np.testing.assert_array_equal(position[: len(want)], want)
        np.testing.assert_array_equal(found, np.arange(size) < len(want))
        assert (position >= 0).all()
        assert (position < num_envs).all()
