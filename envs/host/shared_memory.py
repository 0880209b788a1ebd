"""Memory shared by worker processes, which needs no explicit cleanup.

The memory is an anonymous file. The operating system frees it when the last process
that holds it ends, also after a crash.
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
    """Creates a file for arrays of `num_envs` environments; returns its descriptor."""
    allocator = _Allocator(None)  # a dry run of `arrays` measures the size
    StepArrays(layout, num_envs, allocator.allocate)
    # Do not use /dev/shm: containers often limit it to 64 MiB.
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rollout")
    else:
        with tempfile.TemporaryFile() as file:  # for example on macOS
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, max(allocator.end, 1))
    return descriptor


def arrays(
    layout: Layout, num_envs: int, descriptor: int, rows: slice = slice(None)
) -> StepArrays:
    """Maps `rows` of the file of `new`; the mapping lives as long as the arrays."""
    memory = mmap.mmap(descriptor, 0)
    return StepArrays(layout, num_envs, _Allocator(memory, rows).allocate)


class _Allocator:
    """Allocates consecutive arrays in a block of memory."""

    def __init__(self, memory: mmap.mmap | None, rows: slice = slice(None)) -> None:
        self.memory, self.rows, self.end = memory, rows, 0

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        # Align each array to a cache line, so that no two arrays share a cache line.
        start = self.end
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.end += -(-num_bytes // _ALIGN) * _ALIGN
        # All processes allocate in the same order, so they compute the same offsets.
        if self.memory is None:
            return np.empty(0, dtype)
        return np.ndarray(shape, dtype, self.memory, start)[self.rows]
