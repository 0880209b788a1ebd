"""Tests of `run`, `load` and the commands of the agents."""

import functools
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import numpy as np
import pytest
from command_line import error_line
from compiles import QUICK_FLAGS
from plain_suites import Suite

import rollout
from rollout import checkpoint, envs
from rollout.cli import main
from rollout.cli.speed import load_collector
from rollout.envs.suites import physics
from rollout.logs import CSVWriter
from rollout.recipes import load, run, running
from rollout.recipes.ppo import PPO, Config
from rollout.recipes.run_files import (
    Folder,
    check_metrics,
    draw_curve,
    draw_gif,
    mark_table,
    read_returns,
    trim_tables,
    write_settings,
)
from rollout.recipes.run_settings import check_settings, describe
from rollout.recipes.running import Position, chunk_size, save_policies


class TrainState(NamedTuple):
    """The parts of a training state that `save_policies` reads."""

    params: Any
    num_updates: Any


ROOT = Path(__file__).parents[2]
SMALL = Config(num_updates=4, num_steps=8, num_minibatches=2, num_epochs=1)
SMALL = SMALL.replace(hidden_layer_sizes=(8,), normalize_observations=True)
EVALUATE = {"evaluate_every": 64, "num_eval_episodes": 4}


def make_agent(config=SMALL):
    return PPO(envs.make_vec("CartPole-v1", 4), config)


def run_agent(agent, folder, *, key=None, **options):
    """Calls `run`, with seed 0 unless there is another key."""
    key = jax.random.key(0) if key is None else key
    return run(agent, key, folder=folder, **options)


def check_equal_files(folder, other_folder, *, pictures=True):
    files = [path for path in folder.rglob("*") if path.is_file()]
    if not pictures:
        files = [path for path in files if path.suffix not in (".gif", ".png")]
    assert len(files) > 5
    for path in files:
        if not path.name.startswith("events."):  # these files contain times
            other_path = other_folder / path.relative_to(folder)
            assert path.read_bytes() == other_path.read_bytes(), path.name


def read_table(path):
    return np.genfromtxt(path, delimiter=",", names=True)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run of four updates with two evaluations."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    agent = make_agent()
    state, evaluation = run_agent(agent, folder, **EVALUATE)
    return folder, agent, state, evaluation


@pytest.fixture
def no_pictures(monkeypatch):
    """Replaces plots, which take longer than a short run."""
    for name in ("draw_curve", "draw_gif"):
        monkeypatch.setattr(running, name, lambda *args: None)


def test_missing_plot_packages_print_a_line(
    finished_run, capsys, monkeypatch, tmp_path
):
    _, agent, state, _ = finished_run
    for name in ("matplotlib.pyplot", "pygame"):
        monkeypatch.setitem(sys.modules, name, None)
    draw_curve(Folder(tmp_path), agent)
    draw_gif(agent, state.params, jax.random.key(0), tmp_path / "agent.gif")
    assert capsys.readouterr().out == (
        "no curve: install matplotlib\n"
        'no GIF: pygame is not installed: pip install ".[render]"\n'
    )
    assert not list(tmp_path.iterdir())


def test_run_writes_a_row_per_update_and_evaluation(finished_run):
    folder, _, state, evaluation = finished_run
    assert int(state.num_updates) == 4
    assert evaluation.num_episodes == 4
    metrics, evaluations = (
        read_table(folder / f"{x}.csv") for x in ("metrics", "evaluations")
    )
    assert metrics["steps"].tolist() == [32, 64, 96, 128]
    assert evaluations["steps"].tolist() == [64, 128]
    assert np.isfinite(metrics["entropy"]).all()
    np.testing.assert_allclose(evaluations["return_mean"][-1], evaluation.returns.mean)
    assert {"curve.png", "best", "last", "resume", "agent.json"} <= set(
        os.listdir(folder)
    )


@pytest.mark.compiles(40)
def test_resume_of_a_finished_run_trains_nothing(finished_run, no_pictures, capsys):
    folder, agent, *_ = finished_run
    run_agent(agent, folder, resume=True, **EVALUATE)
    assert capsys.readouterr().out == (
        f"no training: the run in {folder} has 4 updates, and `num_updates`, which "
        "includes them, is 4\n"
    )


def test_loaded_agent_predicts_without_an_environment(finished_run):
    folder, agent, state, _ = finished_run
    loaded, saved = load(folder, name="last")
    assert isinstance(loaded.env, envs.spaces.EnvSpec)
    assert loaded.config == agent.config
    assert saved.params["obs_stats"]["count"] == 128  # all rows of the training
    jax.tree.map(np.testing.assert_array_equal, saved.params, state.params)
    for obs in np.float32(np.random.default_rng(0).normal(size=(5, 4))):
        expected = agent.predict(state.params, obs)
        assert loaded.predict(saved.params, obs) == expected


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1"])
def test_render_command_plays_the_best_policy_of_a_run(
    env_id, finished_run, tmp_path, capsys
):
    folder, agent, *_ = finished_run
    path = tmp_path / "a.gif"
    options = f"--run={folder}", "--seed=3", "--max-episode-steps=9", "--height=50"
    if env_id == "Acrobot-v1":
        error = error_line(capsys, "render", env_id, str(path), *options)
        assert "ENV must have the observation_space of the run" in error
        return
    main(["render", env_id, str(path), *options])
    collector = agent.replace(env=envs.make_vec(env_id, 1)).eval_collector
    params, key = load(folder)[1].params, jax.random.key(3)
    rollout.record_gif(
        collector, params, key, tmp_path / "b.gif", max_episode_steps=9, height=50
    )
    assert path.read_bytes() == (tmp_path / "b.gif").read_bytes()


@pytest.mark.usefixtures("no_pictures")
def test_resumed_run_has_the_bytes_of_an_uninterrupted_run(finished_run, tmp_path):
    folder, agent, _, _ = finished_run
    run_agent(agent, tmp_path, callback=lambda _: False, **EVALUATE)
    # A killed process may leave rows after the last checkpoint, and a torn row: "9" is
    # the start of "96".
    for name, rows in ("metrics.csv", "96,0.1,0.2\n12"), ("evaluations.csv", "9"):
        with (tmp_path / name).open("a") as file:
            file.write(rows)
    settings_file = (tmp_path / "agent.json").stat().st_ino
    run_agent(make_agent(), tmp_path, resume=True, **EVALUATE)
    check_equal_files(folder, tmp_path, pictures=False)
    assert (tmp_path / "agent.json").stat().st_ino == settings_file


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", ["resume", "best", "last"])
def test_no_policy_is_newer_than_the_resumed_state(
    name, finished_run, tmp_path, monkeypatch
):
    """The process dies before it saves one of the checkpoints after four updates."""
    folder, agent, *_ = finished_run
    save = checkpoint.save

    def save_or_die(path, tree, *, step):
        if (path.name, step) == (name, 4):
            raise KeyboardInterrupt
        save(path, tree, step=step)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save_or_die)
        with pytest.raises(KeyboardInterrupt):
            run_agent(agent, tmp_path, **EVALUATE)
    (num_updates,) = checkpoint.steps(tmp_path / "resume")
    assert num_updates == (2 if name == "resume" else 4)
    for policy in ("best", "last"):
        assert max(checkpoint.steps(tmp_path / policy)) <= num_updates
    run_agent(agent, tmp_path, resume=True, **EVALUATE)
    check_equal_files(folder, tmp_path, pictures=False)


def test_failed_write_keeps_the_settings(tmp_path, monkeypatch):
    path = tmp_path / "agent.json"
    write_settings(path, {"a": 1})

    def fail(descriptor):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            write_settings(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["agent.json"]


@pytest.mark.usefixtures("no_pictures")
def test_target_return_and_callback_stop_the_training(finished_run, tmp_path):
    _, agent, *_ = finished_run
    for resume in (False, True):  # True resumes after the last update
        options = {"target_return": 1.0, "resume": resume, **EVALUATE}
        state, _ = run_agent(agent, tmp_path / "a", **options)
        assert int(state.num_updates) == 2
    assert read_table(tmp_path / "a" / "evaluations.csv")["steps"] == 64

    def stop(progress):
        # A second run in the same folder, such as a job that was submitted twice.
        with pytest.raises(ValueError, match="`folder` must not be in use"):
            run_agent(agent, tmp_path / "b", resume=True, num_eval_episodes=4)
        return progress.metrics["entropy"][-1] < 0  # a `np.bool_`

    options = {"num_eval_episodes": 4, "callback": stop}
    state, evaluation = run_agent(agent, tmp_path / "b", **options)
    assert int(state.num_updates) == 1
    assert evaluation.num_episodes == 4


def test_training_stops_at_the_largest_possible_return():
    """No evaluation of CartPole has a mean return above 500."""
    position = Position.init(TrainState(params=(), num_updates=np.int32(1)))
    assert position.evaluated(np.float32(500)).has_reached(500)
    assert not position.evaluated(np.float32(499.99)).has_reached(500)


@pytest.mark.usefixtures("no_pictures")
def test_best_policy_has_the_largest_mean_return(finished_run, tmp_path, monkeypatch):
    """NaN is not the largest mean. A resumed run restores the best mean."""
    *_, stats = finished_run
    means = iter([np.nan, 2.0, 1.0, 1.5])

    def evaluate(*args):
        total = np.float32(next(means) * stats.num_episodes)
        return stats.replace(returns=stats.returns.replace(total=total))

    monkeypatch.setattr(rollout, "evaluate", evaluate)
    best = []
    for steps in (32, 96, 128):
        stop = lambda progress, steps=steps: progress.steps < steps  # noqa: E731
        options = {"evaluate_every": 32, "num_eval_episodes": 4, "callback": stop}
        run_agent(make_agent(), tmp_path, resume=True, **options)
        best.append(checkpoint.steps(tmp_path / "best")[-1])
    assert best == [1, 2, 2]
    assert checkpoint.steps(tmp_path / "last")[-1] == 4


@pytest.mark.parametrize(
    ("evaluate_every", "ends"),
    [(64, [2, 4, 6, 7]), (65, [3, 6, 7]), (1, [1, 2, 3, 4, 5, 6, 7]), (999, [7])],
)
def test_parts_of_the_training_end_at_multiples(evaluate_every, ends):
    """An update has 32 steps. A resumed run evaluates after the same updates."""
    agent = make_agent(SMALL.replace(num_updates=7))
    for num_done in range(7):
        end = num_done + chunk_size(agent, evaluate_every, num_done)
        assert end == min(x for x in ends if x > num_done)


def test_gif_shows_the_first_seed(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(running, "draw_curve", lambda *args: None)
    monkeypatch.setattr(running, "draw_gif", lambda *args: shown.append(args[1]))
    agent = make_agent(SMALL.replace(num_updates=1))
    options = {"key": seed_keys(), "num_eval_episodes": 4}
    state, _ = run_agent(agent, tmp_path, **options)
    first = jax.tree.map(lambda x: x[0], state.params)
    jax.tree.map(np.testing.assert_array_equal, shown, [first])


@pytest.mark.usefixtures("no_pictures")
def test_every_evaluation_plays_new_episodes(tmp_path):
    """The policy does not change, so only new episodes change the statistics."""
    config = SMALL.replace(learning_rate=0.0, normalize_observations=False)
    evaluations = []

    def append(progress):
        evaluations.append(progress.evaluation)

    options = {"evaluate_every": 32, "num_eval_episodes": 4, "callback": append}
    _, last = run_agent(make_agent(config), tmp_path, **options)
    returns = [(x.returns.mean.item(), x.returns.std.item()) for x in evaluations]
    assert len(returns) == len(set(returns)) == 4
    # A resumed run without training repeats the last evaluation.
    _, again = run_agent(make_agent(config), tmp_path, resume=True, **options)
    jax.tree.map(np.testing.assert_array_equal, again, last)


def seed_keys():
    """Returns new keys: a key may be used once."""
    return jax.random.split(jax.random.key(0), 3)


@pytest.fixture(scope="module")
def seeds_run(tmp_path_factory):
    """A run of three seeds, and the calls of its logger."""
    folder, calls = tmp_path_factory.mktemp("runs") / "seeds", []

    def log(metrics, *, step):
        calls.append((step, metrics))

    agent = make_agent()
    options = {"key": seed_keys(), "log": log, **EVALUATE}
    state, evaluation = run_agent(agent, folder, **options)
    return folder, agent, state, evaluation, calls


@pytest.mark.compiles(50)
def test_seeds_are_rows_of_the_tables_and_equal_single_runs(seeds_run):
    """A loop without `run` trains each seed, up to the rounding of another program."""
    folder, agent, state, evaluation, _ = seeds_run
    table = read_table(folder / "metrics.csv")
    assert table["steps"].tolist() == np.repeat([32, 64, 96, 128], 3).tolist()
    assert table["seed"].tolist() == [0, 1, 2] * 4
    train = jax.jit(agent.train)
    for seed, key in enumerate(seed_keys()):
        single_state, metrics = train(agent.init(jax.random.split(key)[0]))
        for name in ("entropy", "return_mean"):
            rows = table[name][table["seed"] == seed]
            np.testing.assert_allclose(rows, metrics[name], rtol=1e-4)
        leaves = map(jax.tree.leaves, (state.params, single_state.params))
        for x, y in zip(*leaves, strict=True):
            np.testing.assert_allclose(x[seed], y, rtol=1e-3, atol=1e-5)
    table = read_table(folder / "evaluations.csv")
    assert table["steps"].tolist() == [64] * 3 + [128] * 3
    np.testing.assert_allclose(table["return_mean"][3:], evaluation.returns.mean)


def test_render_command_plays_the_first_seed(seeds_run):
    folder, *_ = seeds_run
    options = Namespace(folder=folder, env="CartPole-v1", env_param=[], seed=0)
    _, params = load_collector(options, num_envs=1)
    chex.assert_trees_all_equal(params, load(folder, seed=0)[1].params)


def test_load_selects_the_best_parameters_of_a_seed(seeds_run):
    folder, _, state, *_ = seeds_run
    table = read_table(folder / "evaluations.csv")["return_mean"].reshape(2, 3)
    for seed in range(3):
        _, last = load(folder, name="last", seed=seed)
        expected = jax.tree.map(lambda x, seed=seed: x[seed], state.params)
        jax.tree.map(np.testing.assert_array_equal, last.params, expected)
        _, best = load(folder, seed=seed)
        leaves = zip(*map(jax.tree.leaves, (best.params, last.params)), strict=True)
        is_last = all(np.array_equal(x, y) for x, y in leaves)
        assert is_last == (table[1, seed] > table[0, seed])
    with pytest.raises(ValueError, match="`seed` must be from 0 to 2"):
        load(folder)


def test_best_parameters_belong_to_the_best_evaluation_of_each_seed(tmp_path):
    """Three evaluations of two seeds, after updates 1, 2 and 3."""
    files, position = Folder(tmp_path), None
    for update, means in enumerate([(1.0, np.nan), (0.5, 2.0), (3.0, 2.0)], 1):
        params = np.array([[update], [update + 0.5]])
        state = TrainState(params=params, num_updates=np.full(2, update))
        position = position or Position.init(state)
        position = position._replace(state=state).evaluated(np.array(means))
        save_policies(files, position)
        best = checkpoint.restore(files.best, {"params": params})["params"]
        assert best.tolist() == [
            [[1.0], [1.5]],
            [[1.0], [2.5]],
            [[3.0], [2.5]],
        ][update - 1]  # fmt: skip
        assert checkpoint.steps(files.last) == [update]


def test_logger_receives_every_update_with_intervals(seeds_run):
    folder, _, _, evaluation, calls = seeds_run
    assert [step for step, _ in calls] == [32, 64, 96, 128]
    entropy = read_table(folder / "metrics.csv")["entropy"].reshape(4, 3)
    for (_, metrics), values in zip(calls, entropy, strict=True):
        half = 4.302653 * values.std(ddof=1) / np.sqrt(3)  # Student's t, 2 degrees
        np.testing.assert_allclose(metrics["entropy"], values.mean(), rtol=1e-5)
        got = metrics["entropy_ci_high"] - metrics["entropy"]
        np.testing.assert_allclose(got, half, rtol=1e-2)  # a difference of 1e-4
    is_evaluated = ["evaluation/return_mean" in metrics for _, metrics in calls]
    assert is_evaluated == [False, True, False, True]
    mean = np.mean(evaluation.returns.mean)
    np.testing.assert_allclose(calls[-1][1]["evaluation/return_mean"], mean, rtol=1e-6)


def test_curve_shows_the_mean_of_the_seeds(tmp_path):
    write = CSVWriter(tmp_path / "metrics.csv")
    for step in (10, 20):
        for seed in (0, 1):
            write({"seed": seed, "return_mean": step + seed}, step=step)
    steps, returns = read_returns(tmp_path / "metrics.csv")
    assert steps.tolist() == [10, 20]
    assert returns.tolist() == [[10, 20], [11, 21]]


@pytest.mark.very_slow
@pytest.mark.usefixtures("no_pictures")
def test_resumed_run_of_seeds_has_the_bytes_of_an_uninterrupted_run(
    seeds_run, tmp_path
):
    folder, agent, *_ = seeds_run
    stop = lambda _: False  # noqa: E731
    run_agent(agent, tmp_path, key=seed_keys(), callback=stop, **EVALUATE)
    run_agent(agent, tmp_path, key=seed_keys(), resume=True, **EVALUATE)
    check_equal_files(folder, tmp_path, pictures=False)
    with pytest.raises(ValueError, match="`num_seeds` must be 3"):
        run_agent(agent, tmp_path, resume=True, key=seed_keys()[:2], **EVALUATE)


AT_LEAST_1 = "must be an int of at least 1"


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (f"`evaluate_every` {AT_LEAST_1}", {"evaluate_every": 0}),
        (f"`evaluate_every` {AT_LEAST_1}", {"evaluate_every": 64.0}),
        (f"`num_eval_episodes` {AT_LEAST_1}", {"num_eval_episodes": 0}),
        ("`key` must be one typed key", {"key": 0}),
        ("`callback` must be a function, got list", {"callback": [print]}),
    ],
)
def test_wrong_options_raise_before_training(words, options, tmp_path):
    with pytest.raises(ValueError, match=words):
        run_agent(make_agent(), tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("name", "shape"), [("a, b", (4,)), ("steps", (4,)), ("loss", (4, 3))]
)
def test_metrics_must_fit_a_table(name, shape):
    with pytest.raises(ValueError, match=name):
        check_metrics({name: np.zeros(shape)}, (4,))


def test_shared_evaluation_environments_raise(tmp_path):
    env = envs.from_gymnasium("CartPole-v1", num_envs=2)
    agent = PPO(envs.NormalizeHostEnv(env, only=()), SMALL)  # normalizes rewards
    for eval_env in (agent.env, env):
        with pytest.raises(ValueError, match="`eval_env` must be separate"):
            run_agent(agent, tmp_path / "a", eval_env=eval_env)


def test_config_accepts_numpy_numbers():
    config = SMALL.replace(
        gamma=np.float32(0.5), num_epochs=np.int64(1), hidden_layer_sizes=(np.int64(8),)
    )
    settings = describe(make_agent(config))["config"]
    assert settings["gamma"] == 0.5
    assert settings["hidden_layer_sizes"] == [8]


def test_failed_start_writes_no_files(tmp_path):
    with pytest.raises(ValueError, match="`num_minibatches` must divide"):
        run_agent(make_agent(SMALL.replace(num_minibatches=7)), tmp_path)
    assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.usefixtures("no_pictures")
def test_run_without_options_is_evaluated_at_the_end(
    finished_run, tmp_path, monkeypatch
):
    *_, stats = finished_run
    episode_counts = []

    def evaluate(collector, params, key, num_episodes):
        episode_counts.append(num_episodes)
        return stats

    monkeypatch.setattr(rollout, "evaluate", evaluate)
    run_agent(make_agent(), tmp_path)
    assert episode_counts == [100]
    assert read_table(tmp_path / "evaluations.csv")["steps"] == 128
    assert checkpoint.steps(tmp_path / "best") == [4]


@pytest.mark.parametrize(
    ("words", "config", "options"),
    [
        (r"`folder` must not contain a run, .*resume=True", SMALL, {"resume": False}),
        (r"`gamma` must be 0\.99 .* got 0\.9", SMALL.replace(gamma=0.9), {}),
        ("`key` must be", SMALL, {"key": jax.random.key(1)}),
        ("`evaluate_every` must be 64", SMALL, {"evaluate_every": None}),
    ],
)
def test_resume_with_other_options_raises(words, config, options, finished_run):
    folder, *_ = finished_run
    options = {"resume": True, **EVALUATE} | options
    with pytest.raises(ValueError, match=words):
        run_agent(make_agent(config), folder, **options)


@pytest.mark.parametrize(
    "damage",
    {
        "carriage returns": lambda text: text.replace(b"\n", b"\r\n"),
        "byte-order mark": lambda text: b"\xef\xbb\xbf" + text,
        "missing row": lambda text: b"".join(text.splitlines(keepends=True)[:-1]),
        "missing first row": lambda text: text.replace(text.splitlines()[1], b"", 1),
        "empty file": lambda text: b"",
    }.items(),
    ids=lambda damage: damage[0],
)
@pytest.mark.parametrize("table", ["metrics.csv", "evaluations.csv"])
def test_damaged_tables_raise_before_training(damage, table, finished_run, tmp_path):
    folder, *_ = finished_run
    marks = []
    for name in ("metrics.csv", "evaluations.csv"):
        marks.append(mark_table(folder / name, np.zeros(2, int)))
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    path = tmp_path / table
    path.write_bytes(damage[1](path.read_bytes()))
    with pytest.raises(ValueError, match=rf"{table} must have the rows"):
        trim_tables(Folder(tmp_path), np.stack(marks))


class Net(nn.Module):
    """A network of PPO with two options."""

    activation: str = "tanh"
    scale: Any = None

    @nn.compact
    def __call__(self, obs):
        x = getattr(nn, self.activation)(nn.Dense(8)(obs))
        return nn.Dense(2)(x), nn.Dense(1)(x)[..., 0]


@functools.cache
def settings_of(env="CartPole-v1", network=None, **params):
    make = envs.from_gymnasium if env == "gymnasium" else envs.make_vec
    env = "CartPole-v1" if env == "gymnasium" else env
    return describe(PPO(make(env, 4, **params), SMALL, network=network))


@pytest.mark.parametrize(
    ("words", "settings", "other_settings"),
    [
        (
            r"`network\.activation` must be 'tanh' to resume, got 'relu'",
            {"network": Net("tanh")},
            {"network": Net("relu")},
        ),
        ("`network` must be None", {}, {"network": Net()}),
        (
            r"`env\.env\.env_params\.gravity` must be 9\.8 to resume, got 5\.0",
            {},
            {"gravity": 5.0},
        ),
        (
            r"`env\.0\.max_episode_steps` must be 20",
            {"env": "gymnasium", "max_episode_steps": 20},
            {"env": "gymnasium", "max_episode_steps": 30},
        ),
    ],
    ids=str,
)
def test_other_networks_and_environments_cannot_be_resumed(
    words, settings, other_settings
):
    saved, settings = settings_of(**settings), settings_of(**other_settings)
    check_settings(saved, saved, "to resume")
    with pytest.raises(ValueError, match=words):
        check_settings(settings, saved, "to resume")


class Robot(Suite):
    """An environment with the interface of brax and a parameter."""

    def __init__(self, speed):
        super().__init__()
        self.speed = speed


def adapt(env):
    return physics.adapt(env, model_field="model", frame_field=None)


def test_options_of_host_wrappers_are_compared():
    env = envs.from_gymnasium("CartPole-v1", 2)
    settings = [
        describe(PPO(envs.NormalizeHostEnv(env, gamma=gamma, only=()), SMALL))
        for gamma in (0.9, 0.99)
    ]
    with pytest.raises(ValueError, match=r"`env\.gamma` must be 0\.9 .* got 0\.99"):
        check_settings(settings[1], settings[0], "to resume")
    settings[1] = describe(PPO(env, SMALL))
    with pytest.raises(ValueError, match="`env` must be 'NormalizeHostEnv'"):
        check_settings(settings[1], settings[0], "to resume")


def test_parameters_of_lanes_are_compared():
    def settings_of_lanes(speeds):
        make = lambda speed: adapt(Robot(speed))  # noqa: E731
        env = envs.vectorize_each(jax.vmap(make)(speeds))
        return describe(PPO(env, SMALL))

    first, equal, other = map(settings_of_lanes, np.float32([[1, 2], [1, 2], [1, 3]]))
    check_settings(equal, first, "to resume")
    with pytest.raises(ValueError, match=r"speed` must be \[1\.0, 2\.0\] to resume"):
        check_settings(other, first, "to resume")


def test_functions_of_a_config_need_no_name():
    config = SMALL.replace(learning_rate=functools.partial(max, 1e-3))
    name = describe(make_agent(config))["config"]["learning_rate"]["function"]
    assert name == "functools.partial of max"


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("`network` must be passed to `load`", {"fields": {"network": "ActorCritic"}}),
        ("`agent_class` must be passed", {"agent": "os:system"}),
        ("default `config` has a field `bonus`", {"config": {"bonus": 0.5}}),
    ],
)
def test_load_names_missing_parts(words, changes, finished_run, tmp_path):
    folder, *_ = finished_run
    settings = json.loads((folder / "agent.json").read_text())
    (tmp_path / "agent.json").write_text(json.dumps(settings | changes))
    with pytest.raises(ValueError, match=words):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="Pass the folder of the run: "):
        load(folder / "best")
    with pytest.raises(ValueError, match="`name` must be 'best' or 'last', got 'all'"):
        load(folder, name="all")


def test_loaded_agent_needs_environments_for_an_evaluation(finished_run):
    agent, state = load(finished_run[0])
    with pytest.raises(
        ValueError, match=r"agent of `load`: `agent.replace\(env=env\)`"
    ):
        rollout.evaluate(agent, state, jax.random.key(0), 2)


def test_load_compares_the_network(finished_run, tmp_path):
    folder, *_ = finished_run
    settings = json.loads((folder / "agent.json").read_text())
    settings |= {"fields": settings_of(network=Net("tanh"))["fields"]}
    (tmp_path / "agent.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"`network\.activation` must be 'tanh'"):
        load(tmp_path, network=Net("sigmoid"))


def test_load_of_another_network_with_an_equal_description(finished_run, tmp_path):
    """As after a change of the class: the parameters have other shapes."""
    folder, *_ = finished_run
    settings = json.loads((folder / "agent.json").read_text())
    settings["config"]["hidden_layer_sizes"] = [9]
    (tmp_path / "agent.json").write_text(json.dumps(settings))
    shutil.copytree(folder / "best", tmp_path / "best")
    with pytest.raises(ValueError, match=r"code of the run to load.*float32\[8\]"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_folder_must_be_a_folder(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="`folder` must be a folder to write"):
        run_agent(make_agent(), tmp_path / name)


@pytest.mark.very_slow
@pytest.mark.parametrize("kind", ["jax", "host", "seeds"])
def test_killed_runs_equal_an_uninterrupted_run(kind):
    """Kills a run in JAX, on the host or of several seeds, twice."""
    program = ROOT / "tests" / "support" / "killed_runs.py"
    env = {**os.environ, "XLA_FLAGS": QUICK_FLAGS, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, program, "2", kind]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    assert done.stdout.count("equal files") == 1
