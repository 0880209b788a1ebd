"""Ctrl-C at many moments, and a stdout that takes nothing: one line, no traceback."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout.cli import interrupts

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
    message = "stdout could not be written: No space left on device"
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


def test_work_aside_gives_its_result_or_its_error():
    assert interrupts.aside(lambda: 3) == 3
    with pytest.raises(KeyError, match="none"):
        interrupts.aside(lambda: {}["none"])


def test_only_the_first_interrupt_raises():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts.raising():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # ignored
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_handler_of_the_caller_stays():
    handler = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts.raising():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
