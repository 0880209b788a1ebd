"""`rollout speed` with several agents: its table against NumPy and the library."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import ChanceEnv
from command_line import assert_figures, run

import rollout
from rollout import envs
from rollout.cli import arguments
from rollout.cli.command import make_parser
from rollout.cli.speed import make_collector
from rollout.policies import masks

B, T, N = 4, 30, 9
NAMES = "abc"
POLICIES = {"policy two": [0, 2], "policy one": [1]}  # a policy per group


def assert_agents(table, returns, lengths):
    """Compares returns and lengths `[N, A]`; agents may be absent from an episode."""
    columns_by_name = {agent: [i] for i, agent in enumerate(NAMES)} | POLICIES
    for label, columns in columns_by_name.items():
        is_present = (lengths[:, columns] > 0) | (returns[:, columns] != 0)
        # An episode counts once, with the mean over its agents.
        for name, values in (("return", returns), ("length", lengths)):
            total = np.where(is_present, values[:, columns], 0).sum(axis=1)
            count = is_present.sum(axis=1)
            means = total[count > 0] / count[count > 0]
            assert_figures(table[f"{name}/{label}"], means)


def collector_of(argv):
    """Makes the collector of the command, and the parameters of its policy."""
    return make_collector(make_parser().parse_args(["speed", *argv]), B)


@pytest.fixture
def chance(monkeypatch):
    """Agents that come and go at random, in two groups."""
    monkeypatch.setattr(arguments, "make", lambda env_id: ChanceEnv())


def assert_counts(table, steps, reward, stale):
    assert table["agent steps"] == f"{steps}"
    assert table["unassigned reward"] == f"{reward:g}"
    assert table["stale endings"] == f"{stale}"


def test_table_of_steps_matches_numpy(chance):
    argv = "pgx:thing", f"--num-envs={B}", f"--num-steps={T}"
    table = run("speed", *argv)
    collector, params = collector_of(argv)
    carry = collector.init(jax.random.key(0))
    trajectory = jax.device_get(collector.collect_steps(carry, params, T)[1])
    agents, done = trajectory.info.agents, trajectory.done
    lengths = np.asarray(agents.agent_length)[done]
    assert_agents(table, agents.agent_return[done], lengths)
    assert_figures(table["return"], trajectory.episode_return[done])
    num_stale = np.asarray(agents.waiting)[done].sum()
    num_steps = np.asarray(agents.acted).sum()
    assert_counts(table, num_steps, agents.unassigned_reward.sum(), num_stale)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_table_of_episodes_matches_the_trajectory(chance):
    counts = f"--num-envs={B}", f"--num-episodes={N}", "--max-episode-steps=7"
    argv = "pgx:thing", *counts
    table = run("speed", *argv)
    collector, params = collector_of(argv)
    carry = collector.init(jax.random.key(0))
    _, episodes = collector.collect_episodes(
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


def test_random_policy_samples_valid_actions():
    collector, params = collector_of(["pgx:tic_tac_toe"])
    mask = np.random.default_rng(0).random((B, 2, 9)) < 0.3
    mask[..., 0] |= ~mask.any(axis=-1)
    obs = {"observation": np.zeros((B, 2, 3, 3, 2), bool), "action_mask": mask}
    obs = {"players": obs, "acting": np.ones((B, 2), bool)}
    state = collector.policy.init(B)
    act = jax.jit(lambda key: collector.policy.apply(params, obs, state, key).action)
    action = np.asarray(act(jax.random.key(0))["players"])[..., None]
    assert np.take_along_axis(mask, action, axis=-1).all()


@pytest.mark.slow
def test_suite_gets_the_parameters():
    argv = "jaxmarl:switch_riddle", "--num-envs=4", "--num-steps=8"
    table = run("speed", *argv, "--env-param=num_agents=4")
    agents = [label for label in table if label.startswith("return/agent_")]
    assert agents == [f"return/agent_{number}" for number in range(4)]
    assert_counts(table, steps=4 * 4 * 8, reward=0, stale=0)


class Obs(NamedTuple):
    """An observation of Jumanji."""

    action_mask: Any


@pytest.mark.parametrize(
    ("space", "shape", "mask_shapes"),
    [
        (envs.Discrete(4), (4,), (3, 4)),
        (envs.spaces.MultiDiscrete((2, 2)), (2, 2), (3, 2, 2)),  # joint
        (envs.spaces.MultiDiscrete((4, 4)), (2, 4), ((3, 4), (3, 4))),  # by entry
    ],
)
def test_mask_of_an_observation_has_the_layout_of_the_action(space, shape, mask_shapes):
    mask_space = envs.Box(0, 1, shape, jnp.dtype(bool))
    mask, obs_space = (
        jnp.ones((3, *shape), bool),
        envs.spaces.Composite(Obs(mask_space)),
    )
    action_mask = masks.find_mask(obs_space, space)(Obs(mask))
    assert jax.tree.map(jnp.shape, action_mask) == mask_shapes
    info_space = envs.spaces.Dict(
        {"info": envs.spaces.Dict({"action_mask": mask_space})}
    )
    action_mask = masks.find_mask(info_space, space)({"info": {"action_mask": mask}})
    assert jax.tree.map(jnp.shape, action_mask) == mask_shapes
    assert masks.find_mask(envs.Box(0, 1, shape), space) is None
