"""`rollout train` and `python -m rollout.recipes.NAME`."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import ROOT

from rollout import checkpoint
from rollout.cli import command, train
from rollout.recipes import load
from rollout.recipes.ppo import PPO, Config

MINE = """
import gymnasium
from rollout import envs
make = lambda: gymnasium.make("CartPole-v1")
make_jax = lambda limit=9: envs.make("CartPole-v1", max_steps_in_episode=limit)
"""


def parse(*argv):
    return train.make_parser(PPO, Config(num_updates=40), 64).parse_known_args(argv)


def run_recipe(folder, *argv, module="rollout.recipes.ppo"):
    """Trains PPO in a small environment, in a new process."""
    sizes = "--num-envs 2 --num-steps 16 --num-minibatches 2 --num-eval-episodes 3"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    return subprocess.run(
        [sys.executable, "-m", *module.split(), *argv, *sizes.split()],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )


def error_of(capsys, *argv):
    """Returns the line on stderr of a command with wrong arguments."""
    with pytest.raises(SystemExit) as exit_info:
        train.main(PPO, Config(), 64, argv)
    streams = capsys.readouterr()
    assert (exit_info.value.code, streams.out) == (2, "")
    assert streams.err.startswith("rollout train ppo: error: ")
    assert streams.err.count("\n") == 1
    return streams.err


def test_every_recipe_is_an_algorithm():
    files = {x.stem for x in Path(train.run.__code__.co_filename).parent.glob("*.py")}
    others = {"__init__", "run_files", "run_settings", "running"}
    assert set(command.ALGORITHMS) == files - others


def test_train_runs_the_recipe_with_its_arguments(monkeypatch):
    calls = []

    def run_module(name, **options):
        calls.append((name, sys.argv[1:]))

    monkeypatch.setattr(sys, "argv", ["rollout"])
    monkeypatch.setattr(command.runpy, "run_module", run_module)
    arguments = ["CartPole-v1", "--gamma", "0.9", "--help"]
    assert command.main(["train", "dqn", *arguments]) == 0
    assert calls == [("rollout.recipes.dqn", arguments)]


def test_options_are_the_fields_of_the_config():
    options, _ = parse("CartPole-v1")
    fields = vars(Config(num_updates=40))
    assert {x: vars(options)[f"config.{x}"] for x in fields} == fields
    assert (options.env, options.num_envs, options.seed) == ("CartPole-v1", 64, 0)


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("--num-updates=7", "num_updates", 7),
        ("--learning-rate=1e-3", "learning_rate", 1e-3),
        ("--target-kl=0.1", "target_kl", 0.1),
        ("--anneal-lr=false", "anneal_lr", False),
        ("--cnn=True", "cnn", True),
        ("--actor-obs=state,image", "actor_obs", ("state", "image")),
        ("--hidden-layer-sizes=8,4", "hidden_layer_sizes", (8, 4)),
        ("--activation=relu", "activation", "relu"),
        ("--microbatch-size=64", "microbatch_size", 64),
        ("--microbatch-size=auto", "microbatch_size", "auto"),
    ],
)
def test_option_has_the_type_of_its_field(option, field, value):
    options, unknown = parse("CartPole-v1", option)
    assert vars(options)[f"config.{field}"] == value
    assert not unknown


@pytest.mark.parametrize("algorithm", command.ALGORITHMS)
def test_every_field_is_an_option_with_a_description(algorithm):
    config = importlib.import_module(f"rollout.recipes.{algorithm}").Config()
    descriptions = train.read_attributes(type(config).__doc__)
    assert list(descriptions) == list(vars(config))
    parser = command.Parser()
    train.add_config_options(parser, config)
    text = " ".join(parser.format_help().split())
    for name in vars(config):
        option = f"--{name.rstrip('_').replace('_', '-')} VALUE"
        description = descriptions[name].split()[:3]
        assert f"{option} {' '.join(description)}" in text


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit) as exit_info:
        train.main(PPO, Config(), 64, ["--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: rollout train ppo ENV [options]")
    assert "--gae-lambda VALUE" in text
    assert "(0.95)" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["CartPole-v1", "--num-update=3"], ["--num-update.", "--num-updates"]),
        (["CartPole-v1", "--lr", "3"], ["--lr", "--learning-rate"]),
        (["CartPole-v1", "--exp-name", "a"], ["--exp-name", "--folder"]),
        (["CartPole-v1", "--n-steps=3"], ["--n-steps.", "--num-steps"]),
        (["--total-timesteps", "3", "CartPole-v1"], ["--num-updates", "num_envs"]),
        (["CartPole-v1", "--anneal-lr=no"], ["--anneal-lr", "true or false", "no"]),
        (["CartPole-v1", "--hidden-layer-sizes=8,x"], ["--hidden-layer-sizes", "x"]),
        (["CartPole-v1", f"--seed={2**32}"], ["--seed", "2^32", f"{2**32}"]),
        (["CartPole-v1", "--no-cache", "--devices=0"], ["`--devices`", "0"]),
        (["--no-cache", "mine.py:nothing"], ["ENV", "mine.py:nothing", "'nothing'"]),
        (["--no-cache", "none.py:make"], ["ENV", "none.py:make", "[Errno 2]"]),
        (["--no-cache", "pgx:tic_tac_toe"], ["`env`", "equal spaces", "player_0"]),
    ],
    ids=str,
)
def test_wrong_argument_is_one_line(argv, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    error = error_of(capsys, *argv)
    assert all(word in error for word in words), error
    assert not (tmp_path / "runs").exists()


@pytest.mark.very_slow
def test_train_resumes_in_host_environments(tmp_path):
    options = "gymnasium:CartPole-v1", "--evaluate-every", "64", "--num-updates"
    runs = [
        run_recipe(tmp_path, "train", "ppo", *options, "4", module="rollout"),
        run_recipe(tmp_path, *options, "4"),
        run_recipe(tmp_path, *options, "6", "--resume"),
    ]
    assert [x.returncode for x in runs] == [0, 2, 0], [x.stderr for x in runs]
    assert "3 episodes" in runs[0].stdout
    assert "`folder` must not contain a run" in runs[1].stderr
    folder = tmp_path / "runs" / "ppo-gymnasium-cartpole-v1"
    rows = np.genfromtxt(folder / "metrics.csv", delimiter=",", names=True)
    assert rows["steps"].tolist() == list(range(32, 193, 32))
    assert checkpoint.steps(folder / "resume") == [6]
    agent, state = load(folder)
    assert agent.predict(state.params, np.zeros(4, np.float32)) in (0, 1)


@pytest.mark.very_slow
def test_train_reports_the_interval_over_seeds(tmp_path):
    options = "--num-updates", "1", "--num-seeds", "3", "--folder", "a"
    process = run_recipe(tmp_path, "CartPole-v1", *options)
    assert process.returncode == 0, process.stderr
    rows = np.genfromtxt(tmp_path / "a" / "evaluations.csv", delimiter=",", names=True)
    mean = rows["return_mean"].mean()
    half = 4.302653 * rows["return_mean"].std(ddof=1) / 3**0.5  # Student's t
    line = process.stdout.splitlines()[-1]
    numbers = [float(x) for x in re.findall(r"-?[\d.]+", line.replace("95 %", ""))]
    np.testing.assert_allclose(numbers[:3], [mean, mean - half, mean + half], rtol=1e-4)
    assert line.endswith(", 3 seeds")


@pytest.mark.very_slow
def test_train_keeps_compiled_programs(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for index, options in enumerate((["--no-cache"], [])):
        folder = tmp_path / str(index)
        folder.mkdir()
        process = run_recipe(folder, "CartPole-v1", "--num-updates", "1", *options)
        assert process.returncode == 0, process.stderr
        assert (tmp_path / "cache" / "rollout").exists() == (index == 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ["gymnasium:mine.py:make"],
        pytest.param(
            ["mine.py:make_jax", "--env-param", "limit=5"], marks=pytest.mark.very_slow
        ),
    ],
    ids=str,
)
def test_train_loads_functions_of_files(argv, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    process = run_recipe(tmp_path, *argv, "--num-updates", "1")
    assert process.returncode == 0, process.stderr
    assert "3 episodes" in process.stdout
