"""Compares and gathers values across the processes of one run."""

import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def compare(name: str, facts: dict[str, object]) -> None:
    """Raises if the facts of any two processes differ. All processes must call it.

    Each call waits for all processes.

    Raises:
        ValueError: in every process, if any two processes differ.
    """
    # Checksums, since processes exchange only arrays of equal shapes.
    words = [zlib.crc32(str(fact).encode()) for fact in facts.values()]
    all_words = multihost_utils.process_allgather(np.array(words, np.uint32))
    for index, (label, fact) in enumerate(facts.items()):
        mismatches = np.flatnonzero(all_words[:, index] != words[index])
        if mismatches.size:
            raise ValueError(
                f"`{name}` must be the same in all processes, got {label} {fact} here "
                f"and a different one in process {mismatches[0]}."
            )


def is_elsewhere(x: Any) -> bool:
    """Returns whether a part of an array lies only in other processes."""
    is_local = not isinstance(x, jax.Array) or x.is_fully_addressable
    return not (is_local or x.is_fully_replicated)


def gather(x: Any) -> Any:
    """Gathers an array as NumPy if parts are elsewhere; all processes must call it."""
    return multihost_utils.process_allgather(x, tiled=True) if is_elsewhere(x) else x
