"""The script of docs/many_machines.md as written, in two processes of two devices.

If one of the two is lost, the other ends and says why; started again, both have the
bits of an uninterrupted run.
"""

import concurrent.futures
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from compiles import QUICK_FLAGS

import rollout

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "many_machines.md").read_text()
KILLED, LAST = 4, 8  # updates before a process is lost, and of the whole script
# s, in which the others must end: half a minute alone, more beside other tests.
MOST = 150

pytestmark = pytest.mark.slow


def make_scripts(*, total=LAST):
    """The text of the script for two processes and for one, with so many updates."""
    (script,) = re.findall(r"```python\n(import jax\n.*?)```", PAGE, re.DOTALL)
    (lines,) = re.findall(r"```text\n(import sys\n.*?)```", PAGE, re.DOTALL)
    (mark,) = re.findall(r"^# jax\.distributed\.initialize\(\.\.\.\).*\n", script, re.M)
    (two,) = re.findall(r"^jax\.config\.update.*\n", lines, re.M)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = f"num_updates={LAST})"
    assert "12355" in lines
    assert given in script
    script = script.replace(given, f"num_updates={total})")
    pair = script.replace(mark, lines.replace("12355", port))
    return pair, script.replace(mark, two.replace("2", "4"))


def start(script, folder, numbers):
    """Starts the script once per number; all write into the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    env["XLA_FLAGS"] = QUICK_FLAGS  # the bits are compared with one another
    processes = []
    for number in numbers:
        with (
            (folder / f"out-{number}").open("w") as out,
            (folder / f"error-{number}").open("w") as error,
        ):
            args = [sys.executable, "train.py", str(number)]
            options = {"cwd": folder, "env": env, "stdout": out, "stderr": error}
            processes.append(subprocess.Popen(args, **options))
    return processes


def wait_for_update(number, folder, processes):
    """Returns as soon as the first process has printed the lines of some updates."""
    deadline = time.monotonic() + 180
    while (folder / "out-0").read_text().count(" steps/s\n") < number:
        ended = [i for i, x in enumerate(processes) if x.poll() is not None]
        assert not ended, (folder / f"error-{ended[0]}").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def seconds_until_end(process):
    began = time.monotonic()
    process.wait(timeout=2 * MOST)
    return time.monotonic() - began


@pytest.fixture(scope="module")
def started():
    """The processes that were started; those still running are killed at the end."""
    processes = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("page")


# The lost process and how it ends, its exit code, and the other one's message.
LOST = {
    "killed": (1, signal.SIGKILL, {-signal.SIGKILL}, r"stopped sending heartbeats"),
    "raises": (1, signal.SIGINT, None, r"Shutdown barrier has failed"),
    "first": (0, signal.SIGKILL, {-signal.SIGKILL}, r"leader task was preempted/died"),
}


@pytest.fixture(scope="module")
def lost(folder, started):
    """Per case the exit codes, the seconds in which the other ended, and its words."""
    waiting = {}
    # Most of the time is waiting: the next ones start meanwhile.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, (number, sent, *_) in LOST.items():
            # That of the first case goes on later.
            pair, _ = make_scripts(total=LAST if name == "killed" else 60)
            processes = start(pair, folder / name, range(2))
            started += processes
            wait_for_update(KILLED, folder / name, processes)
            processes[number].send_signal(sent)
            seconds = pool.submit(seconds_until_end, processes[1 - number])
            waiting[name] = processes, seconds
    return {
        name: (
            [x.wait(timeout=MOST) for x in processes],
            seconds.result(),
            [(folder / name / f"error-{i}").read_text() for i in range(2)],
        )
        for name, (processes, seconds) in waiting.items()
    }


@pytest.mark.parametrize("name", LOST)
def test_other_process_ends_by_itself_and_says_why(name, lost):
    number, _, codes, reason = LOST[name]
    got, seconds, errors = lost[name]
    other = 1 - number
    assert got[other] not in (0, -signal.SIGKILL)
    assert got[number] in codes if codes else got[number] != 0
    assert seconds < MOST
    assert re.search(reason, errors[other]), errors[other]
    if name == "raises":
        assert "KeyboardInterrupt" in errors[number]


def test_run_that_was_killed_ends_with_the_files_of_one_that_was_not(
    lost, folder, started
):
    assert lost  # ended
    killed = folder / "killed"
    (number,) = rollout.checkpoint.steps(killed / "run" / "resume")
    assert KILLED <= number < LAST
    (pair, one), (other_pair, _) = make_scripts(), make_scripts()  # other ports
    alone = shutil.copytree(killed, folder / "alone")  # two processes go on as one
    runs = {
        killed: start(pair, killed, range(2)),
        folder / "whole": start(other_pair, folder / "whole", range(2)),
        alone: start(one, alone, range(1)),
    }
    started += itertools.chain(*runs.values())
    for where, processes in runs.items():
        for number, process in enumerate(processes):
            code = process.wait(timeout=240)
            assert code == 0, (where / f"error-{number}").read_text()
    rows, expected, other = (
        (where / "run" / "metrics.csv").read_text().splitlines() for where in runs
    )
    assert rows == expected
    assert len(rows) == len(other) == 1 + LAST
    # Afterwards, sums over devices round differently in one process.
    assert rows[: 1 + KILLED] == other[: 1 + KILLED]
    for where in runs:
        assert rollout.checkpoint.steps(where / "run" / "last") == [LAST]
    saved, expected = (
        np.load(x / "run" / "resume" / f"{LAST}.checkpoint.npz") for x in [*runs][:2]
    )
    for name in expected.files:
        np.testing.assert_array_equal(saved[name], expected[name], err_msg=name)
