"""The command line with several agents: its table against NumPy and the library."""

import contextlib
import io
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import ChanceEnv

import rollout
from rollout import envs
from rollout.cli import runs
from rollout.cli.arguments import make_parser, parse
from rollout.cli.main import main
from rollout.policies import masks

B, T, N = 4, 30, 9
NAMES = "abc"
POLICIES = {"policy two": [0, 2], "policy one": [1]}  # a policy per group


def read_tables(text):
    """The rows by label; those under "return" and "length" apart."""
    tables, part = {"": {}}, ""
    for line in text.splitlines():
        if not line.startswith("  "):
            part = ""
        tables.setdefault(part, {})[line[:20].strip()] = line[20:].strip()
        if line.startswith(("return", "length")):
            part = line.split()[0]
    return tables


def run(argv):
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        assert main(argv) == 0
    return read_tables(stdout.getvalue())


def assert_figures(text, x):
    x = np.asarray(x, np.float64)
    expected = x.mean(), x.std(), x.min(), x.max()
    # Sums of a batch are in float32, and the table has six digits.
    np.testing.assert_allclose([float(y) for y in text.split()], expected, rtol=1e-5)


def assert_agents(table, name, values, lengths):
    """`values` and `lengths` are `[N, A]`: an agent that never acted does not count."""
    every = {agent: [i] for i, agent in enumerate(NAMES)} | POLICIES
    for label, columns in every.items():
        its = values[:, columns][lengths[:, columns] > 0]
        assert_figures(table[name][label], its)


@pytest.fixture
def chance(monkeypatch):
    """Agents that come and go at random, in two groups."""
    monkeypatch.setattr(envs, "make_agents", lambda env_id: ChanceEnv())


def test_table_agrees_with_numpy_over_the_saved_file(chance, tmp_path):
    files = [f"--save={tmp_path}/a.npz", f"--plot={tmp_path}/a.png"]
    argv = ["pgx:thing", f"--num-envs={B}", f"--num-steps={T}"]
    table = run([*argv, *files])
    saved = dict(np.load(tmp_path / "a.npz", allow_pickle=False))
    own = {x.split("/")[-1]: y for x, y in saved.items() if "info/agents" in x}
    done = saved["terminated"] | saved["truncated"]
    values, lengths = own["agent_return"][done], own["agent_length"][done]
    assert_agents(table, "return", values, lengths)
    assert_agents(table, "length", lengths, lengths)
    assert table[""]["agent steps"] == f"{own['acted'].sum()}"
    assert_figures(table[""]["return"], saved["episode_return"][done])
    assert table[""]["unassigned reward"] == f"{own['unassigned_reward'].sum():g}"
    assert table[""]["stale endings"] == f"{own['waiting'][done].sum()}"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_table_of_episodes_is_that_of_their_rows(chance):
    argv = ["pgx:thing", f"--num-envs={B}", f"--num-episodes={N}", "--max-steps=7"]
    table = run(argv)
    made, params = runs.make_collector(parse(make_parser(), argv))
    carry = made.init(jax.random.key(0))
    _, trajectory, _ = made.collect_padded_episodes(carry, params, N, max_length=7)
    stats = rollout.agents.summarize_agents(trajectory)
    info = jax.device_get(trajectory.info.agents)
    last = (trajectory.mask.sum(axis=0) - 1, np.arange(N))
    values, lengths = info.agent_return[last], np.asarray(info.agent_length)[last]
    assert_agents(table, "return", values, lengths)
    assert_agents(table, "length", lengths, lengths)
    assert table[""]["agent steps"] == f"{stats.num_agent_steps}"
    assert table[""]["unassigned reward"] == f"{stats.unassigned_reward:g}"
    assert table[""]["stale endings"] == f"{stats.num_stale}"


def test_random_players_take_allowed_actions():
    run = parse(make_parser(), ["pgx:tic_tac_toe", "--num-envs=64"])
    made, params = runs.make_collector(run)
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
    argv = ["jaxmarl:switch_riddle", "--num-envs=4", "--num-steps=8"]
    table = run([*argv, "--env-param=num_agents=4"])
    assert list(table["return"]) == [f"agent_{number}" for number in range(4)]
    assert "length" not in table  # all act at every step
    assert not {"unassigned reward", "stale endings"} & set(table[""])
    assert table[""]["agent steps"] == f"{4 * 4 * 8}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["foo:bar"], "or xminigrid:, got 'foo:bar'"),
        (["pgx:tictactoe"], "The nearest are tic_tac_toe"),
        (
            ["pgx:tic_tac_toe", "--env-param=size=4"],
            "with size=4 fails: make",
        ),
        (
            ["jaxmarl:coin_game", "--num-episodes=2"],
            'pip install "rollout-jax[jaxmarl]"',
        ),
        (["pgx:chess", "--gif=a.gif"], "several agents are not drawn, got pgx:chess"),
    ],
)
def test_wrong_argument_is_rejected_in_one_line(argv, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxmarl", None)  # as if it were not installed
    with pytest.raises(SystemExit) as stop:
        main(argv)
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    assert captured.err.startswith("python -m rollout: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


class Seen(NamedTuple):
    """An observation as Jumanji has it."""

    action_mask: Any


@pytest.mark.parametrize(
    ("space", "shape", "want"),
    [
        (envs.Discrete(4), (4,), (3, 4)),
        (envs.spaces.MultiDiscrete((2, 2)), (2, 2), (3, 2, 2)),  # joint
        (
            envs.spaces.MultiDiscrete((4, 4)),
            (2, 4),
            ((3, 4), (3, 4)),
        ),  # one for each entry
    ],
)
def test_mask_of_an_observation_is_found_in_the_form_of_the_action(space, shape, want):
    observed = envs.spaces.Composite(Seen(envs.Box(0, 1, shape, jnp.dtype(bool))))
    found = masks.find(observed, space)(Seen(jnp.ones((3, *shape), bool)))
    assert jax.tree.map(jnp.shape, found) == want
    assert masks.find(envs.Box(0, 1, shape), space) is None
