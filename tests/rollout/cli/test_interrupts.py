"""Ctrl-C at many moments, and a stdout that takes nothing: one line, no traceback."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest
from command_line import ROOT, output, own_lines, read_table, spawn

LINE = "python -m rollout: interrupted\n"
ERROR = "python -m rollout: error: "
ENDLESS = ["CartPole-v1", "--num-envs=64", "--num-steps=2000000000"]
OWN = {"JAX_ENABLE_COMPILATION_CACHE": "0", "PYTHONUNBUFFERED": ""}
IMPORTS = {"PYTHONPROFILEIMPORTTIME": "1"}  # reports on stderr all imports
pytestmark = pytest.mark.slow


def start(*argv, **environ):
    """A process that compiles by itself."""
    return spawn(*argv, env={**os.environ, **OWN, **environ})


def read_until(file, text):
    """Reads a pipe or a terminal until `text` has come; None: until it is closed."""
    read = b""
    while text is None or text not in read:
        assert select.select([file], [], [], 120)[0], read
        try:
            piece = os.read(file, 4096)
        except OSError:  # Linux says so that nobody writes to the terminal any more
            piece = b""
        if not piece:
            assert text is None, read
            break
        read += piece
    return read


def interrupt(process, times=1):
    """Sends Ctrl-C, and returns the output of the process."""
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    return stdout.decode(), stderr


@pytest.mark.parametrize(
    ("kind", "program"),
    [("--num-steps=20", b"jit(make_batch)"), ("--num-episodes=20", b"jit(program)")],
)
def test_interrupt_while_xla_compiles_does_not_wait_for_it(kind, program):
    # Reports on stderr what XLA compiles, and when.
    process = start("CartPole-v1", kind, JAX_LOG_COMPILES="1")
    before = read_until(process.stderr.fileno(), b"Compiling " + program)
    stdout, stderr = interrupt(process)
    assert (process.returncode, stdout) == (130, "")
    assert stderr.endswith(LINE.encode())
    assert b"Finished XLA compilation of " + program not in before + stderr
    assert b"Traceback" not in before + stderr


@pytest.mark.parametrize(
    ("seconds", "times"),  # people press several times
    [*((seconds, 1) for seconds in (0.1, 0.8, 1.6, 4.0)), (0.5, 5)],
)
def test_interrupt_at_any_time_after_the_imports_is_one_line(seconds, times):
    process = start(*ENDLESS, **IMPORTS)
    before = read_until(process.stderr.fileno(), b"rollout.cli.main")
    time.sleep(seconds)
    stdout, stderr = interrupt(process, times)
    assert process.returncode == 130
    assert own_lines(before + stderr) == LINE
    lines = stdout.splitlines()
    assert not lines or lines[0].split() == ["environment", "CartPole-v1"]
    assert not lines or lines[4].endswith(" (of 128,000,000,000, interrupted)")


@pytest.mark.parametrize(
    "argv", [["--list-envs"], ["--help"], ["CartPole-v1", "--num-steps=8"]]
)
def test_full_stdout_is_one_line(argv):
    with open("/dev/full", "wb") as full:
        process = spawn(*argv, stdout=full)
        _, stderr = output(process)
    assert stderr == f"{ERROR}[Errno 28] No space left on device\n"
    assert process.returncode == 2


@pytest.mark.parametrize(
    ("command", "status", "line"),
    [
        ("CartPole-v1 >&-", 2, f"{ERROR}stdout is closed\n"),
        ("--list-envs | true; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_closed_stdout_is_an_error_and_a_reader_that_is_gone_is_not(
    command, status, line
):
    bash = ["bash", "-c", f"{sys.executable} -m rollout {command}"]
    process = subprocess.run(bash, cwd=ROOT, stderr=subprocess.PIPE, timeout=120)
    assert (process.returncode, own_lines(process.stderr)) == (status, line)


def test_interrupt_that_the_parent_ignores_is_ignored():
    command = f"trap '' INT; exec {sys.executable} -m rollout CartPole-v1 --num-steps=9"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = {**os.environ, **IMPORTS}
    process = subprocess.Popen(command, shell=True, cwd=ROOT, env=environ, **pipes)
    read_until(process.stderr.fileno(), b"rollout.cli.main")
    stdout, _ = interrupt(process)
    assert process.returncode == 0
    assert "steps per second" in stdout


def test_interrupt_under_the_bar_ends_on_a_line_of_its_own():
    pty = pytest.importorskip("pty")  # not on Windows
    termios = pytest.importorskip("termios")
    terminal, stderr = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))  # the bar fills the width, 0 at first
    argv = "CartPole-v1", "--num-envs=256", "--num-steps=6250000"
    process = spawn(*argv, stderr=stderr)
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
