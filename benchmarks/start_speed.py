"""How long do imports, the first batch, and the program of the README take?

Each row runs in a new process, which measures the time from its first line to its last.
The programs run without a compilation cache, with a filled cache
(JAX_COMPILATION_CACHE_DIR) of programs that took at least a second to compile, and with
a cache of all programs (JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0). Reports medians
of interleaved runs.

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
PROLOGUE = "import time\n_begin = time.perf_counter()\n"
EPILOGUE = "\nprint(time.perf_counter() - _begin)"
FIRST_BATCH = """
import jax
import rollout

env = rollout.envs.make_vec("CartPole-v1", num_envs=64)
policy = rollout.random_policy(env.action_space)
collector = rollout.Collector(env=env, policy=policy)
collect = jax.jit(collector.collect_steps, static_argnums=2)
carry, trajectory = collect(collector.init(jax.random.key(0)), None, 128)
print(rollout.summarize(trajectory))
"""


def readme_program() -> str:
    """Returns the first program of the README, a training and an evaluation."""
    readme = (ROOT / "README.md").read_text()
    return re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]


def cases(folder: str) -> dict[str, tuple[str, dict[str, str]]]:
    """Returns the programs by row, each with environment variables."""
    partial = {CACHE: f"{folder}/some"}
    complete = {CACHE: f"{folder}/every", KEEP_ALL: "0"}
    return {
        "`import jax`": ("import jax", {}),
        "`import jax, flax, chex`": ("import jax, flax, chex", {}),
        "`import rollout`": ("import rollout", {}),
        "first batch, no cache": (FIRST_BATCH, {}),
        "first batch, filled cache": (FIRST_BATCH, partial),
        "first batch, cache of everything": (FIRST_BATCH, complete),
        "program of the README, no cache": (readme_program(), {}),
        "program of the README, filled cache": (readme_program(), partial),
    }


def seconds(code: str, variables: dict[str, str]) -> float:
    """Runs code in a new process; returns its time in seconds."""
    env = {k: v for k, v in os.environ.items() if k not in (CACHE, KEEP_ALL)}
    command = [sys.executable, "-c", PROLOGUE + code + EPILOGUE]
    out = subprocess.check_output(command, cwd=ROOT, env=env | variables)
    return float(out.split()[-1])


def rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times all cases in interleaved runs."""
    with tempfile.TemporaryDirectory() as folder:
        runs = cases(folder)
        times = {name: [] for name in runs}
        # The first round warms the disk and fills the caches.
        for index in range(args.repeats + 1):
            for name, run in runs.items():
                times[name] += [seconds(*run)] * (index > 0)
    for name, samples in times.items():
        yield {
            "": name,
            "median, s": f"{statistics.median(samples):.2f}",
            "fastest, s": f"{min(samples):.2f}",
        }


if __name__ == "__main__":
    run(__doc__, 7, {"start": rows})
