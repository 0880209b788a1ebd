"""Wrong arguments of the command line are rejected in one line."""

import importlib.metadata
import sys

import pytest
from command_line import error_line

CARTPOLE, HOST = "CartPole-v1", "gymnasium:CartPole-v1"
RUN, H100 = [CARTPOLE, "--num-envs=4"], "--inspect=h100"
MISSING = "envpool", "jaxmarl", "pygame"  # as if they were not installed
CASES = [
    # Ids.
    ([], "the environment is missing"),
    (["CartPole"], "The nearest are CartPole-v1"),
    (["gymnasium:nope:Nope-v1"], "No module named 'nope'"),
    (["nope:Nope"], "module:Class or file.py:function, got nope:Nope: No module nam"),
    (["cases:Nope"], "got cases:Nope: 'Nope'"),
    # Counts.
    ([*RUN, "--num-envs=0"], "argument --num-envs: must be at least 1, got 0"),
    ([*RUN, "--num-steps=many"], "--num-steps: invalid count value: 'many'"),
    ([*RUN, f"--seed={2**32}"], "argument --seed: must be from 0 to 2^32 - 1, got"),
    # Parameters of the environment.
    ([*RUN, "--env-param=gravity"], "a Python literal, got 'gravity'"),
    ([*RUN, "--env-param==1"], "must be NAME=VALUE, VALUE a Python"),
    ([*RUN, "--env-param=num_envs=3"], "x_threshold; got num_envs."),
    ([*RUN, "--env-param=gravity='a'"], "`gravity` must be a number"),
    (["pgx:tic_tac_toe", "--env-param=size=4"], "tic_tac_toe with size=4 fails: from"),
    ([HOST, "--env-param=num_envs=3"], "multiple values for argument 'num_envs'"),
    # Options that clash.
    ([*RUN, "--num-steps=1000", "--num-episodes=3"], "--num-episodes: not allowed wi"),
    ([*RUN, "--max-episode-steps=3"], "--max-episode-steps needs --num-episodes or"),
    ([CARTPOLE, H100, "--num-episodes=3"], ": not allowed with argument --inspect"),
    # Drawings and inspection.
    ([CARTPOLE, "--gif=none/a.gif"], "must be in a folder that exists, got none/a.gif"),
    (["MemoryChain-bsuite", "--gif=a.gif"], "got MemoryChain-bsuite."),
    ([HOST, H100], "`collector` must be a `Collector`, whose environments are in JAX"),
    # Packages.
    ([*RUN, H100], "pip install"),
    ([CARTPOLE, "--gif=a.gif"], 'pip install ".[render]"'),
    (["jaxmarl:coin_game", "--num-episodes=2"], 'pip install ".[jaxmarl]"'),
]


def no_package(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(("argv", "message"), CASES, ids=[str(x) for x, _ in CASES])
def test_wrong_argument_is_rejected_in_one_line(
    argv, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", no_package)
    for package in MISSING:
        monkeypatch.setitem(sys.modules, package, None)
    assert message in error_line(capsys, *argv)
    assert not list(tmp_path.iterdir())


def test_gymnasium_that_is_not_installed_is_named_with_the_command(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    message = 'gymnasium is not installed: pip install ".[gymnasium]"'
    assert message in error_line(capsys, HOST)
