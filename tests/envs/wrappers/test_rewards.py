"""Truncation of nonfinite steps, and raw rewards of reward wrappers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv
from flax import struct
from suite_checks import play

import rollout
from rollout import envs
from rollout.envs.wrappers.wrapper import VectorWrapper

B, T = 4, 30


@struct.dataclass
class NonfiniteEnv(CountEnv):
    """Counts; the third step terminates and returns a NaN observation or reward."""

    breaks_obs: bool = True
    limit: int = 100
    min_length: int = 50
    max_length: int = 60

    def step(self, key, state, action):
        result, is_late = super().step(key, state, action), state["n"] >= 2
        is_bad, reward = is_late & self.breaks_obs, jnp.float32(result.reward)
        return result.replace(
            obs=jnp.where(is_bad, jnp.nan, result.obs),
            reward=jnp.where(is_late & ~is_bad, jnp.nan, reward),
            terminated=is_late,
        )


@functools.cache
def play_faulty():
    """Returns rows of two lanes with NaN observations and two with NaN rewards."""
    env = jax.tree.map(lambda x: np.repeat(x, B), NonfiniteEnv())
    env = env.replace(breaks_obs=np.array([True, True, False, False]))
    lanes = envs.vectorize_each(envs.wrappers.TruncateOnNonFinite(env))
    return play(envs.NormalizeReward(lanes), T)[1]


def test_nonfinite_step_truncates():
    trajectory = play_faulty()
    faulty = trajectory.info["faulty"]
    np.testing.assert_array_equal(faulty, trajectory.episode_length == 3)
    np.testing.assert_array_equal(trajectory.truncated, faulty)
    assert not trajectory.terminated.any()
    assert not trajectory.reward[faulty].any()
    assert np.isfinite(trajectory.reward).all()
    # The last finite observation replaces the nonfinite observation.
    assert (trajectory.next_obs[faulty] == 2).all()
    stats = jax.jit(rollout.summarize)(trajectory)
    assert (int(stats.num_nonfinite), float(stats.returns.mean)) == (0, 3.0)


class HalveReward(VectorWrapper):
    """A custom wrapper that halves rewards and keeps raw rewards."""

    def step(self, keys, state, action):
        result = self.env.step(keys, state, action)
        raw = result.reward if result.raw_reward is None else result.raw_reward
        return result.replace(reward=result.reward / 2, raw_reward=raw)


def test_returns_use_raw_rewards():
    env = HalveReward(envs.NormalizeReward(HalveReward(envs.vectorize(CountEnv(), B))))
    rows = play(env, 9)[1]
    n = rows.episode_length
    np.testing.assert_array_equal(rows.info["raw_reward"], n)
    np.testing.assert_array_equal(rows.episode_return, n * (n + 1) / 2)


class RawRewardEnv(CountEnv):
    def step(self, key, state, action):
        return super().step(key, state, action).replace(raw_reward=1.0)


def test_raw_reward_of_single_environment_raises():
    env = jax.tree_util.register_static(RawRewardEnv)()
    with pytest.raises(ValueError, match="`raw_reward`"):
        play(envs.vectorize(env, B), 1)
