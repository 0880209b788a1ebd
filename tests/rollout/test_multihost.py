"""Two processes of two devices: the bits of one process of four, and what goes wrong.

Two runs serve all tests: in the first one of the processes kills itself, the second
goes on from the checkpoint.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import processes
import pytest

import rollout

ROOT = Path(__file__).parents[2]
NUM_UPDATES, DIES = 4, 3  # the update in which a process dies
LANE_AXES = {"trajectory": 1, "lanes": 0}

pytestmark = pytest.mark.slow


def start_all(folder, *numbers):
    """Starts a process for each part of the devices; returns how each one ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(ROOT), str(ROOT / "tests" / "support")]
    options = {
        "env": {**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        "stderr": subprocess.PIPE,
        "text": True,
    }
    started = []
    for number in range(processes.NUM_PROCESSES):
        args = [processes.__file__, port, number, folder, *numbers]
        started.append(subprocess.Popen([sys.executable, *map(str, args)], **options))
    try:
        # The last one first, which may be killed. The others have less than the 100 s
        # after which a process is taken for dead by default.
        errors = [started[-1].communicate(timeout=240)[1]]
        errors = [x.communicate(timeout=80)[1] for x in started[:-1]] + errors
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def killed(folder):
    """The first run: exit codes, stderr, and checkpoints."""
    return *start_all(folder, NUM_UPDATES, DIES), checkpoints(folder)


@pytest.fixture(scope="module")
def resumed(killed, folder):
    """The second run."""
    return start_all(folder, NUM_UPDATES)


def checkpoints(folder):
    return rollout.checkpoint.steps(folder / "checkpoint")


def read(folder, number):
    """The arrays that each process wrote under a number or name."""
    paths = [folder / f"{number}-{i}.npz" for i in range(processes.NUM_PROCESSES)]
    return [dict(np.load(path)) for path in paths]


def test_process_that_is_killed_ends_the_others_within_the_time_that_is_set(killed):
    codes, errors, saved = killed
    assert codes[1] == -9
    assert codes[0] not in (0, -9), errors[0]
    assert "another task died" in errors[0]
    assert "stopped sending heartbeats" in errors[0]
    assert saved == [DIES - 1]


def test_run_that_goes_on_has_the_bits_of_one_process(resumed, folder, tmp_path):
    codes, errors = resumed
    assert codes == [0, 0], errors
    assert checkpoints(folder) == [NUM_UPDATES]
    for number, after in processes.train(tmp_path, NUM_UPDATES):
        parts = read(folder, number)
        for name, want in processes.arrays(after).items():
            got, kind = [part[name] for part in parts], name.split("'")[1]
            if kind in LANE_AXES:  # each process has its own
                got = [np.concatenate(got, axis=LANE_AXES[kind])]
            for mine in got:
                if kind == "plain":  # summed over devices in an order of XLA's
                    np.testing.assert_allclose(mine, want, rtol=1e-5, atol=1e-6)
                    want = got[0]  # by which all processes go
                np.testing.assert_array_equal(mine, want, err_msg=name)
    assert number == NUM_UPDATES


def test_checkpoint_of_several_processes_goes_on_in_one(resumed, folder):
    training = processes.make_training()
    collector = rollout.shard(processes.make_collector(), processes.make_mesh())
    stream = processes.make_stream(collector, training[0])
    like = stream.state(), training
    state, training = rollout.checkpoint.restore(folder / "checkpoint", like)
    stream.restore(state)
    assert stream.steps == NUM_UPDATES * processes.T * processes.B
    got, want = processes.arrays({"training": training}), read(folder, NUM_UPDATES)[0]
    for name in got:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_stream_of_parameters_per_lane_has_the_bits_of_one_process(killed, folder):
    del killed  # it has written the batch
    parts = read(folder, "each")
    for name, want in processes.arrays(processes.make_lengths()).items():
        got = np.concatenate([part[name] for part in parts], axis=1)
        np.testing.assert_array_equal(got, want, err_msg=name)


REFUSED = {
    "lanes": r"`collector` must be the same .*`num_envs` (16|32) here and .* process",
    "uneven": r"`collector` must be the same .*`num_envs` (16|17) here and .* process",
    "parameters": r"`collector` must be .* environment parameters of checksum \d+ here",
    "policy": r"`stream` must be the same .* a program of checksum \d+ here and",
    "prefetch": r"`prefetch` must be 0 with lanes in several processes",
    "host": r'`placement` must not be "host" with lanes in several processes',
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_between_processes_is_refused_in_each(name, killed, folder):
    del killed  # it has written the messages
    for number in range(processes.NUM_PROCESSES):
        messages = json.loads((folder / f"refused-{number}.json").read_text())
        assert re.search(REFUSED[name], messages[name])
