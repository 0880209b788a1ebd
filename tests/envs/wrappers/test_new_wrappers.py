"""Rewards on a common scale, the previous step in view, faults that end an episode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit
from flax import struct

import rollout
from rollout import envs
from rollout.envs.wrappers.wrapper import VectorWrapper

B, T, GAMMA = 4, 30, 0.9


def collect(env, num_steps=T, seed=0):
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)

    @quick_jit
    def run(key):
        return collector.collect_steps(collector.init(key), None, num_steps)

    return jax.device_get(run(jax.random.key(seed)))


def plain_scales(raw, done):
    """The scales that a plain loop over NumPy numbers gives, in float64."""
    count, mean, var, total = 1e-4, 0.0, 1.0, np.zeros(B)
    scales = []
    for reward, over in zip(raw, done, strict=True):
        total = GAMMA * total + reward
        delta, all_seen = total.mean() - mean, count + B
        second = var * count + total.var() * B + delta**2 * count * B / all_seen
        mean, var, count = mean + delta * B / all_seen, second / all_seen, all_seen
        scales.append(np.sqrt(var + 1e-8))
        total = np.where(over, 0.0, total)
    return np.array(scales)[:, None]


@pytest.mark.slow
def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    inner = envs.vectorize(CountEnv(), B)
    carry, got = collect(envs.NormalizeReward(inner, gamma=GAMMA))
    _, plain = collect(inner)
    np.testing.assert_array_equal(got.info["raw_reward"], plain.reward)
    np.testing.assert_array_equal(got.obs, plain.obs)
    scales = plain_scales(np.asarray(plain.reward, np.float64), np.asarray(plain.done))
    # Float32 against float64, over thirty updates.
    np.testing.assert_allclose(got.reward, plain.reward / scales, rtol=1e-4)
    frozen = envs.NormalizeReward(inner, gamma=GAMMA).freeze(carry.env_state)
    end, later = collect(frozen, seed=1)
    np.testing.assert_array_equal(
        end.env_state.statistics.value.var, carry.env_state.statistics.value.var
    )
    scale = later.info["raw_reward"] / later.reward
    np.testing.assert_allclose(scale, scales[-1, 0], rtol=1e-4)


@struct.dataclass
class Breaking(CountEnv):
    """Counts, and is NaN from its third step on in observations, or in rewards."""

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
        )


@functools.cache
def ended():
    """The trajectory of two lanes with faulty observations, two with rewards."""
    env = jax.tree.map(lambda x: np.repeat(x, B), Breaking())
    env = env.replace(breaks_obs=np.array([True, True, False, False]))
    lanes = envs.vectorize_each(envs.EndOnFault(env), B)
    return collect(envs.NormalizeReward(lanes))[1]


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
    rows = collect(Halving(Mending(envs.NormalizeReward(env))), 5)[1]
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
        collect(envs.vectorize(env, B), 1)


@pytest.mark.slow
def test_one_nan_does_not_poison_the_statistics():
    env = envs.NormalizeObs(envs.vectorize(Breaking(), B))
    carry, trajectory = collect(env, 2)
    state = carry.env_state
    assert np.isfinite(state.statistics.value.mean).all()
    carry, trajectory = collect(env)
    assert np.isnan(trajectory.next_obs).any()
    assert np.isfinite(carry.env_state.statistics.value.mean).all()
    assert np.isfinite(carry.env_state.statistics.value.var).all()


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
        carry, rows, _ = collector.collect_padded_episodes(
            carry, None, 11, max_length=9
        )
        np.testing.assert_array_equal(rows.obs[0, :, 0], first + np.arange(11))
    carry, trajectory = collector.collect_steps(carry, None, T)
    level = np.asarray(trajectory.obs[..., 0])[np.asarray(trajectory.first)]
    ids = np.asarray(trajectory.episode_id)[np.asarray(trajectory.first)]
    np.testing.assert_array_equal(level, ids)
