"""Tests of the script of docs/many_machines.md in two processes with two devices each.

If a process is lost, the remaining process ends with a message. After a restart, both
have the bits of an uninterrupted run.
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
UPDATES_BEFORE_LOSS = 4  # updates before a process is lost
NUM_UPDATES = 8  # updates of the complete script
# Seconds in which the remaining process must end. Other tests slow it down.
TIMEOUT = 150

pytestmark = [pytest.mark.slow, pytest.mark.very_slow]


def make_scripts(*, total=NUM_UPDATES):
    """Returns the scripts for two processes and for one process."""
    (script,) = re.findall(r"```python\n(import jax\n.*?)```", PAGE, re.DOTALL)
    (lines,) = re.findall(r"```text\n(import sys\n.*?)```", PAGE, re.DOTALL)
    (comment,) = re.findall(
        r"^# jax\.distributed\.initialize\(\.\.\.\).*\n", script, re.M
    )
    (device_count,) = re.findall(r"^jax\.config\.update.*\n", lines, re.M)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    option = f"num_updates={NUM_UPDATES})"
    assert "12355" in lines
    assert option in script
    script = script.replace(option, f"num_updates={total})")
    pair = script.replace(comment, lines.replace("12355", port))
    return pair, script.replace(comment, device_count.replace("2", "4"))


def start_processes(script, folder, numbers):
    """Starts the script once per process number in a common folder."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    env["XLA_FLAGS"] = QUICK_FLAGS  # all compared runs have the same options
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
    """Waits until the first process has printed a number of updates."""
    deadline = time.monotonic() + 180
    while (folder / "out-0").read_text().count(" steps/s\n") < number:
        exited = [i for i, x in enumerate(processes) if x.poll() is not None]
        assert not exited, (folder / f"error-{exited[0]}").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def seconds_until_end(process):
    start_time = time.monotonic()
    process.wait(timeout=2 * TIMEOUT)
    return time.monotonic() - start_time


@pytest.fixture(scope="module")
def child_processes():
    """Yields a list of child processes and kills them at the end."""
    processes = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("page")


# The lost process, its signal, its exit codes, and the message of the remaining one.
LOST = {
    "killed": (1, signal.SIGKILL, {-signal.SIGKILL}, r"stopped sending heartbeats"),
    "raises": (1, signal.SIGINT, None, r"Shutdown barrier has failed"),
    "first": (0, signal.SIGKILL, {-signal.SIGKILL}, r"leader task was preempted/died"),
}


@pytest.fixture(scope="module")
def lost_runs(folder, child_processes):
    """Returns exit codes, seconds until the end and error outputs by case."""
    pending = {}
    # Start the next case while the remaining process of a case waits.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, (number, signal_number, *_) in LOST.items():
            # The run of the first case is resumed later.
            pair, _ = make_scripts(total=NUM_UPDATES if name == "killed" else 60)
            processes = start_processes(pair, folder / name, range(2))
            child_processes += processes
            wait_for_update(UPDATES_BEFORE_LOSS, folder / name, processes)
            processes[number].send_signal(signal_number)
            seconds = pool.submit(seconds_until_end, processes[1 - number])
            pending[name] = processes, seconds
    return {
        name: (
            [x.wait(timeout=TIMEOUT) for x in processes],
            seconds.result(),
            [(folder / name / f"error-{i}").read_text() for i in range(2)],
        )
        for name, (processes, seconds) in pending.items()
    }


@pytest.mark.parametrize("name", LOST)
def test_remaining_process_ends_with_a_message(name, lost_runs):
    number, _, codes, reason = LOST[name]
    exit_codes, seconds, errors = lost_runs[name]
    remaining = 1 - number
    assert exit_codes[remaining] not in (0, -signal.SIGKILL)
    assert exit_codes[number] in codes if codes else exit_codes[number] != 0
    assert seconds < TIMEOUT
    assert re.search(reason, errors[remaining]), errors[remaining]
    if name == "raises":
        assert "KeyboardInterrupt" in errors[number]


def test_resumed_run_equals_an_uninterrupted_run(lost_runs, folder, child_processes):
    assert lost_runs
    interrupted = folder / "killed"
    (number,) = rollout.checkpoint.steps(interrupted / "run" / "resume")
    assert UPDATES_BEFORE_LOSS <= number < NUM_UPDATES
    # The two pairs of processes have different ports.
    pair, single_script = make_scripts()
    second_pair, _ = make_scripts()
    # One process resumes the run of two processes.
    single = shutil.copytree(interrupted, folder / "alone")
    runs = {
        interrupted: start_processes(pair, interrupted, range(2)),
        folder / "whole": start_processes(second_pair, folder / "whole", range(2)),
        single: start_processes(single_script, single, range(1)),
    }
    child_processes += itertools.chain(*runs.values())
    for run_folder, processes in runs.items():
        for number, process in enumerate(processes):
            code = process.wait(timeout=240)
            assert code == 0, (run_folder / f"error-{number}").read_text()
    rows, expected, single_rows = (
        (run_folder / "run" / "metrics.csv").read_text().splitlines()
        for run_folder in runs
    )
    assert rows == expected
    assert len(rows) == len(single_rows) == 1 + NUM_UPDATES
    # Later sums over devices have other roundings in one process.
    assert rows[: 1 + UPDATES_BEFORE_LOSS] == single_rows[: 1 + UPDATES_BEFORE_LOSS]
    for run_folder in runs:
        assert rollout.checkpoint.steps(run_folder / "run" / "last") == [NUM_UPDATES]
    saved, expected = (
        np.load(x / "run" / "resume" / f"{NUM_UPDATES}.checkpoint.npz")
        for x in [*runs][:2]
    )
    for name in expected.files:
        np.testing.assert_array_equal(saved[name], expected[name], err_msg=name)
