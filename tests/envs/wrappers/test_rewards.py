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
    # The last finite observation stands for the faulty one.
    assert (trajectory.next_obs[faulty] == 2).all()
    stats = jax.jit(rollout.summarize)(trajectory)
    assert (int(stats.num_nonfinite), float(stats.returns.mean)) == (0, 3.0)


class Mending(VectorWrapper):
    """A user's wrapper: rewards that are not finite become 0, also in the returns."""

    def step(self, keys, state, action):
        result = self.env.step(keys, state, action)

        def mend(x):
            return jnp.where(jnp.isfinite(x), x, 0.0)

        raw_reward = mend(result.raw_reward)
        return result.replace(reward=mend(result.reward), raw_reward=raw_reward)


class Halving(VectorWrapper):
    """A user's wrapper: halves the rewards that a learner sees."""

    def step(self, keys, state, action):
        result = self.env.step(keys, state, action)
        raw = result.reward if result.raw_reward is None else result.raw_reward
        return result.replace(reward=result.reward / 2, raw_reward=raw)


def check_returns(rows):
    assert np.isfinite(rows.reward).all()
    # Rewards 1 and 2, then 0 in place of NaN.
    length = np.minimum(rows.episode_length, 2)
    np.testing.assert_array_equal(rows.episode_return, length * (length + 1) / 2)


def test_returns_are_of_raw_rewards_whatever_scales_and_mends_them():
    env = Halving(envs.vectorize(Breaking(breaks_obs=False), B))
    rows = play(Halving(Mending(envs.NormalizeReward(env))), 5)[1]
    check_returns(rows)
    np.testing.assert_array_equal(rows.info["raw_reward"][:2], [B * [1.0], B * [2.0]])


def test_rewards_of_faulty_steps_leave_the_returns_finite():
    check_returns(ended())


class Raw(CountEnv):
    def step(self, key, state, action):
        return super().step(key, state, action).replace(raw_reward=1.0)


def test_raw_reward_of_one_environment_is_refused():
    env = jax.tree_util.register_static(Raw)()
    with pytest.raises(ValueError, match="must leave `raw_reward` as None"):
        play(envs.vectorize(env, B), 1)


@struct.dataclass
class Levels(CountEnv):
    """Counts, and starts with the number of the episode as its observation."""

    number: jax.Array = -1

    def at_episode(self, number):
        return self.replace(number=number)

    def reset(self, key):
        state, _ = super().reset(key)
        state = {**state, "level": jnp.asarray(self.number, jnp.int32)}
        return state, jnp.full((1,), self.number, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("auto_reset", ["compact", "select"])
def test_environment_that_wants_it_learns_which_episode_it_starts(auto_reset):
    env = envs.vectorize(envs.TimeLimit(Levels(), 4), B, auto_reset=auto_reset)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    carry = collector.init(jax.random.key(0))
    np.testing.assert_array_equal(carry.obs[:, 0], np.arange(B))
    for first in (0, 11):
        carry, episodes = collector.collect_episodes(
            carry, None, 11, max_episode_steps=9, return_trajectory=True
        )
        rows = episodes.trajectory
        np.testing.assert_array_equal(rows.obs[0, :, 0], first + np.arange(11))
    carry, trajectory = collector.collect_steps(carry, None, T)
    level = np.asarray(trajectory.obs[..., 0])[np.asarray(trajectory.first)]
    ids = np.asarray(trajectory.episode_id)[np.asarray(trajectory.first)]
    np.testing.assert_array_equal(level, ids)
