"""Faults that end an episode, rewards as they came, and numbers of episodes."""

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
class Breaking(CountEnv):
    """Counts; its third step terminates, and is NaN in observations or in rewards."""

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
def ended():
    """The trajectory of two lanes with faulty observations, two with rewards."""
    env = jax.tree.map(lambda x: np.repeat(x, B), Breaking())
    env = env.replace(breaks_obs=np.array([True, True, False, False]))
    lanes = envs.vectorize_each(envs.wrappers.TruncateOnNonFinite(env))
    return play(envs.NormalizeReward(lanes), T)[1]


def test_step_that_is_not_finite_ends_the_episode():
    trajectory = ended()
    faulty = trajectory.info["faulty"]
    np.testing.assert_array_equal(faulty, trajectory.episode_length == 3)
    np.testing.assert_array_equal(trajectory.truncated, faulty)
    assert not trajectory.terminated.any()
    assert not trajectory.reward[faulty].any()
    assert np.isfinite(trajectory.reward).all()
    # The last finite observation stands for the faulty one.
    assert (trajectory.next_obs[faulty] == 2).all()
    stats = jax.jit(rollout.summarize)(trajectory)
    assert (int(stats.num_nonfinite), float(stats.returns.mean)) == (0, 3.0)


class Halving(VectorWrapper):
    """A user's wrapper: halves the rewards that a learner sees."""

    def step(self, keys, state, action):
        result = self.env.step(keys, state, action)
        raw = result.reward if result.raw_reward is None else result.raw_reward
        return result.replace(reward=result.reward / 2, raw_reward=raw)


def test_returns_are_of_raw_rewards_whatever_scales_them():
    env = Halving(envs.NormalizeReward(Halving(envs.vectorize(CountEnv(), B))))
    rows = play(env, 9)[1]
    n = rows.episode_length
    np.testing.assert_array_equal(rows.info["raw_reward"], n)
    np.testing.assert_array_equal(rows.episode_return, n * (n + 1) / 2)


class Raw(CountEnv):
    def step(self, key, state, action):
        return super().step(key, state, action).replace(raw_reward=1.0)


def test_raw_reward_of_one_environment_is_refused():
    env = jax.tree_util.register_static(Raw)()
    with pytest.raises(ValueError, match="must leave `raw_reward` as None"):
        play(envs.vectorize(env, B), 1)
