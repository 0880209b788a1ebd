"""`vectorize`, `vectorize_each`, and custom vector environments."""

import jax
import jax.numpy as jnp
import numpy as np
from cases import CountEnv
from flax import struct
from suite_checks import play

import rollout
from rollout import envs


def test_vectorize_casts_rewards_and_flags():
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


def make_lanes(length, limit):
    """Returns lanes that terminate after `length` steps or truncate at `limit`."""
    env = CountEnv(min_length=length, max_length=length, limit=limit)
    return envs.vectorize_each(env, auto_reset="compact")


def test_lanes_have_separate_parameters():
    length, limit = np.array([3, 9, 2] * 6), np.array([9, 4, 9] * 6)
    _, trajectory = play(make_lanes(length, limit), 12)
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
    """A custom vector environment whose fields override members of the contract."""

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
        obs, truncated = state + self.speed, jnp.zeros(self.num_envs, bool)
        return envs.EnvStep(
            state=obs,
            obs=obs,
            reward=obs[:, 0],
            terminated=obs[:, 0] >= 4,
            truncated=truncated,
        )

    def reset_done(self, key_fn, done, lanes):
        state = jnp.where(done[:, None], 0.0, lanes.state)
        return lanes._replace(state=state, obs=state)


def test_custom_vector_env_has_defaults():
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
