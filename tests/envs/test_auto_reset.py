"""Compact auto-reset: exact for any number of done lanes."""

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


# One word of 32 flags and several, and 1, 2 and 6 lanes at a time.
@pytest.mark.parametrize("num_envs", [1, 32, 33, 100])
def test_every_way_resets_the_done_lanes_and_no_other(num_envs):
    lane = np.arange(num_envs, dtype=np.int32)
    lanes = Lanes(episode_key=lane, state=lane + 1000, obs=lane[:, None] * np.ones(2))

    def start(env, some):
        lane = jnp.arange(num_envs, dtype=jnp.int32)[some]
        obs = -lane[:, None] * jnp.ones((1, 2))
        return Lanes(episode_key=lane + env, state=lane + 2 * env, obs=obs)

    def reset(done):
        ways = [
            auto_reset.reset(way, 5000, start, done, lanes)
            for way in auto_reset.BY_NAME
        ]
        switched = auto_reset.switch(done, lambda at: start(5000, at), lanes)
        return [*ways, switched]

    done = np.stack(list(patterns(num_envs)))
    # One program for all patterns, which come one after the other as steps do.
    for got in quick_jit(lambda done: jax.lax.map(reset, done))(done):
        key = np.where(done, lane + 5000, lane)
        np.testing.assert_array_equal(got.episode_key, key)
        state = lane + np.where(done, 10_000, 1000)
        np.testing.assert_array_equal(got.state, state)
        sign = np.where(done, -1.0, 1.0)[:, :, None]
        np.testing.assert_array_equal(got.obs, sign * np.asarray(lanes.obs)[None])


def test_derivatives_pass_through_the_lanes_that_are_not_done():
    done = np.array([False, True, False])

    def start(env, lane):
        return Lanes(episode_key=lane, state=lane.astype(jnp.float32), obs=lane)

    def total(state):
        lane = jnp.arange(3)
        lanes = Lanes(episode_key=lane, state=state, obs=lane)
        reset = auto_reset.reset("compact", (), start, done, lanes)
        return reset.state @ jnp.ones(3)

    every = jax.vmap(jax.value_and_grad(total))  # each of two members
    value, slope = jax.jit(every)(jnp.full((2, 3), 10.0))
    np.testing.assert_array_equal(value, 2 * [10.0 + 1.0 + 10.0])
    np.testing.assert_array_equal(slope, 2 * [[1.0, 0.0, 1.0]])
    forward = jax.jit(lambda x: jax.jvp(jax.vmap(total), (x,), (jnp.ones((2, 3)),)))
    np.testing.assert_array_equal(forward(jnp.full((2, 3), 10.0))[1], [2.0, 2.0])


def start_member(env, at):
    lane = jnp.arange(33, dtype=jnp.int32)[at]
    state = env["scale"] * lane + env["table"][lane % 3]
    return Lanes(prng.fold_in(env["key"], lane), state, lane)


@pytest.mark.parametrize("mapped", ["all", "lanes", "parameters", "twice"])
def test_members_under_vmap_are_reset_as_each_alone(mapped):
    rng = np.random.default_rng(0)
    shape = (2, 3) if mapped == "twice" else (3,)
    done = np.stack([rng.random((*shape, 33)) < chance for chance in (0.0, 0.1, 0.9)])
    every = {
        "lanes": (done, rng.random((3, *shape, 33), np.float32)),
        "env": {
            "scale": np.arange(3 * np.prod(shape)).reshape(3, *shape),
            "table": rng.random((3, *shape, 3), np.float32),
            "key": jax.random.split(jax.random.key(0), (3, *shape)),
        },
    }
    shared = {"lanes": "env", "parameters": "lanes"}.get(mapped)
    axes = {name: None if name == shared else 0 for name in every}

    def reset(way, members):
        (done, state), env = members["lanes"], members["env"]
        lane = jnp.arange(33, dtype=jnp.int32)
        lanes = Lanes(prng.fold_in(jax.random.key(1), lane), state, lane)
        if way == "switch":
            start = lambda at: trees.unwrap_keys(start_member(env, at))  # noqa: E731
            switch = auto_reset.merge_mapped(auto_reset.switch)
            return switch(done, start, trees.unwrap_keys(lanes))
        return raw(auto_reset.reset(way, env, start_member, done, lanes))

    def both(members):
        if shared:
            members = {**members, shared: jax.tree.map(lambda x: x[0], members[shared])}
        found = []
        for way in (*sorted(auto_reset.BY_NAME, reverse=True), "switch"):
            each = jax.vmap(functools.partial(reset, way), (axes,))
            found.append((jax.vmap(each) if mapped == "twice" else each)(members))
        return found

    # One program for all flags, which come one after the other as steps do.
    select, *others = quick_jit(lambda every: jax.lax.map(both, every))(every)
    for other in others:
        chex.assert_trees_all_equal(other, select)


def test_members_without_a_done_lane_cost_no_reset():
    computed = []

    def start(env, lane):
        jax.debug.callback(computed.append, lane[0])
        return Lanes(lane, lane, lane)

    def reset(done):
        lane = jnp.arange(32, dtype=jnp.int32)
        return auto_reset.reset("compact", (), start, done, Lanes(lane, lane, lane))

    # 8 lanes of one member of four: 8 of all 128 are computed at a time, and 2 of 32.
    done = np.zeros((4, 32), bool)
    done[2, 5:13] = True
    jax.block_until_ready(jax.jit(jax.vmap(reset))(done))
    jax.effects_barrier()
    assert sorted(map(int, computed)) == list(range(5, 13))
