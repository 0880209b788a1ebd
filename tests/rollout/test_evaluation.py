"""Compares `evaluate` with NumPy and SciPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, make_episodes
from scipy import stats as scipy_stats

import rollout
from rollout import envs

NUM_EPISODES = 12


def make_collector(policy=None, **params):
    env = envs.vectorize(CountEnv(**params), 4, auto_reset="select")
    policy = policy or rollout.random_policy(env.action_space)
    return rollout.Collector(env=env, policy=policy)


@pytest.fixture(scope="module")
def collector():
    return make_collector()


def test_evaluate_equals_collect_episodes(collector):
    key = jax.random.key(1)
    evaluated = rollout.evaluate(collector, None, key, NUM_EPISODES)
    carry = collector.init(key)
    _, episodes = collector.collect_episodes(
        carry, None, NUM_EPISODES, max_episode_steps=10**9
    )
    expected = jax.jit(rollout.summarize)(episodes)
    chex.assert_trees_all_close(evaluated, expected, rtol=1e-6)
    assert evaluated.num_episodes == NUM_EPISODES
    assert evaluated.num_terminated == np.asarray(episodes.terminated).sum()
    assert evaluated.num_unfinished == evaluated.num_nonfinite == 0
    assert evaluated.num_steps == np.asarray(episodes.episode_length).sum()
    returns = np.asarray(episodes.episode_return, np.float64)
    for stat in ("mean", "std", "min", "max"):
        got, want = getattr(evaluated.returns, stat), getattr(returns, stat)()
        np.testing.assert_allclose(got, want, rtol=1e-6)  # sums of a dozen float32


def test_every_lane_plays_equally_often_if_lanes_differ():
    """Episodes of lane i have 2 + i steps; step n has the reward n."""
    length = np.arange(2, 6)
    env = CountEnv(min_length=length, max_length=length, limit=np.full(4, 100))
    env = envs.NormalizeReward(envs.vectorize_each(env, auto_reset="select"))
    collector = rollout.Collector(
        env=env, policy=rollout.random_policy(env.action_space)
    )
    stats = rollout.evaluate(collector, None, jax.random.key(0), 8)
    returns = [n * (n + 1) / 2 for n in length] * 2
    assert stats.num_episodes == 8
    assert stats.num_steps == 2 * length.sum()
    np.testing.assert_allclose(stats.returns.mean, np.mean(returns), rtol=1e-6)
    np.testing.assert_allclose(stats.returns.std, np.std(returns), rtol=1e-6)
    with pytest.raises(ValueError, match=r"multiple of the 4 lanes.*got 6\. Pass 8"):
        rollout.evaluate(collector, None, jax.random.key(0), 6)


def test_frozen_normalization_reports_raw_returns(
    collector,
):
    env = envs.NormalizeReward(envs.NormalizeObs(collector.env))
    training, key = collector.replace(env=env), jax.random.key(1)
    carry, rows = training.collect_steps(training.init(key), None, 20)
    length = np.asarray(rows.episode_length)  # step n has the reward n
    np.testing.assert_array_equal(rows.episode_return, length * (length + 1) // 2)
    assert (np.asarray(rows.reward) != length).all()
    with pytest.raises(
        ValueError, match=r"`collector\.freeze\(carry\)` with the carry"
    ):
        rollout.evaluate(training, None, key, NUM_EPISODES)
    stats = rollout.evaluate(training.freeze(carry), None, key, NUM_EPISODES)
    want = rollout.evaluate(collector.freeze(carry), None, key, NUM_EPISODES)
    chex.assert_trees_all_equal(stats, want)


@jax.jit
def summarize_first(returns, num_episodes):
    """Summarizes the first of many episodes."""
    mask = jnp.arange(returns.size) < num_episodes
    return rollout.summarize(make_episodes(returns, mask=mask))


@pytest.mark.parametrize("freedom", [1, 4, 5, 30, 10**4])
def test_confidence_interval_equals_students_t(freedom):
    # The mean is near 0, so the width of the interval is exact.
    returns = np.resize(np.float32([1, -1]), 10**4 + 1)
    stats = summarize_first(returns, freedom + 1)
    low, high = scipy_stats.t.interval(
        0.95, freedom, scale=scipy_stats.sem(returns[: freedom + 1].astype(np.float64))
    )
    # The quantile is an expansion of four terms.
    got = stats.returns.ci_high - stats.returns.ci_low
    np.testing.assert_allclose(got, high - low, rtol=2e-4)


def test_single_episode_has_no_confidence_interval():
    stats = summarize_first(np.zeros(10**4 + 1, np.float32), 1)
    assert stats.num_episodes == 1
    assert np.isfinite(stats.returns.mean)
    assert np.isnan(stats.returns.ci_low)
    assert np.isnan(stats.returns.ci_high)


# The limit of the environment is above or equal to `max_episode_steps`.
@pytest.mark.parametrize(("limit", "unfinished"), [(1000, NUM_EPISODES), (10, 0)])
def test_truncated_episodes_are_counted(limit, unfinished):
    collector = make_collector(min_length=100, max_length=100, limit=limit)
    key = jax.random.key(0)
    stats = rollout.evaluate(collector, None, key, NUM_EPISODES, max_episode_steps=10)
    assert stats.num_unfinished == unfinished
    assert stats.num_truncated == stats.num_episodes == NUM_EPISODES
    assert stats.lengths.mean == 10
    assert stats.returns.mean == 55


def test_nan_parameters_are_counted_without_a_retrace():
    num_traces = 0

    def act(params, obs, key):
        nonlocal num_traces
        num_traces += 1
        logits = jnp.broadcast_to(params[None], (obs.shape[0], 3))
        action = jax.random.categorical(key, logits).astype(jnp.int32)
        return action, {"logits": logits}

    collector = make_collector(rollout.stateless_policy(act))
    key, params = jax.random.key(0), np.zeros(3, np.float32)
    good = rollout.evaluate(collector, params, key, 6, max_episode_steps=100)
    bad = rollout.evaluate(collector, params + np.nan, key, 6, max_episode_steps=100)
    assert good.num_nonfinite == 0
    assert bad.num_nonfinite == bad.num_steps > 0
    assert num_traces == 1
