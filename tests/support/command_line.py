"""Runs `python -m rollout`, in this process or in its own, and reads its output."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout.cli import main

ROOT = Path(__file__).parents[2]


def read_table(text):
    """The lines of a table by label; those of agents below "return" by themselves."""
    table, part = {}, ""
    for line in text.splitlines():
        label, value = line[:20].rstrip(), line[20:].strip()
        part = part if label.startswith("  ") else label
        agent = f"{part}/{label.strip()}" if label.startswith("  ") else label
        table[agent] = value
    return table


def run(*argv, status=0):
    """The table of a run in this process."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        assert main(argv) == status
    return read_table(stdout.getvalue())


def error_line(capsys, *argv):
    """The line that `main` prints where it rejects its arguments."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    assert captured.err.startswith("python -m rollout: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def assert_figures(text, x):
    """Mean, deviation and bounds in the table are those of `x`."""
    x = np.asarray(x, np.float64)
    expected = x.mean(), x.std(), x.min(), x.max()
    # Sums of a batch are in float32, and the table has six digits.
    np.testing.assert_allclose([float(y) for y in text.split()], expected, rtol=1e-5)


def spawn(*argv, **options):
    """Starts a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([sys.executable, "-m", "rollout", *argv], cwd=ROOT, **pipes)


def output(process):
    """What a process that ends prints on stdout, and our own lines on stderr."""
    stdout, stderr = process.communicate(timeout=120)
    return (stdout or b"").decode(), own_lines(stderr)


def own_lines(stderr):
    """The lines without those of jaxlib, which finds no GPU, and of the test."""
    others = ("absl::", "cudart_stub", "import time:", "Finished", "Compiling")
    lines = stderr.decode().splitlines(keepends=True)
    return "".join(line for line in lines if not any(x in line for x in others))
