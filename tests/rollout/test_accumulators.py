"""Tests of custom accumulators in trajectories, episodes and statistics."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import schedule

import rollout
from rollout import envs

GAMMA, B = 0.5, 5


ACCUMULATORS = {
    "discounted": rollout.Accumulator(
        jnp.zeros,
        lambda x, t: x + t.reward * GAMMA ** (t.episode_length - 1).astype(jnp.float32),
    ),
    "best": rollout.Accumulator(
        lambda num_envs: {"highest": jnp.full((num_envs,), -jnp.inf)},
        lambda x, t: {"highest": jnp.maximum(x["highest"], t.next_obs[:, 0])},
    ),
    "visits": rollout.Accumulator(
        lambda num_envs: jnp.zeros((num_envs, 3), jnp.int32),
        lambda x, t: x + jax.nn.one_hot(t.action, 3, dtype=jnp.int32),
    ),
}


def make_collector(accumulators=ACCUMULATORS):
    return cases.make_collector("count", B).replace(accumulators=accumulators)


def discounted_return(length):
    """Computes the sum of n * GAMMA ** (n - 1) over the steps n of an episode."""
    return sum(n * GAMMA ** (n - 1) for n in range(1, int(length) + 1))


def test_rows_contain_accumulated_values():
    collector = make_collector()
    carry, first = collector.collect_steps(collector.init(jax.random.key(0)), None, 13)
    _, second = collector.collect_steps(carry, None, 13)
    windows = jax.device_get((first, second))
    trajectory = jax.tree.map(lambda *x: np.concatenate(x), *windows)
    accumulated, length = trajectory.accumulated, trajectory.episode_length
    expected = np.vectorize(discounted_return)(length)
    np.testing.assert_allclose(accumulated["discounted"], expected, rtol=1e-6)
    np.testing.assert_array_equal(accumulated["best"]["highest"], length)
    np.testing.assert_array_equal(accumulated["visits"].sum(-1), length)
    assert trajectory.done.sum() > 2 * B


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_episodes_contain_final_values():
    collector = make_collector()
    carry = collector.init(jax.random.key(1))
    for per_env in (False, True):
        carry, episodes = collector.collect_episodes(
            carry, None, 4, max_episode_steps=6, per_env=per_env
        )
        accumulated, length = episodes.accumulated, np.asarray(episodes.episode_length)
        expected = np.vectorize(discounted_return)(length)
        np.testing.assert_allclose(accumulated["discounted"], expected, rtol=1e-6)
        np.testing.assert_array_equal(accumulated["visits"].sum(-1), length)
        stats = rollout.summarize(episodes)
        mean = stats.accumulated["best/highest"].mean
        np.testing.assert_allclose(mean, length.mean(), rtol=1e-6)
    assert set(stats.accumulated) == {"best/highest", "discounted"}
    logged = rollout.log_stats(stats, prefix="eval/")
    assert logged["eval/accumulated/best/highest_mean"] == pytest.approx(float(mean))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_values_per_agent_are_accumulated():
    """Counts the rewards above 10 of each agent."""
    rewards = [[1, 20], [11, 30], [12, 5]]
    env = envs.vectorize(schedule(np.ones((4, 2)), rewards), B)
    high = rollout.Accumulator(
        lambda num_envs: rollout.agents.PerAgent(jnp.zeros((num_envs, 2), jnp.int32)),
        lambda x, t: rollout.agents.PerAgent(x.value + (t.info.agents.reward > 10)),
    )
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy, accumulators={"high": high})
    carry = collector.init(jax.random.key(0))
    _, trajectory = collector.collect_steps(carry, None, 6)
    want = [[0, 1], [1, 2], [2, 2]] * 2
    np.testing.assert_array_equal(trajectory.accumulated["high"].value[:, 0], want)
    pending = rollout.agents.Pending.init(collector, carry)
    _, rows = rollout.agents.agent_transitions(pending, trajectory)
    np.testing.assert_array_equal(rows["all"].accumulated["high"][:, :2], want)
    agents = rollout.agents.summarize_agents(trajectory).agents
    assert [agents[name].accumulated["high"].mean for name in "ab"] == [2, 2]
    assert agents["a"].accumulated["high"].count == 2 * B
