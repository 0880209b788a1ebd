"""`rollout speed`, `render` and `envs` in JAX: their tables against the library."""

import os
import runpy
import signal
import sys

import jax
import numpy as np
import pytest
from command_line import assert_figures, error_line, output_of, read_table, run, spawn
from PIL import Image

from rollout import Collector, envs, random_policy
from rollout.cli import arguments, main, speed
from rollout.cli.command import make_parser

B, T, SEED, LIMIT = 4, 47, 3, 20  # 15 batches of 3 steps and one of 2
N, CUT = 34, 18  # some episodes are cut, and none reach the time limit
RUN = ["speed", "CartPole-v1", "--num-envs", f"{B}", "--seed", f"{SEED}"]
RUN += ["--env-param", f"max_steps_in_episode={LIMIT}"]
EPISODES_RUN = [*RUN, f"--num-episodes={N}", f"--max-episode-steps={CUT}"]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def table():
    """One run of steps."""
    return run(*RUN, f"--num-steps={T}")


@pytest.fixture(scope="module")
def episodes_table():
    """One run of exactly N episodes."""
    return run(*EPISODES_RUN)


@pytest.fixture(scope="module")
def one_episode():
    """The table of a run of one episode of CartPole, without its parameters."""
    return run("speed", "CartPole-v1", f"--seed={SEED}", "--num-episodes=1")


def make_collector():
    env = envs.make_vec("CartPole-v1", B, max_steps_in_episode=LIMIT)
    return Collector(env=env, policy=random_policy(env.action_space))


@pytest.fixture(scope="module")
def episodes():
    """The episodes of `episodes_table`, collected by the library."""
    collector = make_collector()
    carry = collector.init(jax.random.key(SEED))
    return jax.device_get(
        collector.collect_episodes(carry, None, N, max_episode_steps=CUT)[1]
    )


def rate(table, name="steps"):
    return float(table[f"{name} per second"].replace(",", ""))


def test_table_of_steps_matches_collect_steps(table):
    collector = make_collector()
    carry = collector.init(jax.random.key(SEED))
    trajectory = jax.device_get(collector.collect_steps(carry, None, T)[1])
    terminated, done = trajectory.terminated, trajectory.done
    num_terminated = terminated.sum()
    num_truncated = (trajectory.truncated & ~terminated).sum()
    assert min(num_terminated, num_truncated) > 0
    endings = f"{num_terminated} terminated, {num_truncated} truncated"
    assert table["episodes"] == f"{done.sum()} ({endings})"
    assert_figures(table["return"], trajectory.episode_return[done])
    assert_figures(table["length"], trajectory.episode_length[done])


def test_table_has_environment_device_and_speed(table):
    assert table["environment"] == f"CartPole-v1 (max_steps_in_episode={LIMIT})"
    assert table["device"] == jax.devices()[0].device_kind
    assert table["jax"] == jax.__version__
    assert (table["envs"], table["steps"]) == (f"{B}", f"{T * B}")
    assert float(table["compile time"].removesuffix(" s")) > 0
    run_time = float(table["run time"].removesuffix(" s"))
    # The time is printed to the millisecond.
    assert T * B / (run_time + 5e-4) <= rate(table) + 0.5
    assert rate(table) - 0.5 <= T * B / max(run_time - 5e-4, 1e-9)


@slow
def test_custom_environment_comes_from_a_module_or_a_file(tmp_path):
    (tmp_path / "custom.py").write_text(
        "import agents, cases, numpy\n"
        "def make(limit): return cases.CountEnv(limit=limit)\n"
        "def pair(): return agents.schedule(*numpy.ones((2, 4, 2)), names='ab')\n"
    )
    file, size = f"{tmp_path}/custom.py", ("--num-envs=2", "--num-steps=8")
    table = run("speed", f"{file}:make", *size, "--env-param=limit=2")
    assert table["length"].split() == ["2", "0", "2", "2"]
    assert run("speed", f"{file}:pair", *size)["agent steps"] == "32"
    table = run("speed", "cases:CountEnv", *size)
    assert table["environment"] == "cases:CountEnv"


def test_custom_classes_of_gymnax_and_gymnasium_run(tmp_path, capsys):
    (tmp_path / "custom.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "from gymnax.environments.classic_control.cartpole import CartPole\n"
    )
    file, size = f"{tmp_path}/custom.py", ("--num-envs=2", "--num-steps=32")
    for env in (f"{file}:CartPole", f"gymnasium:{file}:CartPoleEnv"):
        table = run("speed", env, *size)
        assert table["environment"] == env
        assert float(table["length"].split()[0]) > 8  # no pole falls immediately
    error = error_line(capsys, "speed", f"{file}:CartPoleEnv")
    assert "`rollout.envs.from_gymnasium(CartPoleEnv, num_envs=4)`" in error


@slow
def test_profile_times_the_parts_and_writes_a_trace(tmp_path):
    table = run(*RUN, f"--profile={tmp_path}/trace")
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    parts = {x.partition("/")[2]: y for x, y in table.items() if y.endswith(" ms")}
    times = {name: float(text.removesuffix(" ms")) for name, text in parts.items()}
    total = times.pop("total")
    assert [*times][:4] == ["policy", "env step", "auto reset", "recording"]
    assert [*times][4:] in (["unexplained"], ["saved by fusing"])
    np.testing.assert_allclose(sum(times.values()), total, atol=0.005)


def test_table_of_episodes_matches_collect_episodes(episodes_table, episodes):
    num_terminated, num_cut = episodes.terminated.sum(), N - episodes.finished.sum()
    assert min(num_terminated, num_cut) > 0
    cut = f"{num_cut} cut by --max-episode-steps"
    endings = f"{num_terminated} terminated, 0 truncated, {cut}"
    assert episodes_table["episodes"] == f"{N} ({endings})"
    assert_figures(episodes_table["return"], episodes.episode_return)
    assert_figures(episodes_table["length"], episodes.episode_length)
    x = episodes.episode_return.astype(np.float64)
    # 2.0345 is Student's t at 97.5 % for 33 degrees of freedom, from a table.
    margin = 2.0345 * x.std(ddof=1) / np.sqrt(N)
    mean, _, _, low, _, high = episodes_table["mean return"].rstrip(")").split()
    assert mean == f"{x.mean():.6g}"
    # The interval is computed in float32, and the table has five digits.
    interval = [x.mean() - margin, x.mean() + margin]
    np.testing.assert_allclose([float(low), float(high)], interval, rtol=1e-4)


def test_table_of_episodes_counts_idle_steps(episodes_table, episodes):
    num_steps, busy_until = episodes.episode_length.sum(), np.zeros(B, int)
    for lane, length in zip(episodes.lane, episodes.episode_length, strict=True):
        busy_until[lane] += length
    idle = 100 * (1 - num_steps / (B * busy_until.max()))
    assert idle > 0
    expected = f"{num_steps} ({idle:.1f} % of the lane-steps idle)"
    assert episodes_table["steps"] == expected
    assert episodes_table["envs"] == f"{B}"
    # Both speeds are printed as whole numbers.
    per_second, mean = rate(episodes_table, "episodes"), num_steps / N
    assert abs(rate(episodes_table) / per_second - mean) <= mean / per_second


def test_one_episode_has_one_lane_and_no_interval(one_episode):
    assert one_episode["envs"] == "1"
    assert one_episode["episodes"] == "1 (1 terminated, 0 truncated)"
    length = one_episode["length"].split()[0]
    assert one_episode["steps"] == f"{length} (0.0 % of the lane-steps idle)"
    assert one_episode["mean return"] == one_episode["return"].split()[0]


@pytest.mark.parametrize(
    ("argv", "num_envs"),
    [
        ("CartPole-v1", 1024),
        ("CartPole-v1 --num-episodes=9", 9),
        ("CartPole-v1 --num-episodes=5000", 1024),
        ("gymnasium:CartPole-v1", 16),
        ("gymnasium:CartPole-v1 --num-episodes=9", 9),
    ],
)
def test_default_number_of_environments(argv, num_envs):
    options = make_parser().parse_args(["speed", *argv.split()])
    assert speed.default_num_envs(options) == num_envs


@pytest.mark.parametrize(
    ("env", "is_host"),
    [("envpool:A-v0", True), ("gymnasium:A-v0", True), ("gymnasium", False)],
)
def test_host_environments_have_a_prefix(env, is_host):
    assert arguments.is_host_env(make_parser().parse_args(["speed", env])) == is_host


@pytest.mark.parametrize(("text", "value"), [("a=-0.5", -0.5), ("a='b=c'", "b=c")])
def test_parameter_of_an_environment_is_a_literal(text, value):
    assert arguments.parse_env_param(text) == ("a", value)


@pytest.mark.parametrize(
    ("num_envs", "num_steps", "num_rows"),
    [
        (4, 47, 3),  # a twentieth of the steps; the last batch has two
        (2**22, 40, 1),  # the maximum size of a batch
        (2**23, 3, 1),  # at least one step
    ],
)
def test_rows_of_a_batch(num_envs, num_steps, num_rows):
    assert speed.batch_rows(num_steps, num_envs) == num_rows


@slow
def test_gif_shows_the_first_episode(one_episode, tmp_path):
    path = tmp_path / "a.gif"
    table = run("render", "CartPole-v1", str(path), f"--seed={SEED}")
    for label in ("episodes", "length", "return"):
        assert table[label] == one_episode[label]
    with Image.open(path) as image:
        assert image.n_frames == int(table["length"].split()[0]) + 1
    assert list(tmp_path.iterdir()) == [path]


@slow
def test_render_reports_a_cut_episode_and_prints_nothing_on_stderr(tmp_path):
    hidden = {"SDL_VIDEODRIVER", "SDL_AUDIODRIVER", "MPLBACKEND", "DISPLAY"}
    environ = {name: os.environ[name] for name in set(os.environ) - hidden}
    argv = ["MountainCar-v0", f"{tmp_path}/a.GIF", "--max-episode-steps=2"]
    process = spawn("render", *argv, env=environ)
    stdout, stderr = output_of(process)
    assert (process.returncode, stderr) == (0, "")
    assert "pygame" not in stdout
    endings = "0 terminated, 0 truncated, 1 cut by --max-episode-steps"
    assert read_table(stdout)["episodes"] == f"1 ({endings})"


@pytest.mark.compiles(100)  # some suites compile when they are imported
def test_envs_prints_one_id_per_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rollout", "envs"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keep the handler
    monkeypatch.delitem(sys.modules, "rollout.__main__", raising=False)
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module("rollout", run_name="__main__")
    captured = capsys.readouterr()
    assert (exit_info.value.code, captured.err) == (0, "")
    *ids, last_line = captured.out.splitlines()
    assert ids == list(envs.env_ids("installed"))
    assert last_line.startswith("gymnasium:ID and envpool:ID")


@pytest.mark.parametrize("error_class", [MemoryError, jax.errors.JaxRuntimeError])
def test_error_is_one_line(error_class, capsys, monkeypatch):
    def fail(*args):
        raise error_class("no memory\nat all")

    monkeypatch.setattr(speed, "collect_steps", fail)
    assert error_line(capsys, *RUN) == "rollout speed: error: no memory\n"


def test_bug_has_a_traceback(monkeypatch):
    def fail(*args):
        raise TypeError("a bug")

    monkeypatch.setattr(speed, "collect_steps", fail)
    with pytest.raises(TypeError, match="a bug"):
        main(["speed", "CartPole-v1"])
