"""Memory that worker processes share, and that nobody has to delete.

It is a file without a name: it disappears with the last process that has it open,
however that process ends.
"""

import math
import mmap
import os
import tempfile
from typing import Any

import numpy as np

from rollout.envs.host.arrays import Layout, StepArrays

_ALIGN = 64  # bytes, a cache line


def new(layout: Layout, num_envs: int) -> int:
    """Makes a file for arrays of `num_envs` environments; returns its descriptor."""
    places = _Places(None)  # a dry run of `arrays` measures the size
    StepArrays(layout, num_envs, places.take)
    # Not in /dev/shm, which containers often limit to 64 MiB.
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rollout")
    else:
        with tempfile.TemporaryFile() as file:  # such as on macOS
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, max(places.end, 1))
    return descriptor


def arrays(
    layout: Layout, num_envs: int, descriptor: int, rows: slice = slice(None)
) -> StepArrays:
    """Maps `rows` of such a file, which stays as long as one of the arrays lives."""
    memory = mmap.mmap(descriptor, 0)
    return StepArrays(layout, num_envs, _Places(memory, rows).take)


class _Places:
    """Cuts arrays from a memory, one after the other."""

    def __init__(self, memory: mmap.mmap | None, rows: slice = slice(None)) -> None:
        self.memory, self.rows, self.end = memory, rows, 0

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        # Each array begins a cache line: no two of them share one.
        start = self.end
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.end += -(-num_bytes // _ALIGN) * _ALIGN
        # Processes take the arrays in the same order, and so find the same places.
        if self.memory is None:
            return np.empty(0, dtype)
        return np.ndarray(shape, dtype, self.memory, start)[self.rows]
