"""Compares and gathers values across the processes of one run."""

import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def compare(name: str, facts: dict[str, object]) -> None:
    """Raises if facts differ between processes; each passes its own.

    All processes wait for each other here.

    Raises:
        ValueError: in every process, if any two differ.
    """
    # Checksums, since processes exchange only arrays of equal shapes.
    words = [zlib.crc32(str(fact).encode()) for fact in facts.values()]
    everyone = multihost_utils.process_allgather(np.array(words, np.uint32))
    for number, (what, fact) in enumerate(facts.items()):
        others = np.flatnonzero(everyone[:, number] != words[number])
        if others.size:
            raise ValueError(
                f"`{name}` must be the same in all processes, got {what} {fact} here "
                f"and another in process {others[0]}."
            )


def is_elsewhere(x: Any) -> bool:
    """Returns whether a part of an array lies only in other processes."""
    is_here = not isinstance(x, jax.Array) or x.is_fully_addressable
    return not (is_here or x.is_fully_replicated)


def gather(x: Any) -> Any:
    """Gathers an array as NumPy if it is elsewhere; all processes must call it."""
    return multihost_utils.process_allgather(x, tiled=True) if is_elsewhere(x) else x
