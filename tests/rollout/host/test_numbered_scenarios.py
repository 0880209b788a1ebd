"""Host environments with `at_episode`, which select numbered scenarios."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from host_envs import make_levels

import rollout
from rollout import envs

KEY = jax.random.key(3)
POLICY = rollout.stateless_policy(
    lambda params, obs, key: jnp.zeros(len(jax.tree.leaves(obs)[0]), int)
)


def make_collector(num_envs, num_workers, **options):
    env = envs.from_gymnasium(make_levels, num_envs, num_workers=num_workers)
    return rollout.HostCollector(env=env, policy=POLICY, **options)


@pytest.mark.parametrize(
    ("num_envs", "num_workers", "num_ready"),
    [(3, None, None), (16, None, None), (4, 2, 2)],
    ids=["fewer_lanes", "more_lanes", "num_ready"],
)
def test_collect_episodes_plays_each_scenario_once(num_envs, num_workers, num_ready):
    collector = make_collector(num_envs, num_workers, num_ready=num_ready)
    carry = collector.init(KEY)
    # Steps before the call and the split into two calls do not change the numbers.
    carry, _ = collector.collect_steps(carry, None, 4)
    carry, episodes = collector.collect_episodes(carry, None, 5)
    _, next_episodes = collector.collect_episodes(carry, None, 6)
    collector.close()
    levels = np.arange(11)
    lengths = levels % 5 + 1
    results = {
        x: np.concatenate([getattr(episodes, x), getattr(next_episodes, x)])
        for x in ("episode_return", "episode_length", "mask")
    }
    np.testing.assert_array_equal(results["episode_return"], lengths * (levels + 1))
    np.testing.assert_array_equal(results["episode_length"], lengths)
    assert results["mask"].all()


def test_evaluate_with_normalization_plays_each_scenario_once():
    env = envs.NormalizeHostEnv(envs.from_gymnasium(make_levels, 3), gamma=None)
    carry = rollout.HostCollector(env=env, policy=POLICY).init(KEY)
    collector = rollout.HostCollector(env=env, policy=POLICY).freeze(carry)
    stats = rollout.evaluate(collector, None, KEY, num_episodes=8)
    levels = np.arange(8)
    assert float(stats.returns.mean) == np.mean((levels % 5 + 1) * (levels + 1))


def test_collect_steps_selects_scenarios_by_episode_id():
    collector = make_collector(2, None)
    _, rows = collector.collect_steps(collector.init(KEY), None, 12)
    np.testing.assert_array_equal(rows.obs[..., 0], rows.episode_id)


def test_check_env_accepts_numbered_scenarios():
    issues = rollout.check_env(envs.from_gymnasium(make_levels, 2))
    assert [issue.name for issue in issues] == ["seed"]  # the levels are not random


def test_vector_environment_of_numbered_scenarios_raises():
    vector_env = SyncVectorEnv([make_levels] * 2, autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(ValueError, match="`at_episode`, got SyncVectorEnv"):
        envs.from_gymnasium(vector_env)
