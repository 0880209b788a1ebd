"""One environment becomes B of them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit, raw
from flax import struct
from suite_checks import play

import rollout
from rollout import envs


def test_rewards_and_flags_are_cast_and_nothing_stays_weakly_typed():
    env = envs.vectorize(CountEnv(), 2)

    def play(key):
        reset_keys, step_keys = jax.random.split(key, (2, 2))
        state, obs = env.reset(reset_keys)
        return state, obs, env.step(step_keys, state, jnp.zeros(2, jnp.int32))

    state, obs, step = jax.eval_shape(play, jax.random.key(0))
    assert step.reward.dtype == jnp.float32
    assert step.terminated.dtype == step.truncated.dtype == bool
    state.pop("key"), step.state.pop("key")
    assert not any(x.weak_type for x in jax.tree.leaves((state, obs, step)))


def of_each(length, limit):
    """Lanes that terminate after a length, which a reset sets, or stop at a limit."""
    every = CountEnv(min_length=length, max_length=length, limit=limit)
    return envs.vectorize_each(every, auto_reset="compact")


def test_every_lane_has_parameters_of_its_own():
    length, limit = np.array([3, 9, 2] * 6), np.array([9, 4, 9] * 6)
    _, trajectory = play(of_each(length, limit), 12)
    step = np.arange(1, 13)[:, None]  # a multiple of 2, 3 and 4
    length, limit = length[None], limit[None]
    np.testing.assert_array_equal(
        trajectory.terminated, (step % length == 0) & (length < limit)
    )
    np.testing.assert_array_equal(
        trajectory.truncated, (step % limit == 0) & (limit < length)
    )
    steps = (step - 1) % np.minimum(length, limit) + 1
    np.testing.assert_array_equal(trajectory.episode_length, steps)


class Ramp(struct.PyTreeNode, envs.types.VectorEnv):
    """Lanes of one's own that subclass the contract, with fields of its names."""

    speed: jax.Array
    num_envs: int = struct.field(pytree_node=False)
    action_space: envs.Discrete = struct.field(
        pytree_node=False, default=envs.Discrete(2)
    )

    @property
    def observation_space(self):
        return envs.Box(0.0, jnp.inf, (1,))

    def reset(self, keys):
        obs = jnp.zeros((self.num_envs, 1))
        return obs, obs

    def step(self, keys, state, action):
        obs, no = state + self.speed, jnp.zeros(self.num_envs, bool)
        return envs.EnvStep(
            state=obs,
            obs=obs,
            reward=obs[:, 0],
            terminated=obs[:, 0] >= 4,
            truncated=no,
        )

    def reset_done(self, key_fn, done, lanes):
        state = jnp.where(done[:, None], 0.0, lanes.state)
        return lanes._replace(state=state, obs=state)


def test_a_class_of_ones_own_has_the_defaults_of_the_contract():
    env = Ramp(jnp.float32(2.0), num_envs=3)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    carry, rows = collector.collect_steps(collector.init(jax.random.key(0)), None, 4)
    np.testing.assert_array_equal(rows.reward[:, 0], [2.0, 4.0, 2.0, 4.0])
    assert collector.freeze(carry) is collector
    assert not env.learns
    assert env.sharding is None
    assert env.normalize_obs(5) == 5
    normalized = envs.NormalizeObs(env)
    assert normalized.learns
    assert normalized.num_envs == 3


@pytest.mark.usefixtures("key_reuse")
def test_lanes_with_equal_parameters_are_those_of_vectorize():
    each = of_each(np.full(4, 9), np.full(4, 5))
    same = envs.vectorize(CountEnv(min_length=9, max_length=9, limit=5), 4)
    assert each.action_space == same.action_space

    @quick_jit
    def run(keys):
        results = []
        for env in (each, same):
            state, obs = env.reset(keys)
            step = env.step(keys, state, jnp.arange(4) % 3)
            lanes = envs.types.Lanes(episode_key=keys, state=step.state, obs=step.obs)
            fresh = env.reset_done(lambda lane: keys[lane], jnp.arange(4) < 2, lanes)
            results.append(raw((obs, step, fresh)))
        return results

    chex.assert_trees_all_equal(*run(jax.random.split(jax.random.key(0), 4)))
