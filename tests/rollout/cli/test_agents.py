"""The command line with several agents: its table against NumPy and the library."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import ChanceEnv
from command_line import assert_figures, run

import rollout
from rollout import cli as command
from rollout import envs
from rollout.cli import make_collector, make_parser, parse
from rollout.policies import masks

B, T, N = 4, 30, 9
NAMES = "abc"
POLICIES = {"policy two": [0, 2], "policy one": [1]}  # a policy per group


def assert_agents(table, returns, lengths):
    """Both are `[N, A]`: an agent that neither acted nor got anything is out."""
    every = {agent: [i] for i, agent in enumerate(NAMES)} | POLICIES
    for who, columns in every.items():
        took_part = (lengths[:, columns] > 0) | (returns[:, columns] != 0)
        # An episode counts once, with the mean over its agents.
        for name, values in (("return", returns), ("length", lengths)):
            total = np.where(took_part, values[:, columns], 0).sum(axis=1)
            count = took_part.sum(axis=1)
            means = total[count > 0] / count[count > 0]
            assert_figures(table[f"{name}/{who}"], means)


@pytest.fixture
def chance(monkeypatch):
    """Agents that come and go at random, in two groups."""
    monkeypatch.setattr(command, "make", lambda env_id: ChanceEnv())


def assert_counts(table, steps, reward, stale):
    assert table["agent steps"] == f"{steps}"
    assert table["unassigned reward"] == f"{reward:g}"
    assert table["stale endings"] == f"{stale}"


def test_table_agrees_with_numpy_over_the_rows(chance):
    argv = "pgx:thing", f"--num-envs={B}", f"--num-steps={T}"
    table = run(*argv)
    made, params = make_collector(parse(make_parser(), argv))
    carry = made.init(jax.random.key(0))
    rows = jax.device_get(made.collect_steps(carry, params, T)[1])
    own, done = rows.info.agents, rows.done
    assert_agents(table, own.agent_return[done], np.asarray(own.agent_length)[done])
    assert_figures(table["return"], rows.episode_return[done])
    stale = np.asarray(own.waiting)[done].sum()
    acted = np.asarray(own.acted).sum()
    assert_counts(table, acted, own.unassigned_reward.sum(), stale)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_table_of_episodes_is_that_of_their_rows(chance):
    counts = f"--num-envs={B}", f"--num-episodes={N}", "--max-episode-steps=7"
    argv = "pgx:thing", *counts
    table = run(*argv)
    made, params = make_collector(parse(make_parser(), argv))
    carry = made.init(jax.random.key(0))
    _, episodes = made.collect_episodes(
        carry, params, N, max_episode_steps=7, return_trajectory=True
    )
    trajectory = episodes.trajectory
    stats = rollout.agents.summarize_agents(trajectory)
    info = jax.device_get(trajectory.info.agents)
    last = (trajectory.mask.sum(axis=0) - 1, np.arange(N))
    assert_agents(table, info.agent_return[last], np.asarray(info.agent_length)[last])
    assert_counts(
        table, stats.num_agent_steps, stats.unassigned_reward, stats.num_stale
    )


def test_random_players_take_allowed_actions():
    run = parse(make_parser(), ["pgx:tic_tac_toe", "--num-envs=64"])
    made, params = make_collector(run)
    mask = np.random.default_rng(0).random((64, 2, 9)) < 0.3
    mask[..., 0] |= ~mask.any(axis=-1)
    obs = {"observation": np.zeros((64, 2, 3, 3, 2), bool), "action_mask": mask}
    obs = {"players": obs, "acting": np.ones((64, 2), bool)}
    state = made.policy.init(made.env.num_envs)
    act = jax.jit(lambda key: made.policy.apply(params, obs, state, key).action)
    action = np.asarray(act(jax.random.key(0))["players"])[..., None]
    assert np.take_along_axis(mask, action, axis=-1).all()


@pytest.mark.slow
def test_parameters_go_to_the_suite():
    argv = "jaxmarl:switch_riddle", "--num-envs=4", "--num-steps=8"
    table = run(*argv, "--env-param=num_agents=4")
    agents = [label for label in table if label.startswith("return/agent_")]
    assert agents == [f"return/agent_{number}" for number in range(4)]
    assert_counts(table, steps=4 * 4 * 8, reward=0, stale=0)


class Seen(NamedTuple):
    """An observation as Jumanji has it."""

    action_mask: Any


@pytest.mark.parametrize(
    ("space", "shape", "want"),
    [
        (envs.Discrete(4), (4,), (3, 4)),
        (envs.spaces.MultiDiscrete((2, 2)), (2, 2), (3, 2, 2)),  # joint
        (envs.spaces.MultiDiscrete((4, 4)), (2, 4), ((3, 4), (3, 4))),  # by entry
    ],
)
def test_mask_of_an_observation_is_found_in_the_form_of_the_action(space, shape, want):
    observed = envs.spaces.Composite(Seen(envs.Box(0, 1, shape, jnp.dtype(bool))))
    found = masks.find(observed, space)(Seen(jnp.ones((3, *shape), bool)))
    assert jax.tree.map(jnp.shape, found) == want
    assert masks.find(envs.Box(0, 1, shape), space) is None
