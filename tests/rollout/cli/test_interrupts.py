"""Ctrl-C ends the process at any time; an error of stdout is one line."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest
from command_line import ROOT, command_lines, output_of, spawn

ENDLESS = ["speed", "CartPole-v1", "--num-envs=64", "--num-steps=2000000000"]
# Disables the cache, so that the command compiles, and reports all imports on stderr.
VARIABLES = {"JAX_ENABLE_COMPILATION_CACHE": "0", "PYTHONPROFILEIMPORTTIME": "1"}
IMPORTED = b"rollout.cli\n"  # the last import
pytestmark = pytest.mark.slow


def read_until(file, text):
    """Reads a pipe until it contains `text`."""
    output = b""
    while text not in output:
        assert select.select([file], [], [], 120)[0], output
        chunk = os.read(file, 4096)
        assert chunk, output
        output += chunk
    return output


@pytest.mark.parametrize(
    ("seconds", "num_signals"),  # users press the keys several times
    [*((seconds, 1) for seconds in (0.1, 1.0, 4.0)), (0.5, 5)],
)
def test_interrupt_ends_the_process(seconds, num_signals):
    process = spawn(*ENDLESS, env={**os.environ, **VARIABLES})
    imports = read_until(process.stderr.fileno(), IMPORTED)
    time.sleep(seconds)
    for _ in range(num_signals):
        process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT
    assert not command_lines(imports + stderr)


@pytest.mark.parametrize(
    "argv", [["envs"], ["speed", "CartPole-v1", "--num-steps=8"]], ids=["envs", "speed"]
)
def test_full_stdout_is_one_line(argv):
    with open("/dev/full", "wb") as full:
        process = spawn(*argv, stdout=full)
        _, stderr = output_of(process)
    error = "[Errno 28] No space left on device\n"
    assert stderr == f"rollout {argv[0]}: error: {error}"
    assert process.returncode == 2


def test_closed_pipe_is_not_an_error():
    program = f"{sys.executable} -m rollout speed CartPole-v1 --num-steps=8"
    command = f"{program} | true; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, timeout=120
    )
    assert (process.returncode, command_lines(process.stderr)) == (141, "")


def test_interrupt_is_ignored_if_the_parent_ignores_it():
    command = (
        f"trap '' INT; exec {sys.executable} -m rollout speed CartPole-v1 --num-steps=9"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = {**os.environ, **VARIABLES}
    process = subprocess.Popen(command, shell=True, cwd=ROOT, env=environ, **pipes)
    read_until(process.stderr.fileno(), IMPORTED)
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"steps per second" in stdout
