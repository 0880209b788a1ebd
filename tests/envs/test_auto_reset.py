"""Auto-reset strategies: equal results for any number of finished lanes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit, raw

from rollout.base import prng, trees
from rollout.envs import auto_reset
from rollout.envs.types import Lanes

pytestmark = pytest.mark.usefixtures("key_reuse")
slow = pytest.mark.slow


def done_patterns(num_envs):
    """Yields done flags with 0, 1, K, K + 1 and all lanes in several positions."""
    num_slots = max(1, num_envs // 16)
    rng = np.random.default_rng(0)
    for count in sorted({0, 1, num_slots, num_slots + 1, num_envs}):
        if count <= num_envs:
            yield np.arange(num_envs) < count
            yield np.arange(num_envs) >= num_envs - count
            yield np.isin(np.arange(num_envs), rng.permutation(num_envs)[:count])
    for chance in (0.05, 0.5, 0.95):
        yield rng.random(num_envs) < chance


# The sizes need one or several words of 32 flags, and have slots of 1, 2 and 6 lanes.
@pytest.mark.parametrize(
    "num_envs", [1, pytest.param(32, marks=slow), 33, pytest.param(100, marks=slow)]
)
def test_strategies_reset_done_lanes_only(num_envs):
    lane = np.arange(num_envs, dtype=np.int32)
    lanes = Lanes(episode_key=lane, state=lane + 1000, obs=lane[:, None] * np.ones(2))

    def reset_lanes(env, lane_indices):
        lane = jnp.arange(num_envs, dtype=jnp.int32)[lane_indices]
        obs = -lane[:, None] * jnp.ones((1, 2))
        return Lanes(episode_key=lane + env, state=lane + 2 * env, obs=obs)

    def reset(done):
        results = [
            auto_reset.reset(strategy, 5000, reset_lanes, done, lanes)
            for strategy in auto_reset.BY_NAME
        ]
        switched = auto_reset.switch(done, functools.partial(reset_lanes, 5000), lanes)
        return [*results, switched]

    done = np.stack(list(done_patterns(num_envs)))
    # One program loops over all patterns.
    for got in quick_jit(lambda done: jax.lax.map(reset, done))(done):
        key = np.where(done, lane + 5000, lane)
        np.testing.assert_array_equal(got.episode_key, key)
        state = lane + np.where(done, 10_000, 1000)
        np.testing.assert_array_equal(got.state, state)
        sign = np.where(done, -1.0, 1.0)[:, :, None]
        np.testing.assert_array_equal(got.obs, sign * np.asarray(lanes.obs)[None])


def test_gradients_flow_through_unfinished_lanes():
    done = np.array([False, True, False])

    def reset_lanes(env, lane):
        return Lanes(episode_key=lane, state=lane.astype(jnp.float32), obs=lane)

    def total(state):
        lane = jnp.arange(3)
        lanes = Lanes(episode_key=lane, state=state, obs=lane)
        reset = auto_reset.reset("compact", (), reset_lanes, done, lanes)
        return reset.state @ jnp.ones(3)

    mapped_grad = jax.vmap(jax.value_and_grad(total))  # two members
    value, slope = jax.jit(mapped_grad)(jnp.full((2, 3), 10.0))
    np.testing.assert_array_equal(value, 2 * [10.0 + 1.0 + 10.0])
    np.testing.assert_array_equal(slope, 2 * [[1.0, 0.0, 1.0]])
    jvp_fn = jax.jit(lambda x: jax.jvp(jax.vmap(total), (x,), (jnp.ones((2, 3)),)))
    np.testing.assert_array_equal(jvp_fn(jnp.full((2, 3), 10.0))[1], [2.0, 2.0])


def reset_member_lanes(env, lane_indices):
    lane = jnp.arange(33, dtype=jnp.int32)[lane_indices]
    state = env["scale"] * lane + env["table"][lane % 3]
    return Lanes(prng.fold_in(env["key"], lane), state, lane)


def reset_unwrapped_lanes(env, lane_indices):
    return trees.unwrap_keys(reset_member_lanes(env, lane_indices))


@pytest.mark.parametrize(
    "mapped_axes", [pytest.param("all", marks=slow), "lanes", "parameters", "twice"]
)
def test_strategies_agree_under_vmap(mapped_axes):
    rng = np.random.default_rng(0)
    shape = (2, 3) if mapped_axes == "twice" else (3,)
    done = np.stack([rng.random((*shape, 33)) < chance for chance in (0.0, 0.1, 0.9)])
    members_by_step = {
        "lanes": (done, rng.random((3, *shape, 33), np.float32)),
        "env": {
            "scale": np.arange(3 * np.prod(shape)).reshape(3, *shape),
            "table": rng.random((3, *shape, 3), np.float32),
            "key": jax.random.split(jax.random.key(0), (3, *shape)),
        },
    }
    shared = {"lanes": "env", "parameters": "lanes"}.get(mapped_axes)
    axes = {name: None if name == shared else 0 for name in members_by_step}

    def reset(strategy, members):
        (done, state), env = members["lanes"], members["env"]
        lane = jnp.arange(33, dtype=jnp.int32)
        lanes = Lanes(prng.fold_in(jax.random.key(1), lane), state, lane)
        if strategy == "switch":
            reset_fn = functools.partial(reset_unwrapped_lanes, env)
            switch = auto_reset.merge_mapped(auto_reset.switch)
            return switch(done, reset_fn, trees.unwrap_keys(lanes))
        return raw(auto_reset.reset(strategy, env, reset_member_lanes, done, lanes))

    def run_strategies(members):
        if shared:
            members = {**members, shared: jax.tree.map(lambda x: x[0], members[shared])}
        results = []
        for strategy in (*sorted(auto_reset.BY_NAME, reverse=True), "switch"):
            reset_fn = jax.vmap(functools.partial(reset, strategy), (axes,))
            if mapped_axes == "twice":
                reset_fn = jax.vmap(reset_fn)
            results.append(reset_fn(members))
        return results

    # One program loops over all flags.
    run = quick_jit(lambda members: jax.lax.map(run_strategies, members))
    select, *other_results = run(members_by_step)
    for result in other_results:
        chex.assert_trees_all_equal(result, select)


def test_vmapped_reset_skips_members_without_done_lanes():
    reset_lane_indices = []

    def reset_lanes(env, lane):
        jax.debug.callback(reset_lane_indices.append, lane[0])
        return Lanes(lane, lane, lane)

    def reset(done):
        lane = jnp.arange(32, dtype=jnp.int32)
        return auto_reset.reset(
            "compact", (), reset_lanes, done, Lanes(lane, lane, lane)
        )

    # Eight lanes of one member finish. The slots are 8 of 128 lanes, or 2 of 32 lanes.
    done = np.zeros((4, 32), bool)
    done[2, 5:13] = True
    jax.block_until_ready(jax.jit(jax.vmap(reset))(done))
    jax.effects_barrier()
    assert sorted(map(int, reset_lane_indices)) == list(range(5, 13))
