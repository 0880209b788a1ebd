"""Tests of statistics by agent and by policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import schedule
from cases import quick_jit

import rollout
from rollout import envs

pytestmark = pytest.mark.usefixtures("quick_compile")
KEY = jax.random.key(11)


def make_collector(env, mapping, **options):
    """Creates a collector whose policies x and y take the actions 0 and 1."""
    env, policies = envs.vectorize(env, 4), {}
    for number, name in enumerate("xy"):
        policies[name] = rollout.stateless_policy(
            lambda params, obs, key, number=number: jnp.full(obs.shape, number)
        )
    policy = rollout.agents.policy_map(policies, mapping, env)
    return rollout.Collector(env, policy, **options)


PARAMS = {"x": None, "y": None}
SELF_PLAY = rollout.agents.static_mapping("x")


def sample_mapping(key, agents):
    return jax.random.randint(key, (len(agents),), 0, 2)


def test_team_episode_counts_once():
    """Three agents win together after one step."""
    collector = make_collector(schedule(np.ones((2, 3)), np.ones((1, 3))), SELF_PLAY)
    stats = rollout.agents.evaluate_agents(collector, PARAMS, KEY, 40)
    team, single = stats.policies["x"], stats.agents["a"]
    assert (team.results.wins, team.results.losses) == (40, 0)
    assert team.results.interval("wins") == single.results.interval("wins")
    assert (team.returns.mean, team.returns.count) == (1, 40)
    assert team.returns.ci_low == single.returns.ci_low


def test_loss_before_the_first_action_counts():
    """Agent a wins with the first action. Agent c never acts."""
    env = schedule([[1, 0, 0], [0, 1, 0]], [[1, -1, 0]])
    stats = rollout.agents.evaluate_agents(
        make_collector(env, SELF_PLAY), PARAMS, KEY, 10
    )
    results = [stats.agents[name].results for name in "abc"]
    assert [(x.wins, x.draws, x.losses) for x in results] == [
        (10, 0, 0),
        (0, 0, 10),
        (0, 0, 0),
    ]
    assert stats.agents["b"].lengths.total == 0


@pytest.mark.slow
@pytest.mark.parametrize("mapping", [sample_mapping, SELF_PLAY])
def test_results_are_counted_by_policy(mapping):
    """Agent a always wins, and agent c never acts."""
    env = schedule([[1, 1, 0]] * 3, [[1, -1, 0], [0.5, -0.5, 0]])
    collector = make_collector(env, mapping)
    stats = rollout.agents.evaluate_agents(collector, PARAMS, KEY, 30)

    @quick_jit
    def play(key):
        return collector.collect_episodes(
            collector.init(key), PARAMS, 30, max_episode_steps=4, return_trajectory=True
        )[1].trajectory.extras.policy_id[0]

    player = np.asarray(play(KEY))  # [30, 3]
    for number, name in enumerate("xy"):
        results, plays = stats.policies[name].results, player[:, :2] == number
        # An episode in which the policy controls both agents is a tie.
        wins, losses = plays[:, 0] & ~plays[:, 1], plays[:, 1] & ~plays[:, 0]
        draws = plays.all(axis=1)
        got = results.wins, results.losses, results.draws
        assert got == (wins.sum(), losses.sum(), draws.sum())
        assert stats.policies[name].returns.count == plays.any(axis=1).sum()
    assert (stats.num_episodes, stats.agents["a"].results.wins) == (30, 30)
    assert stats.agents["c"].results.wins + stats.agents["c"].results.draws == 0
    if mapping is SELF_PLAY:  # Wilson's interval of no win in 30: 0 to 11.4 %
        assert str(stats).splitlines()[0] == (
            "x: 0 wins (0.0 to 11.4 %), 30 draws (88.6 to 100.0 %), "
            "0 losses (0.0 to 11.4 %), return 0 (95 %: 0 to 0)"
        )


def test_accumulator_name_agents_raises():
    accumulators = {"agents": rollout.Accumulator(jnp.zeros, lambda x, row: x)}
    env = schedule(np.ones((2, 3)), np.ones((1, 3)))
    collector = make_collector(env, SELF_PLAY, accumulators=accumulators)
    with pytest.raises(ValueError, match="must not contain the name 'agents'"):
        rollout.agents.evaluate_agents(collector, PARAMS, KEY, 4)
