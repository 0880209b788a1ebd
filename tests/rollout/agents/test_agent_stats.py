"""Statistics of policies that control several agents."""

import types

import jax
import jax.numpy as jnp
import pytest
from flax import struct

import rollout
from rollout import envs


@struct.dataclass
class Team:
    """Three agents that win or lose together after one step."""

    agents = ("a", "b", "c")
    groups = types.MappingProxyType({"all": ("a", "b", "c")})
    observation_spaces = types.MappingProxyType({"all": envs.Box(0.0, 1.0, ())})
    action_spaces = types.MappingProxyType({"all": envs.Discrete(2)})
    simultaneous = True

    def reset(self, key):
        return jax.random.key_data(key), {"all": jnp.zeros(3)}, jnp.ones(3, bool)

    def step(self, key, state, action):
        reward = jax.random.rademacher(key, (), jnp.float32)
        flags = jnp.zeros(3, bool)
        return envs.multi_agent.MultiAgentStep(
            state=state,
            obs={"all": jnp.zeros(3)},
            acting=~flags,
            reward=jnp.full(3, reward),
            terminated=flags,
            truncated=flags,
            episode_terminated=jnp.bool_(True),
            episode_truncated=jnp.bool_(False),
            info={},
        )


def test_episodes_of_a_team_count_once():
    env = envs.vectorize(Team(), 10)
    policy = rollout.random_policy(envs.Discrete(2))
    policy = rollout.agents.policy_map(
        {"team": policy}, rollout.agents.static_mapping("team"), env
    )
    collector = rollout.Collector(env, policy)
    key = jax.random.key(0)
    stats = rollout.agents.evaluate_agents(collector, {"team": None}, key, 40)
    team, single = stats.policies["team"], stats.agents["a"]
    assert team.results.wins + team.results.losses == 40
    for name in ("wins", "losses"):
        assert team.results.interval(name) == single.results.interval(name)
    assert team.returns.ci_low == single.returns.ci_low
    assert team.returns.count == single.returns.count == 40


def test_name_of_an_accumulator_is_not_overwritten():
    env = envs.vectorize(Team(), 2)
    policy = rollout.random_policy(envs.Discrete(2))
    mapping = rollout.agents.static_mapping("team")
    collector = rollout.Collector(
        env=env,
        policy=rollout.agents.policy_map({"team": policy}, mapping, env),
        accumulators={"agents": rollout.Accumulator(jnp.zeros, lambda x, row: x)},
    )
    with pytest.raises(ValueError, match="must not contain the name 'agents'"):
        rollout.agents.evaluate_agents(collector, {"team": None}, jax.random.key(0), 4)
