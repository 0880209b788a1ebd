"""Two processes of two devices: the bits of one process of four, and what they refuse.

Training that is killed and resumed is in `test_many_machines.py`.
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
    """What both processes have written."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(ROOT), str(ROOT / "tests" / "support")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, processes.__file__, str(port)]
    started = [subprocess.Popen([*command, str(x), folder], env=env) for x in NUMBERS]
    try:
        assert [process.wait(timeout=240) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return folder


@pytest.mark.usefixtures("quick_compile")
def test_stream_of_parameters_per_lane_has_the_bits_of_one_process(folder):
    parts = [dict(np.load(folder / f"{number}.npz")) for number in NUMBERS]
    for name, want in processes.arrays(processes.make_batch()).items():
        got = np.concatenate([part[name] for part in parts], axis=1)
        np.testing.assert_array_equal(got, want, err_msg=name)


REFUSED = {
    "lanes": r"`collector` must be the same .*`num_envs` (16|32) in this .* process",
    "uneven": r"`collector` must be the same .*`num_envs` (16|17) in this .* process",
    "parameters": r"`collector` must be .* parameters of checksum \d+ in this",
    "options": r"`stream` must be the same .* options \((8|16), None, None",
    "prefetch": r"`prefetch` must be 0 with several processes",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_between_processes_is_refused_in_each(name, folder):
    for number in NUMBERS:
        messages = json.loads((folder / f"{number}.json").read_text())
        assert re.search(REFUSED[name], messages[name])
