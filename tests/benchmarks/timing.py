"""Times programs against one another."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def measure(programs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The median seconds of a run of each program, after one that compiles."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program())
    for _ in range(repeats):
        # In any order: a program may find the memory that the one before has freed.
        for name, program in random.sample(list(programs.items()), len(programs)):
            start = time.perf_counter()
            jax.block_until_ready(program())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}
