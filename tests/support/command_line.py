"""Runs `python -m rollout` in this or in a new process, and reads its output."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.cli import main

ROOT = Path(__file__).parents[2]


def read_table(text):
    """Returns the values of a table by label; indented labels are "parent/label"."""
    table, parent = {}, ""
    for line in text.splitlines():
        label, value = line[:20].rstrip(), line[20:].strip()
        is_indented = label.startswith("  ")
        parent = parent if is_indented else label
        table[f"{parent}/{label.strip()}" if is_indented else label] = value
    return table


def run(*argv, status=0):
    """Runs the command in this process; returns its table."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        assert main(argv) == status
    return read_table(stdout.getvalue())


def error_line(capsys, *argv):
    """Returns the line that `main` prints if it rejects its arguments."""
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    streams = capsys.readouterr()
    assert (exit_info.value.code, streams.out) == (2, "")
    assert re.match(r"rollout( \w+)*: error: ", streams.err)
    assert streams.err.count("\n") == 1
    return streams.err


def assert_figures(text, x):
    """Compares mean, standard deviation, minimum and maximum in a table with `x`."""
    x = np.asarray(x, np.float64)
    expected = x.mean(), x.std(), x.min(), x.max()
    # Sums of a batch are in float32, and the table has six digits.
    np.testing.assert_allclose([float(y) for y in text.split()], expected, rtol=1e-5)


def spawn(*argv, **options):
    """Starts the command in a new process."""
    pipes: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    } | options
    return subprocess.Popen([sys.executable, "-m", "rollout", *argv], cwd=ROOT, **pipes)


def output_of(process):
    """Waits for a process; returns its stdout and the `command_lines` of its stderr."""
    stdout, stderr = process.communicate(timeout=120)
    return (stdout or b"").decode(), command_lines(stderr)


def command_lines(stderr):
    """Removes the lines of jaxlib, which finds no GPU, and of the test from stderr."""
    noise = ("absl::", "cudart_stub", "import time:", "Finished", "Compiling")
    lines = stderr.decode().splitlines(keepends=True)
    return "".join(line for line in lines if not any(x in line for x in noise))
