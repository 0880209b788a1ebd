"""Ctrl-C at many moments ends the process; a stdout that takes nothing is one line."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest
from command_line import ROOT, command_lines, output, spawn

ERROR = "python -m rollout: error: "
ENDLESS = ["CartPole-v1", "--num-envs=64", "--num-steps=2000000000"]
# Without a cache of programs, so that it compiles; reports on stderr all imports.
OWN = {"JAX_ENABLE_COMPILATION_CACHE": "0", "PYTHONPROFILEIMPORTTIME": "1"}
pytestmark = pytest.mark.slow


def read_until(file, text):
    """Reads a pipe until `text` has come."""
    read = b""
    while text not in read:
        assert select.select([file], [], [], 120)[0], read
        piece = os.read(file, 4096)
        assert piece, read
        read += piece
    return read


@pytest.mark.parametrize(
    ("seconds", "times"),  # people press several times
    [*((seconds, 1) for seconds in (0.1, 1.0, 4.0)), (0.5, 5)],
)
def test_interrupt_at_any_time_after_the_imports_ends_the_process(seconds, times):
    process = spawn(*ENDLESS, env={**os.environ, **OWN})
    before = read_until(process.stderr.fileno(), b"rollout.cli")
    time.sleep(seconds)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT
    assert not command_lines(before + stderr)


@pytest.mark.parametrize("argv", [["--list-envs"], ["CartPole-v1", "--num-steps=8"]])
def test_full_stdout_is_one_line(argv):
    with open("/dev/full", "wb") as full:
        process = spawn(*argv, stdout=full)
        _, stderr = output(process)
    assert stderr == f"{ERROR}[Errno 28] No space left on device\n"
    assert process.returncode == 2


def test_reader_that_is_gone_is_no_error():
    rollout = f"{sys.executable} -m rollout CartPole-v1 --num-steps=8"
    command = f"{rollout} | true; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, timeout=120
    )
    assert (process.returncode, command_lines(process.stderr)) == (141, "")


def test_interrupt_that_the_parent_ignores_is_ignored():
    command = f"trap '' INT; exec {sys.executable} -m rollout CartPole-v1 --num-steps=9"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = {**os.environ, **OWN}
    process = subprocess.Popen(command, shell=True, cwd=ROOT, env=environ, **pipes)
    read_until(process.stderr.fileno(), b"rollout.cli")
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"steps per second" in stdout
