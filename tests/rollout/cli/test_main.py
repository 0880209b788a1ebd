import contextlib
import io
import os
import runpy
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from PIL import Image

from rollout import Collector, Episodes, envs, random_policy, summarize
from rollout.cli import figure, runs
from rollout.cli.arguments import make_parser, parse
from rollout.cli.main import main
from rollout.cli.table import XLA_CPU_LOOP, Result, collected
from rollout.cli.table import one_episode as table_of_one_episode

B, T, SEED, LIMIT = 4, 47, 3, 20  # 15 batches of 3 steps and one of 2
N, CUT = 34, 18  # some of the episodes are cut; the limit then truncates none
ROOT = Path(__file__).parents[3]
RUN = ["CartPole-v1", "--num-envs", f"{B}", "--seed", f"{SEED}"]
RUN += ["--env-param", f"max_steps_in_episode={LIMIT}"]
QUEUE_RUN = [*RUN, f"--num-episodes={N}", f"--max-steps={CUT}"]
slow = pytest.mark.slow
NOT_BOTH = "argument --num-episodes: not allowed with argument --num-steps"
FIELDS = {
    *("obs", "action", "reward", "terminated", "truncated", "next_obs", "mask"),
    *("episode_id", "episode_return", "episode_length", "info/discount"),
}


class Run(NamedTuple):
    status: int
    table: dict[str, str]
    saved: dict[str, np.ndarray]
    folder: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run that does everything; the tests look at its files."""
    folder, stdout = tmp_path_factory.mktemp("run"), io.StringIO()
    files = [f"--save={folder}/a.npz", f"--plot={folder}/a.png"]
    with contextlib.redirect_stdout(stdout):
        status = main([*RUN, f"--num-steps={T}", *files])
    with np.load(folder / "a.npz", allow_pickle=False) as file:
        saved = dict(file)
    return Run(status, read_table(stdout.getvalue()), saved, folder)


@pytest.fixture(scope="module")
def profiled_run(tmp_path_factory):
    folder, stdout = tmp_path_factory.mktemp("profile"), io.StringIO()
    with contextlib.redirect_stdout(stdout):
        status = main([*RUN, f"--num-steps={T}", f"--profile={folder}/trace"])
    return Run(status, read_table(stdout.getvalue()), {}, folder)


@pytest.fixture(scope="module")
def one_episode():
    """The table of a run of one episode of CartPole, without its parameters."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        status = main(["CartPole-v1", f"--seed={SEED}", "--num-episodes=1"])
    assert status == 0
    return read_table(stdout.getvalue())


def read_table(text):
    return {line[:20].strip(): line[20:].strip() for line in text.splitlines()}


def episode_rows(arrays, num_steps):
    """The rows of the table about episodes, from whole arrays."""
    rows = {name: x[:num_steps] for name, x in arrays.items()}
    done = rows["terminated"] | rows["truncated"]
    num_terminated = rows["terminated"].sum()
    flags = f"{num_terminated} terminated, {done.sum() - num_terminated} truncated"
    table = {"episodes": f"{done.sum()} ({flags})"}
    for label in ("return", "length"):
        table[label] = moments(rows[f"episode_{label}"][done])
    return table


def moments(x):
    x = x.astype(np.float64)
    return [np.mean(x), np.std(x), np.min(x), np.max(x)]


def assert_moments(text, expected):
    # Sums of a batch are in float32, and the table has six digits.
    np.testing.assert_allclose([float(x) for x in text.split()], expected, rtol=1e-5)


def assert_episodes(table, expected):
    assert table["episodes"] == expected["episodes"]
    assert_moments(table["return"], expected["return"])
    assert_moments(table["length"], expected["length"])


def error_line(argv, capsys):
    """The line that `main` prints where it rejects its arguments."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    return captured.err


def spawn(*argv, **options):
    command = [sys.executable, "-m", "rollout", *argv]
    return subprocess.Popen(command, cwd=ROOT, **options)


def own_lines(stderr):
    """What we wrote: jaxlib logs that there is no GPU where its plugin is installed."""
    lines = stderr.splitlines(keepends=True)
    return "".join(x for x in lines if "absl::" not in x and "cudart_stub" not in x)


def parsed(*argv):
    return parse(make_parser(), argv)


def test_run_that_succeeds_returns_zero(run):
    assert run.status == 0


def test_saved_file_holds_every_field_time_major(run):
    assert set(run.saved) == FIELDS
    assert {x.shape[:2] for x in run.saved.values()} == {(T, B)}
    assert run.saved["obs"].shape == (T, B, 4)


@pytest.mark.slow
def test_batches_give_the_bits_of_one_call_of_collect_steps(run):
    env = envs.make_vec("CartPole-v1", B, max_steps_in_episode=LIMIT)
    collector = Collector(env=env, policy=random_policy(env.action_space))
    carry = jax.jit(collector.init)(jax.random.key(SEED))
    _, trajectory = collector.collect_steps(carry, None, T)
    expected = {name: getattr(trajectory, name) for name in FIELDS - {"info/discount"}}
    expected["info/discount"] = trajectory.info["discount"]
    for name, array in expected.items():
        np.testing.assert_array_equal(run.saved[name], array, err_msg=name, strict=True)


def test_both_ways_to_end_occur_in_the_run(run):
    assert run.saved["terminated"].any()
    assert (run.saved["truncated"] & ~run.saved["terminated"]).any()


def test_table_agrees_with_numpy_over_the_saved_file(run):
    assert_episodes(run.table, episode_rows(run.saved, T))


def test_table_has_the_run_and_its_speed(run):
    assert run.table["environment"] == f"CartPole-v1 (max_steps_in_episode={LIMIT})"
    assert run.table["device"].split()[0] == jax.devices()[0].platform
    assert run.table["jax"] == jax.__version__
    assert run.table["envs"] == f"{B}"
    assert run.table["steps"] == f"{T * B}"
    assert float(run.table["compile time"].removesuffix(" s")) > 0
    run_time = float(run.table["run time"].removesuffix(" s"))
    speed = float(run.table["steps per second"].replace(",", ""))
    # The time is printed to the millisecond.
    assert T * B / (run_time + 5e-4) <= speed + 0.5
    assert speed - 0.5 <= T * B / max(run_time - 5e-4, 1e-9)


def test_run_without_save_finds_the_same_episodes(run, capsys):
    assert main([*RUN, f"--num-steps={LIMIT}"]) == 0  # by then every lane has ended one
    table = read_table(capsys.readouterr().out)
    assert_episodes(table, episode_rows(run.saved, LIMIT))
    assert not {"saved", "plot", "profile"} & set(table)


def test_files_are_named_in_the_table_and_no_others_are_left(run):
    assert run.table["saved"] == f"{run.folder}/a.npz"
    assert run.table["plot"] == f"{run.folder}/a.png"
    assert {path.name for path in run.folder.iterdir()} == {"a.npz", "a.png"}
    assert (run.folder / "a.png").read_bytes().startswith(b"\x89PNG")


@slow
def test_profile_lies_where_the_table_says(profiled_run):
    assert profiled_run.status == 0
    trace = Path(profiled_run.table["profile"])
    assert trace.is_relative_to(profiled_run.folder / "trace")
    assert list(trace.glob("*.xplane.pb"))


@slow
def test_profile_says_where_the_time_of_a_batch_goes(profiled_run):
    table = profiled_run.table
    parts = ("policy", "env step", "auto reset", "recording")
    assert {*parts, "whole"} <= set(table)
    shares = [int(table[part].split("(")[1].split()[0]) for part in parts]
    assert abs(sum(shares) - 100) <= 2  # each is rounded to a whole one


def test_window_without_an_ending_says_so_and_is_not_drawn(tmp_path, capsys):
    picture = tmp_path / "a.png"
    argv = [*RUN, "--num-steps=3", f"--plot={picture}"]  # it balances for longer
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    table = read_table(captured.out)
    assert table["episodes"] == "0 (no episode ended in this window)"
    assert "nan" not in captured.out
    assert not {"return", "length", "plot"} & set(table)
    assert captured.err.count("\n") == 1
    assert "argument --plot: no episode ended" in captured.err
    assert not picture.exists()


@pytest.mark.parametrize(
    ("num_envs", "num_steps", "num_rows", "suite"),
    [
        (4, 1000, 50, ""),
        (4, 12, 1, ""),
        (4, 47, 3, ""),  # the last batch has two
        (2**22, 40, 1, ""),  # a batch has at most so many rows
        (2**23, 3, 1, ""),  # but at least one step
        (4, 1000, 50, "gymnasium:"),
        (16, 100_000, 64, "gymnasium:"),  # 1024 steps, not five thousand rows
    ],
)
def test_batches_are_a_twentieth_of_the_run(num_envs, num_steps, num_rows, suite):
    counts = f"--num-envs={num_envs}", f"--num-steps={num_steps}"
    assert runs.num_rows(parsed(f"{suite}CartPole-v1", *counts)) == num_rows


@pytest.fixture(scope="module")
def queue_run(tmp_path_factory):
    """One run of exactly N episodes with a figure."""
    folder, stdout = tmp_path_factory.mktemp("queue"), io.StringIO()
    with contextlib.redirect_stdout(stdout):
        status = main([*QUEUE_RUN, f"--plot={folder}/a.png"])
    return Run(status, read_table(stdout.getvalue()), {}, folder)


def play_queue():
    """The episodes of `queue_run`, by the library."""
    env = envs.make_vec("CartPole-v1", B, max_steps_in_episode=LIMIT)
    collector = Collector(env=env, policy=random_policy(env.action_space))
    carry = collector.init(jax.random.key(SEED))
    _, episodes = collector.collect_episodes(carry, None, N, max_steps=CUT)
    return jax.device_get(episodes)


def test_queue_run_reports_the_episodes_of_collect_episodes(queue_run):
    episodes = play_queue()
    num_terminated, num_cut = episodes.terminated.sum(), N - episodes.finished.sum()
    assert min(num_terminated, num_cut) > 0
    flags = f"{num_terminated} terminated, 0 truncated, {num_cut} cut by --max-steps"
    assert queue_run.status == 0
    assert queue_run.table["episodes"] == f"{N} ({flags})"
    for label in ("return", "length"):
        x = getattr(episodes, f"episode_{label}")
        assert_moments(queue_run.table[label], moments(x))


def test_queue_run_gives_the_confidence_interval_of_the_mean(queue_run):
    x = play_queue().episode_return.astype(np.float64)
    # 2.0345 is Student's t at 97.5 % for 33 degrees of freedom, from a table.
    margin = 2.0345 * x.std(ddof=1) / np.sqrt(N)
    expected = f"{x.mean():.6g} (95 % confidence interval "
    assert queue_run.table["mean return"].startswith(expected)
    low, _, high = queue_run.table["mean return"].rstrip(")").split()[-3:]
    # The interval is computed in float32, and the table has five digits.
    wanted = [x.mean() - margin, x.mean() + margin]
    np.testing.assert_allclose([float(low), float(high)], wanted, rtol=1e-4)


def test_queue_run_counts_busy_and_idle_steps(queue_run):
    episodes = play_queue()
    num_steps, busy_until = episodes.episode_length.sum(), np.zeros(B, int)
    for lane, length in zip(episodes.lane, episodes.episode_length, strict=True):
        busy_until[lane] += length
    idle = 100 * (1 - num_steps / (B * busy_until.max()))
    assert idle > 0
    expected = f"{num_steps} ({idle:.1f} % of the lane-steps idle)"
    assert queue_run.table["steps"] == expected


def test_queue_run_says_how_fast_it_was(queue_run):
    table = queue_run.table
    num_steps = int(table["steps"].split()[0])
    assert table["envs"] == f"{B}"
    assert float(table["compile time"].removesuffix(" s")) > 0
    per_second = [
        float(table[f"{unit} per second"].replace(",", ""))
        for unit in ("episodes", "steps")
    ]
    # Both are printed as whole numbers.
    ratio = per_second[1] / per_second[0]
    assert abs(ratio - num_steps / N) <= num_steps / N / per_second[0]


def test_queue_run_leaves_its_figure_and_nothing_else(queue_run):
    assert queue_run.table["plot"] == f"{queue_run.folder}/a.png"
    assert [path.name for path in queue_run.folder.iterdir()] == ["a.png"]
    assert (queue_run.folder / "a.png").read_bytes().startswith(b"\x89PNG")


def test_queue_run_of_one_episode_has_one_lane_and_no_interval(one_episode):
    table = one_episode
    assert table["envs"] == "1"
    assert table["episodes"].startswith("1 (1 terminated")
    length = table["length"].split()[0]
    assert table["steps"] == f"{length} (0.0 % of the lane-steps idle)"
    assert table["mean return"].endswith("(no confidence interval for one episode)")


@pytest.mark.parametrize(
    ("given", "num_envs", "num_steps", "max_steps"),
    [
        ([], 1024, 1000, None),
        (["--num-envs=7"], 7, 1000, None),
        (["--num-episodes=9"], 9, None, 1_000_000),
        (["--num-episodes=5000"], 1024, None, 1_000_000),
        (["--num-episodes=9", "--num-envs=12", "--max-steps=3"], 12, None, 3),
        (["--gif=a.gif"], None, None, 500),
    ],
)
def test_defaults_are_those_of_the_kind_of_run(given, num_envs, num_steps, max_steps):
    run = parsed("CartPole-v1", *given)
    assert num_envs in (None, run.num_envs)
    assert num_steps in (None, run.num_steps)
    assert max_steps in (None, run.max_steps)


@pytest.mark.slow
def test_gif_shows_the_first_episode_of_the_queue(one_episode, tmp_path, capsys):
    path, same = tmp_path / "a.gif", one_episode
    assert main(["CartPole-v1", f"--seed={SEED}", f"--gif={path}"]) == 0
    table = read_table(capsys.readouterr().out)
    length = int(same["length"].split()[0])
    assert table["length"] == f"{length} (terminated)"
    assert table["return"] == same["return"].split()[0]
    assert table["gif"] == f"{path} ({length + 1} frames)"
    with Image.open(path) as image:
        assert image.n_frames == length + 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("terminated", "finished", "ending"),
    [
        (True, True, "terminated"),
        (False, True, "truncated"),
        (False, False, "cut by --max-steps"),
    ],
)
def test_table_of_one_episode_says_how_it_ended(terminated, finished, ending):
    episodes = Episodes(
        episode_return=np.float32([1.5]),
        episode_length=np.int32([1234]),
        terminated=np.array([terminated]),
        truncated=np.array([finished and not terminated]),
        finished=np.array([finished]),
        lane=np.int32([0]),
        num_steps=np.int32(1234),
    )
    table = read_table("\n".join(table_of_one_episode(episodes)))
    assert table["length"] == f"1,234 ({ending})"
    assert table["return"] == "1.5"


@slow
def test_gif_of_an_episode_that_was_cut_says_so(tmp_path, capsys):
    path = tmp_path / "a.GIF"
    assert main(["MountainCar-v0", f"--gif={path}", "--max-steps=2"]) == 0
    table = read_table(capsys.readouterr().out)
    assert table["length"] == "2 (cut by --max-steps)"
    assert table["gif"].endswith("(3 frames)")


def test_gif_without_pygame_names_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    line = error_line(["CartPole-v1", f"--gif={tmp_path}/a.gif"], capsys)
    assert "Drawing CartPole-v1 needs pygame" in line
    assert 'pip install "rollout-jax[render]"' in line
    assert list(tmp_path.iterdir()) == []


@slow
def test_process_that_draws_keeps_stderr_clean(tmp_path):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    hidden = {"SDL_VIDEODRIVER", "SDL_AUDIODRIVER", "MPLBACKEND", "DISPLAY"}
    environ = {name: os.environ[name] for name in set(os.environ) - hidden}
    argv = ["MountainCar-v0", "--max-steps=1", f"--gif={tmp_path}/a.gif"]
    process = spawn(*argv, env=environ, **pipes)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, own_lines(stderr)) == (0, "")
    assert "pygame" not in stdout


def test_ended_episodes_are_those_of_a_plain_loop(run, monkeypatch, capsys, tmp_path):
    drawn = []
    monkeypatch.setattr(figure, "draw", lambda *args: drawn.append(args[-1]))
    assert main([*RUN, f"--num-steps={T}", f"--plot={tmp_path}/a.png"]) == 0
    names = ("terminated", "episode_return", "episode_length")
    expected = []
    for t in range(T):
        for lane in range(B):
            row = [run.saved[name][t, lane] for name in names]
            if row[0] or run.saved["truncated"][t, lane]:
                expected.append(tuple(row))
    columns = [drawn[0][name] for name in names]
    assert list(zip(*columns, strict=True)) == expected
    assert drawn[0]["finished"].all()


def made_up_episodes():
    """Two episodes terminate, one of them at the limit, five reach it, one is cut."""
    flags = np.arange(8)
    return Episodes(
        episode_return=np.linspace(0, 7, 8, dtype=np.float32),
        episode_length=np.arange(1, 9, dtype=np.int32),
        terminated=flags < 2,
        truncated=(flags > 0) & (flags < 7),
        finished=flags < 7,
        lane=np.zeros(8, np.int32),
        num_steps=np.int32(36),
    )


def test_every_ending_is_counted_once():
    stats = jax.device_get(jax.jit(summarize)(made_up_episodes()))
    result = Result(stats, None, 40, 1.0, 1.0, {}, {})
    rows = collected(parsed("CartPole-v1", "--num-episodes=8"), result)
    table = read_table("\n".join(rows))
    assert table["episodes"] == "8 (2 terminated, 5 truncated, 1 cut by --max-steps)"
    assert table["steps"] == "36 (10.0 % of the lane-steps idle)"


def test_figure_shows_every_episode_and_every_kind():
    episodes = vars(made_up_episodes())
    drawn = figure.make_figure("Some-v0", "started", episodes)
    left, right = drawn.axes
    np.testing.assert_array_equal(left.lines[0].get_xdata(), np.arange(1, 9))
    np.testing.assert_array_equal(left.lines[0].get_ydata(), np.arange(8.0))
    assert left.lines[1].get_ydata()[0] == 3.5  # the mean of 0, ..., 7
    assert drawn.get_suptitle() == "Some-v0"
    assert left.get_xlabel() == "episode, in the order in which they started"
    assert left.get_ylabel() == "episode return (sum of rewards)"
    assert right.get_xlabel() == "episode length (steps)"
    assert right.get_ylabel() == "number of episodes"
    heights = [sum(bar.get_height() for bar in bars) for bars in right.containers]
    assert heights == [2, 5, 1]
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert labels == ["terminated", "truncated", "cut"]


def test_list_envs_prints_one_id_per_line_and_examples_of_others(capsys):
    assert main(["--list-envs"]) == 0
    captured = capsys.readouterr()
    *ids, others = captured.out.splitlines()
    assert ids == list(envs.env_ids("installed"))
    assert others.startswith("gymnasium:ID and envpool:ID")
    assert captured.err == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the environment is missing"),
        (["CartPole"], "The nearest are CartPole-v1"),
        ([*RUN, "--num-envs=0"], "argument --num-envs: must be at least 1, got"),
        ([*RUN, "--num-steps=-1"], "argument --num-steps: must be at least 1, got"),
        (
            [*RUN, "--num-steps=many"],
            "argument --num-steps: invalid count value: 'many'",
        ),
        ([*RUN, "--seed=1.5"], "argument --seed: invalid int value: '1.5'"),
        ([*RUN, "--env-param=gravity"], "a Python literal, got 'gravity'"),
        ([*RUN, "--env-param==1"], "must be NAME=VALUE, VALUE a Python"),
        ([*RUN, "--env-param=gravity=g"], "a Python literal, got 'gravity=g'"),
        ([*RUN, "--env-param=gravty=1"], "x_threshold; got gravty."),
        ([*RUN, "--env-param=gravity='a'"], "`gravity` must be a number"),
        ([*RUN, "--env-param=num_envs=3"], "multiple values for argument 'num_envs'"),
        ([*RUN, "--env-param=max_steps_in_episode=10**30"], "a Python literal"),
        ([*RUN, f"--env-param=max_steps_in_episode={10**30}"], "verflow"),
        ([*RUN, "--num-steps=3", "--num-episodes=3"], NOT_BOTH),
        ([*RUN, "--num-steps=1000", "--num-episodes=3"], NOT_BOTH),  # the default
        (
            [*RUN, "--num-episodes=0"],
            "argument --num-episodes: must be at least 1, got",
        ),
        (
            [*RUN, "--num-episodes=3", "--save=a.npz"],
            "argument --save: not allowed with argument --num-episodes",
        ),
        (
            [*RUN, "--num-episodes=3", "--profile=a"],
            "argument --profile: not allowed with argument --num-episodes",
        ),
        (
            [*RUN, "--max-steps=3"],
            "argument --max-steps: not allowed with argument --num-steps",
        ),
        ([*RUN, "--gif=a.gif"], "argument --num-envs: not allowed with argument --gif"),
        (
            ["CartPole-v1", "--gif=a.gif", "--plot=a.png"],
            "argument --plot: not allowed with argument --gif",
        ),
        (["CartPole-v1", "--gif=a.png"], "must end in .gif, got a.png"),
        (["CartPole-v1", "--gif=none/a.gif"], "--gif: there is no folder none"),
        (["MemoryChain-bsuite", "--gif=a.gif"], "got MemoryChain-bsuite."),
        (["CartPole", "--num-episodes=3"], "The nearest are CartPole-v1"),
        (["CartPole", "--gif=a.gif"], "The nearest are CartPole-v1"),
        ([*RUN, "--devices=-1"], "argument --devices: must be at least 1, got -1"),
        ([*RUN, "--devices=3"], "`num_envs` must be a multiple of the 3 devices"),
        ([*RUN, "--devices=1000"], "argument --devices: there are "),
        ([*RUN, "--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_wrong_argument_is_rejected_in_one_line(argv, message, capsys):
    line = error_line(argv, capsys)
    assert line.startswith("python -m rollout: error: ")
    assert message in line


@pytest.mark.parametrize("option", ["--save", "--plot"])
def test_missing_folder_is_found_before_anything_is_collected(
    option, tmp_path, capsys, monkeypatch
):
    monkeypatch.delattr(runs, "collect")
    path = tmp_path / "none" / "a.png"
    line = error_line([*RUN, f"{option}={path}"], capsys)
    assert f"argument {option}: there is no folder {path.parent}" in line


def test_missing_matplotlib_is_found_before_anything_is_collected(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.delattr(runs, "collect")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = error_line([*RUN, f"--plot={tmp_path}/a.png"], capsys)
    assert "argument --plot: matplotlib is not installed" in line


def test_error_of_an_environment_without_parameters_keeps_its_traceback(monkeypatch):
    def fail(*args):
        raise TypeError("a bug")

    monkeypatch.setattr(envs, "make_vec", fail)
    with pytest.raises(TypeError, match="a bug"):
        main(["CartPole-v1"])


@pytest.mark.parametrize(
    "error",
    [MemoryError("no room\nat all"), jax.errors.JaxRuntimeError("no room\nat all")],
)
def test_lack_of_memory_is_one_line(error, capsys, monkeypatch):
    def fail(*args):
        raise error

    monkeypatch.setattr(runs, "collect", fail)
    assert error_line(RUN, capsys) == "python -m rollout: error: no room\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", ("a", 1)),
        ("a=-0.5", ("a", -0.5)),
        ("a=True", ("a", True)),
        ("a=[1, 2]", ("a", [1, 2])),
        ("a='b=c'", ("a", "b=c")),
    ],
)
def test_parameter_is_a_name_and_a_python_literal(text, expected):
    assert parsed("CartPole-v1", "--env-param", text).env_param == [expected]


def test_loop_flag_is_added_to_the_flags_that_are_set(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setattr(envs, "env_ids", tuple)  # of "installed", which is enough
    assert main(["--list-envs", "--xla-cpu-loop"]) == 0
    assert os.environ["XLA_FLAGS"].split() == [
        "--xla_cpu_enable_fast_math=false",
        XLA_CPU_LOOP,
    ]


@slow
def test_number_of_devices_changes_no_row(tmp_path):
    argv = ["Pendulum-v1", "--num-envs=8", "--num-steps=5", "--save"]
    saved = []
    for number in ("1", "4"):
        path = tmp_path / f"{number}.npz"
        assert main([*argv, str(path), "--devices", number]) == 0
        saved.append(dict(np.load(path)))
    assert saved[0].keys() == FIELDS
    for name in FIELDS:
        np.testing.assert_array_equal(saved[1][name], saved[0][name])


@pytest.mark.parametrize(
    ("argv", "cpus", "number"),
    [
        ([], 2, 1),
        (["--num-envs=4096"], 2, 2),
        (["--num-envs=4096"], 16, 2),
        (["--num-envs=12289"], 4, 1),  # a prime
        (["--num-envs=4096", "--num-episodes=5000"], 2, 1),
        (["--devices=all"], 4, 4),
        (["--devices=8"], 4, 8),
    ],
)
def test_default_number_of_devices_is_the_fastest(argv, cpus, number, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cpus))
    assert runs.start_devices(parsed("CartPole-v1", *argv)) == number


@slow
def test_flags_are_set_before_the_backend_starts():
    code = (
        "import rollout.__main__, jax._src.xla_bridge as bridge; "
        "assert not bridge.backends_are_initialized()"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_module_runs_as_a_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rollout", "--list-envs"])
    monkeypatch.delitem(sys.modules, "rollout.__main__", raising=False)
    handler = signal.getsignal(signal.SIGINT)  # a program sets its own
    try:
        with pytest.raises(SystemExit) as stop:
            runpy.run_module("rollout", run_name="__main__")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert stop.value.code == 0
    ids = list(envs.env_ids("installed"))
    assert capsys.readouterr().out.splitlines()[:-1] == ids


@slow
def test_process_with_the_loop_flag_says_so_and_keeps_stderr_clean(run):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options = ["--num-steps=20", "--xla-cpu-loop", "--devices=2"]
    process = spawn(*RUN, *options, **pipes)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, own_lines(stderr)) == (0, "")
    table = read_table(stdout)
    assert (table["xla cpu loop"], table["device"]) == ("on", "cpu, 2 devices")
    assert (run.table["device"], "xla cpu loop" in run.table) == ("cpu", False)


@slow
def test_process_with_a_wrong_argument_exits_with_two():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = spawn("CartPole-v1", "--num-envs=0", **pipes)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (2, "")
    stderr = own_lines(stderr)
    assert stderr.startswith("python -m rollout: error: argument --num-envs: must be")
    assert stderr.count("\n") == 1


@slow
def test_process_whose_reader_is_gone_is_quiet():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with spawn("--list-envs", **pipes) as process:
        process.stdout.close()
        stderr = process.stderr.read()
    assert (process.returncode, own_lines(stderr.decode())) == (141, "")


@slow
def test_interrupt_under_the_bar_ends_on_a_line_of_its_own():
    pty = pytest.importorskip("pty")  # not on Windows
    termios = pytest.importorskip("termios")
    terminal, stderr = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))  # the bar fills the width, 0 at first
    command = ["CartPole-v1", "--num-envs=256", "--num-steps=6250000"]
    # What runs in the background of a shell ignores the signal, and so would a child.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = spawn(*command, stdout=subprocess.PIPE, stderr=stderr)
    signal.signal(signal.SIGINT, handler)
    with process:
        os.close(stderr)
        try:
            before = read_until(terminal, b"M/1.60G")  # a chunk has come
            for _ in range(4):  # as people do
                process.send_signal(signal.SIGINT)
            after = read_until(terminal, None)
            stdout, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            os.close(terminal)
    assert b"%|" in before  # the bar
    assert process.returncode == 130
    assert after.endswith(b"\n\rpython -m rollout: interrupted\r\n")
    assert b"Traceback" not in before + after
    table = read_table(stdout.decode())
    num_steps, *note = table["steps"].split(" ", 1)
    assert 0 < int(num_steps.replace(",", "")) < 1_600_000_000
    assert note == ["(of 1,600,000,000, interrupted)"]
    assert {"episodes", "return", "run time", "steps per second"} <= set(table)


def read_until(terminal, end):
    """Reads a terminal until `end` has come, or until it is closed."""
    text = b""
    while end is None or end not in text:
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, text
        try:
            text += os.read(terminal, 4096)
        except OSError:  # Linux says so that nobody writes any more
            break
    return text
