"""Ctrl-C at many moments, and a stdout that takes nothing: one line, no traceback."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LINE = "python -m rollout: interrupted\n"
ENDLESS = ["CartPole-v1", "--num-envs=64", "--num-steps=2000000000"]
slow = pytest.mark.slow


def spawn(*argv, environ=(), **options):
    """A process that can be interrupted, also if we ourselves ignore Ctrl-C."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    own = {"JAX_ENABLE_COMPILATION_CACHE": "0", "PYTHONUNBUFFERED": ""}
    environ = {**os.environ, **own, **dict(environ)}
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "rollout", *argv]
    process = subprocess.Popen(command, cwd=ROOT, env=environ, **pipes)
    signal.signal(signal.SIGINT, handler)
    return process


def own_lines(stderr):
    """The lines without those of jaxlib, which finds no GPU, and of the test."""
    others = ("absl::", "cudart_stub", "import time:", "Finished", "Compiling")
    lines = stderr.decode().splitlines(keepends=True)
    return "".join(line for line in lines if not any(x in line for x in others))


def read_until(process, text):
    """Reads stderr until `text` has come."""
    read = b""
    while text not in read:
        assert select.select([process.stderr], [], [], 120)[0], read
        piece = os.read(process.stderr.fileno(), 4096)
        assert piece, read
        read += piece
    return read


def interrupt(process):
    """Sends Ctrl-C, and returns the output of the process."""
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    return stdout.decode(), stderr


def assert_one_line(process, before, stderr):
    assert process.returncode == 130
    assert own_lines(before + stderr) == LINE


@slow
@pytest.mark.parametrize(
    ("kind", "program"),
    [("--num-steps=20", b"jit(make_batch)"), ("--num-episodes=20", b"jit(program)")],
)
def test_interrupt_while_xla_compiles_does_not_wait_for_it(kind, program):
    environ = {"JAX_LOG_COMPILES": "1"}  # reports on stderr what XLA compiles, and when
    process = spawn("CartPole-v1", kind, environ=environ)
    before = read_until(process, b"Compiling " + program)
    stdout, stderr = interrupt(process)
    assert process.returncode == 130
    assert stderr.endswith(LINE.encode())
    assert b"Finished XLA compilation of " + program not in before + stderr
    assert b"Traceback" not in before + stderr
    assert stdout == ""


@slow
@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.8, 1.6, 3.0, 5.0, 8.0])
def test_interrupt_at_any_time_after_the_imports_is_one_line(seconds):
    environ = {"PYTHONPROFILEIMPORTTIME": "1"}  # reports on stderr all imports
    process = spawn(*ENDLESS, environ=environ)
    before = read_until(process, b"rollout.cli.main")
    time.sleep(seconds)
    stdout, stderr = interrupt(process)
    assert_one_line(process, before, stderr)
    lines = stdout.splitlines()
    assert not lines or lines[0].split() == ["environment", "CartPole-v1"]
    assert not lines or lines[4].endswith(" (of 128,000,000,000, interrupted)")


@slow
def test_full_stdout_is_one_line():
    with open("/dev/full", "wb") as full:
        process = spawn("--list-envs", stdout=full)
        _, stderr = process.communicate(timeout=120)
    message = "[Errno 28] No space left on device"
    assert own_lines(stderr) == f"python -m rollout: error: {message}\n"
    assert process.returncode == 2


@slow
@pytest.mark.parametrize("argv", [["--help"], ["CartPole-v1", "--num-steps=8"]])
def test_full_stdout_of_help_and_of_a_table_is_one_line(argv):
    with open("/dev/full", "wb") as full:
        process = spawn(*argv, stdout=full)
        _, stderr = process.communicate(timeout=120)
    assert own_lines(stderr).count("\n") == 1
    assert process.returncode == 2


@slow
def test_closed_stdout_is_rejected_before_anything_is_collected():
    command = f"exec {sys.executable} -m rollout CartPole-v1 >&-"
    pipes = {"cwd": ROOT, "stderr": subprocess.PIPE, "timeout": 120}
    process = subprocess.run(command, shell=True, **pipes)
    message = "python -m rollout: error: stdout is closed\n"
    assert own_lines(process.stderr) == message
    assert process.returncode == 2


@slow
def test_interrupts_after_the_first_are_ignored():
    process = spawn(*ENDLESS, environ={"PYTHONPROFILEIMPORTTIME": "1"})
    before = read_until(process, b"rollout.cli.main")
    time.sleep(0.5)  # until the handler is set
    for _ in range(4):  # as people do
        process.send_signal(signal.SIGINT)
    _, stderr = interrupt(process)
    assert_one_line(process, before, stderr)


@slow
def test_interrupt_that_the_parent_ignores_is_ignored():
    command = f"trap '' INT; exec {sys.executable} -m rollout CartPole-v1 --num-steps=9"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    process = subprocess.Popen(command, shell=True, cwd=ROOT, env=environ, **pipes)
    read_until(process, b"rollout.cli.main")
    stdout, _ = interrupt(process)
    assert process.returncode == 0
    assert "steps per second" in stdout
