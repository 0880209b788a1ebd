"""Wrong arguments are rejected in one line that names the argument and the value."""

import importlib.metadata
import sys

import pytest
from command_line import error_line

CARTPOLE, HOST = "CartPole-v1", "gymnasium:CartPole-v1"
SPEED = ["speed", CARTPOLE, "--num-envs=4"]
INSPECT = ["inspect", CARTPOLE, "h100"]
MISSING = "envpool", "jaxmarl", "pygame"  # as if they were not installed
CASES = [
    # Commands.
    ([], "COMMAND"),
    ([CARTPOLE], "'CartPole-v1'", "'speed'"),
    (["train", "pp0", CARTPOLE], "algorithm", "'pp0'", "'ppo'"),
    # Ids.
    (["speed"], "ENV"),
    (["speed", "CartPole"], "`env_id`", "'CartPole'", "CartPole-v1"),
    (["speed", "gymnasium:nope:Nope-v1"], "gymnasium:nope:Nope-v1", "'nope'"),
    (["speed", "nope:Nope"], "ENV", "`rollout envs`", "nope:Nope"),
    (["speed", "cases:Nope"], "ENV", "cases:Nope", "'Nope'"),
    (["speed", "none.py:make"], "ENV", "none.py:make", "none.py"),
    # Options.
    ([*SPEED, "--num-envs=0"], "--num-envs", "at least 1", "0"),
    ([*SPEED, "--num-steps=many"], "--num-steps", "int", "many"),
    ([*SPEED, f"--seed={2**32}"], "--seed", "2^32", f"{2**32}"),
    ([*SPEED, "--num-step=3"], "--num-step.", "--num-steps"),
    ([*SPEED, "--gif=a.gif"], "--gif"),
    ([*INSPECT, "--num-episodes=3"], "--num-episodes"),
    (["inspect", CARTPOLE, "h1"], "ACCELERATOR", "'h1'", "'h100'"),
    ([*SPEED, "--num-steps=10", "--num-episodes=3"], "--num-steps", "--num-episodes"),
    ([*SPEED, "--max-episode-steps=3"], "--max-episode-steps", "--num-episodes"),
    # Parameters of the environment.
    ([*SPEED, "--env-param=gravity"], "--env-param", "literal", "'gravity'"),
    ([*SPEED, "--env-param=name=text"], "--env-param", "'name=text'", "name=True"),
    ([*SPEED, "--env-param==1"], "--env-param", "NAME=VALUE", "'=1'"),
    ([*SPEED, "--env-param=num_envs=3"], "x_threshold", "num_envs"),
    ([*SPEED, "--env-param=gravity='a'"], "`gravity`", "number"),
    (["speed", "pgx:tic_tac_toe", "--env-param=size=4"], "tic_tac_toe", "size=4"),
    (["speed", HOST, "--env-param=size=3"], HOST, "'size'"),
    # Rendering and inspection.
    (["render", CARTPOLE, "none/a.gif"], "`path`", "none/a.gif"),
    (["render", "MemoryChain-bsuite", "a.gif"], "MemoryChain-bsuite"),
    (["render", CARTPOLE, "a.gif", "--run=none"], "`folder`", "none"),
    (["render", CARTPOLE, "a.gif", "--fps=99"], "`fps`", "from 1 to 50", "99"),
    (["inspect", HOST, "h100"], "`collector`", "JAX"),
    # Packages.
    (INSPECT, "pip install"),
    (["render", CARTPOLE, "a.gif"], 'pip install ".[render]"'),
    (["speed", "jaxmarl:coin_game"], 'pip install ".[jaxmarl]"'),
]


def raise_not_found(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("argv", "words"), [(argv, words) for argv, *words in CASES], ids=str
)
def test_wrong_argument_is_rejected_in_one_line(
    argv, words, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", raise_not_found)
    for package in MISSING:
        monkeypatch.setitem(sys.modules, package, None)
    error = error_line(capsys, *argv)
    assert all(word in error for word in words), error
    assert not list(tmp_path.iterdir())


def test_missing_gymnasium_is_named_with_the_install_command(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    message = 'gymnasium is not installed: pip install ".[gymnasium]"'
    assert message in error_line(capsys, "speed", HOST)
