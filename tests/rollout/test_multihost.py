"""Compares two processes with two devices each with one process with four devices.

`test_many_machines.py` tests killed and resumed training.
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

ROOT = Path(__file__).parents[2]
NUMBERS = range(processes.NUM_PROCESSES)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs both processes and returns the folder of their results."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    paths = [str(ROOT), str(ROOT / "tests" / "support")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, processes.__file__, str(port)]
    children = [subprocess.Popen([*command, str(x), folder], env=env) for x in NUMBERS]
    try:
        assert [process.wait(timeout=240) for process in children] == [0, 0]
    finally:
        for process in children:
            process.kill()
    return folder


@pytest.mark.usefixtures("quick_compile")
def test_stream_has_the_bits_of_one_process(folder):
    parts = [dict(np.load(folder / f"{number}.npz")) for number in NUMBERS]
    for name, want in processes.arrays(processes.make_batch()).items():
        got = np.concatenate([part[name] for part in parts], axis=1)
        np.testing.assert_array_equal(got, want, err_msg=name)


MESSAGES = {
    "lanes": r"`collector` must be the same .*`num_envs` (16|32) in this .* process",
    "uneven": r"`collector` must be the same .*`num_envs` (16|17) in this .* process",
    "parameters": r"`collector` must be .* parameters of checksum \d+ in this",
    "options": r"`stream` must be the same .* options \((8|16), None, None",
    "prefetch": r"`prefetch` must be 0 with several processes",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_differences_between_processes_raise(name, folder):
    for number in NUMBERS:
        messages = json.loads((folder / f"{number}.json").read_text())
        assert re.search(MESSAGES[name], messages[name])
