"""The command line with environments in JAX: its table against the library."""

import os
import runpy
import signal
import sys

import jax
import numpy as np
import pytest
from command_line import assert_figures, error_line, output, read_table, run, spawn
from PIL import Image

from rollout import Collector, envs, random_policy
from rollout import cli as command
from rollout.cli import make_parser, parse

B, T, SEED, LIMIT = 4, 47, 3, 20  # 15 batches of 3 steps and one of 2
N, CUT = 34, 18  # some of the episodes are cut; the limit then truncates none
RUN = ["CartPole-v1", "--num-envs", f"{B}", "--seed", f"{SEED}"]
RUN += ["--env-param", f"max_steps_in_episode={LIMIT}"]
QUEUE_RUN = [*RUN, f"--num-episodes={N}", f"--max-episode-steps={CUT}"]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def table():
    """One run of steps."""
    return run(*RUN, f"--num-steps={T}")


@pytest.fixture(scope="module")
def queue_table():
    """One run of exactly N episodes."""
    return run(*QUEUE_RUN)


@pytest.fixture(scope="module")
def one_episode():
    """The table of a run of one episode of CartPole, without its parameters."""
    return run("CartPole-v1", f"--seed={SEED}", "--num-episodes=1")


def make_collector():
    env = envs.make_vec("CartPole-v1", B, max_steps_in_episode=LIMIT)
    return Collector(env=env, policy=random_policy(env.action_space))


@pytest.fixture(scope="module")
def episodes():
    """The episodes of `queue_table`, by the library."""
    collector = make_collector()
    carry = collector.init(jax.random.key(SEED))
    return jax.device_get(
        collector.collect_episodes(carry, None, N, max_episode_steps=CUT)[1]
    )


def speed(table, name="steps"):
    return float(table[f"{name} per second"].replace(",", ""))


def test_episodes_are_those_of_one_call_of_collect_steps(table):
    collector = make_collector()
    carry = collector.init(jax.random.key(SEED))
    rows = jax.device_get(collector.collect_steps(carry, None, T)[1])
    ended = rows.terminated.sum(), (rows.truncated & ~rows.terminated).sum()
    assert min(ended) > 0
    flags = "{} terminated, {} truncated".format(*ended)
    assert table["episodes"] == f"{rows.done.sum()} ({flags})"
    for label in ("return", "length"):
        assert_figures(table[label], getattr(rows, f"episode_{label}")[rows.done])


def test_table_has_the_run_and_its_speed(table):
    assert table["environment"] == f"CartPole-v1 (max_steps_in_episode={LIMIT})"
    assert table["device"] == jax.devices()[0].device_kind
    assert table["jax"] == jax.__version__
    assert (table["envs"], table["steps"]) == (f"{B}", f"{T * B}")
    assert float(table["compile time"].removesuffix(" s")) > 0
    run_time = float(table["run time"].removesuffix(" s"))
    # The time is printed to the millisecond.
    assert T * B / (run_time + 5e-4) <= speed(table) + 0.5
    assert speed(table) - 0.5 <= T * B / max(run_time - 5e-4, 1e-9)


@slow
def test_own_environment_is_of_a_module_or_a_file(tmp_path):
    (tmp_path / "own.py").write_text(
        "import agents, cases, numpy\n"
        "def make(limit): return cases.CountEnv(limit=limit)\n"
        "def pair(): return agents.schedule(*numpy.ones((2, 4, 2)), names='ab')\n"
    )
    own, size = f"{tmp_path}/own.py", ("--num-envs=2", "--num-steps=8")
    table = run(f"{own}:make", *size, "--env-param=limit=2")
    assert table["length"].split() == ["2", "0", "2", "2"]
    assert run(f"{own}:pair", *size)["agent steps"] == "32"
    assert run("cases:CountEnv", *size)["environment"] == "cases:CountEnv"


def test_own_classes_of_gymnax_and_gymnasium_run(tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "from gymnax.environments.classic_control.cartpole import CartPole\n"
    )
    own, size = f"{tmp_path}/own.py", ("--num-envs=2", "--num-steps=32")
    for env in (f"{own}:CartPole", f"gymnasium:{own}:CartPoleEnv"):
        table = run(env, *size)
        assert table["environment"] == env
        assert float(table["length"].split()[0]) > 8  # poles fall at once in neither
    line = error_line(capsys, f"{own}:CartPoleEnv")
    assert "`rollout.envs.from_gymnasium` adapts it" in line


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


def test_queue_run_reports_the_episodes_of_collect_episodes(queue_table, episodes):
    num_terminated, num_cut = episodes.terminated.sum(), N - episodes.finished.sum()
    assert min(num_terminated, num_cut) > 0
    cut = f"{num_cut} cut by --max-episode-steps"
    flags = f"{num_terminated} terminated, 0 truncated, {cut}"
    assert queue_table["episodes"] == f"{N} ({flags})"
    assert_figures(queue_table["return"], episodes.episode_return)
    assert_figures(queue_table["length"], episodes.episode_length)
    x = episodes.episode_return.astype(np.float64)
    # 2.0345 is Student's t at 97.5 % for 33 degrees of freedom, from a table.
    margin = 2.0345 * x.std(ddof=1) / np.sqrt(N)
    mean, _, _, low, _, high = queue_table["mean return"].rstrip(")").split()
    assert mean == f"{x.mean():.6g}"
    # The interval is computed in float32, and the table has five digits.
    wanted = [x.mean() - margin, x.mean() + margin]
    np.testing.assert_allclose([float(low), float(high)], wanted, rtol=1e-4)


def test_queue_run_counts_busy_and_idle_steps(queue_table, episodes):
    num_steps, busy_until = episodes.episode_length.sum(), np.zeros(B, int)
    for lane, length in zip(episodes.lane, episodes.episode_length, strict=True):
        busy_until[lane] += length
    idle = 100 * (1 - num_steps / (B * busy_until.max()))
    assert idle > 0
    expected = f"{num_steps} ({idle:.1f} % of the lane-steps idle)"
    assert queue_table["steps"] == expected
    assert queue_table["envs"] == f"{B}"
    # Both speeds are printed as whole numbers.
    per_second, mean = speed(queue_table, "episodes"), num_steps / N
    assert abs(speed(queue_table) / per_second - mean) <= mean / per_second


def test_queue_run_of_one_episode_has_one_lane_and_no_interval(one_episode):
    assert one_episode["envs"] == "1"
    assert one_episode["episodes"] == "1 (1 terminated, 0 truncated)"
    length = one_episode["length"].split()[0]
    assert one_episode["steps"] == f"{length} (0.0 % of the lane-steps idle)"
    assert one_episode["mean return"] == one_episode["return"].split()[0]


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ("CartPole-v1", "num_envs", 1024),
        ("CartPole-v1 --num-episodes=9", "num_envs", 9),
        ("CartPole-v1 --num-episodes=5000", "num_envs", 1024),
        ("CartPole-v1 --num-episodes=9 --num-envs=12", "num_envs", 12),
        ("CartPole-v1 --num-episodes=9", "max_episode_steps", 1_000_000),
        ("CartPole-v1 --gif=a.gif", "max_episode_steps", 1000),
        ("gymnasium:CartPole-v1", "num_envs", 16),
        ("gymnasium:CartPole-v1 --num-episodes=9", "num_envs", 9),
        ("envpool:A-v0", "is_on_host", True),
        ("gymnasium", "is_on_host", False),
        ("CartPole-v1 --env-param=a=-0.5", "env_param", [("a", -0.5)]),
        ("CartPole-v1 --env-param=a='b=c'", "env_param", [("a", "b=c")]),
    ],
)
def test_arguments_have_defaults_of_the_kind_of_run(argv, name, value):
    assert getattr(parse(make_parser(), argv.split()), name) == value


@pytest.mark.parametrize(
    ("num_envs", "num_steps", "num_rows"),
    [
        (4, 47, 3),  # a twentieth of the run; the last batch has two
        (2**22, 40, 1),  # a batch has at most so many rows
        (2**23, 3, 1),  # but at least one step
    ],
)
def test_rows_of_a_batch(num_envs, num_steps, num_rows):
    argv = "CartPole-v1", f"--num-envs={num_envs}", f"--num-steps={num_steps}"
    assert command.num_rows(parse(make_parser(), argv)) == num_rows


@slow
def test_gif_shows_the_first_episode_of_the_queue(one_episode, tmp_path):
    path = tmp_path / "a.gif"
    table = run("CartPole-v1", f"--seed={SEED}", f"--gif={path}")
    for label in ("episodes", "length", "return"):
        assert table[label] == one_episode[label]
    with Image.open(path) as image:
        assert image.n_frames == int(table["length"].split()[0]) + 1
    assert list(tmp_path.iterdir()) == [path]


@slow
def test_process_that_draws_a_cut_episode_says_so_and_keeps_stderr_clean(tmp_path):
    hidden = {"SDL_VIDEODRIVER", "SDL_AUDIODRIVER", "MPLBACKEND", "DISPLAY"}
    environ = {name: os.environ[name] for name in set(os.environ) - hidden}
    argv = ["MountainCar-v0", "--max-episode-steps=2", f"--gif={tmp_path}/a.GIF"]
    process = spawn(*argv, env=environ)
    stdout, stderr = output(process)
    assert (process.returncode, stderr) == (0, "")
    assert "pygame" not in stdout
    endings = "0 terminated, 0 truncated, 1 cut by --max-episode-steps"
    assert read_table(stdout)["episodes"] == f"1 ({endings})"


@pytest.mark.compiles(100)  # suites of others compile when they are imported
def test_module_runs_as_a_program_and_lists_one_id_per_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rollout", "--list-envs"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a program sets its own
    monkeypatch.delitem(sys.modules, "rollout.__main__", raising=False)
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("rollout", run_name="__main__")
    captured = capsys.readouterr()
    assert (stop.value.code, captured.err) == (0, "")
    *ids, others = captured.out.splitlines()
    assert ids == list(envs.env_ids("installed"))
    assert others.startswith("gymnasium:ID and envpool:ID")


@pytest.mark.parametrize("kind", [TypeError, MemoryError, jax.errors.JaxRuntimeError])
def test_error_of_a_run_is_one_line_and_a_bug_keeps_its_traceback(
    kind, capsys, monkeypatch
):
    def fail(*args):
        raise kind("no room\nat all")

    monkeypatch.setattr(command, "collect", fail)
    if kind is TypeError:
        with pytest.raises(TypeError, match="no room"):
            command.main(["CartPole-v1"])
    else:
        assert error_line(capsys, *RUN) == "python -m rollout: error: no room\n"
