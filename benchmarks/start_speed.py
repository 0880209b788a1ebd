"""How long is it until the first batch?

Each row is a process of its own, timed by itself from its first line: an import, or the
README's twenty lines up to the statistics of the first batch. These run without compile
cache, with one that an earlier run has filled (JAX_COMPILATION_CACHE_DIR), in which jax
keeps what took a second or more to compile, and with one in which everything is kept
(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0). Rows in turn, medians of the rounds.

    python benchmarks/start_speed.py
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from harness import run

ROOT = Path(__file__).parents[1]
CACHE = "JAX_COMPILATION_CACHE_DIR"
KEEP_ALL = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
BEFORE = "import time\n_begin = time.perf_counter()\n"
AFTER = "\nprint(time.perf_counter() - _begin)"


def twenty_lines() -> str:
    """The first block of the README, which prints statistics of the first batch."""
    readme = (ROOT / "README.md").read_text()
    return re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]


def cases(folder: str) -> dict[str, tuple[str, dict[str, str]]]:
    """Lists the programs to run, each with its environment variables."""
    some = {CACHE: f"{folder}/some"}
    every = {CACHE: f"{folder}/every", KEEP_ALL: "0"}
    return {
        "`import jax`": ("import jax", {}),
        "`import jax, flax, chex`": ("import jax, flax, chex", {}),
        "`import rollout`": ("import rollout", {}),
        "first batch, no cache": (twenty_lines(), {}),
        "first batch, filled cache": (twenty_lines(), some),
        "first batch, cache of everything": (twenty_lines(), every),
    }


def seconds(code: str, variables: dict[str, str]) -> float:
    """Runs code in a new process; returns its time in seconds."""
    env = {k: v for k, v in os.environ.items() if k not in (CACHE, KEEP_ALL)}
    command = [sys.executable, "-c", BEFORE + code + AFTER]
    out = subprocess.check_output(command, cwd=ROOT, env=env | variables)
    return float(out.split()[-1])


def rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times each case, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        runs = cases(folder)
        times = {name: [] for name in runs}
        # The first round warms the disk and fills the caches.
        for number in range(args.repeats + 1):
            for name, run in runs.items():
                times[name] += [seconds(*run)] * (number > 0)
    for name, got in times.items():
        yield {
            "": name,
            "median, s": f"{statistics.median(got):.2f}",
            "fastest, s": f"{min(got):.2f}",
        }


if __name__ == "__main__":
    run(__doc__, 7, {"start": rows})
