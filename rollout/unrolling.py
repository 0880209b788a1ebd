"""Unrolls scans over time on accelerators, where starting an operation is costly."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from jax import lax

from envs.types import ArrayTree

_State = TypeVar("_State", bound=ArrayTree)
_Row = TypeVar("_Row", bound=ArrayTree)


def scan(
    step: Callable[[_State, Any], tuple[_State, _Row]],
    start: _State,
    rows: ArrayTree,
    *,
    gpu: int,
    other: int,
    reverse: bool = False,
) -> tuple[_State, _Row]:
    """Scans as `lax.scan` does, with the same bits, unrolled on accelerators.

    A GPU pays for every launch and a TPU for every operation, however little it
    computes; in an unrolled iteration those of several rows fuse. On a CPU one row at a
    time is as fast and compiles faster. The platform is the one that the program is
    lowered for, and `step` is traced once.

    Args:
        step: as `lax.scan` takes it.
        start: the first carry of `step`.
        rows: `[T, ...]`, inputs of `step`.
        gpu: rows in one iteration on a GPU.
        other: rows in one iteration on other accelerators; on a CPU it is one.
        reverse: whether the last row comes first.
    """
    scan = functools.partial(lax.scan, step, reverse=reverse)
    on_gpu = functools.partial(scan, unroll=gpu)
    elsewhere = functools.partial(scan, unroll=other)
    return lax.platform_dependent(
        start, rows, cpu=scan, cuda=on_gpu, rocm=on_gpu, default=elsewhere
    )
