"""Saves one environment as bytes: the arrays that it names. Runs no code from them."""

import io
from typing import Any

import numpy as np


def save(env: Any) -> bytes | None:
    """Saves an environment between two steps; returns None without `save_state`."""
    if not hasattr(type(env), "save_state"):  # a wrapper forwards attributes
        return None
    file = io.BytesIO()
    for name, value in env.save_state().items():
        for array in (np.asarray(name), np.asarray(value)):
            np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def load(env: Any, state: bytes) -> None:
    """Puts an environment where it was at `save`, with its own settings.

    Raises:
        ValueError: if it has no `load_state`.
    """
    if not hasattr(type(env), "load_state"):
        raise ValueError(
            "`env` must have `load_state`, like the saved environment, got "
            f"{type(env).__name__}."
        )
    file, arrays = io.BytesIO(state), {}
    while file.tell() < len(state):
        name = np.lib.format.read_array(file, allow_pickle=False)
        arrays[str(name)] = np.lib.format.read_array(file, allow_pickle=False)
    env.reset(seed=0)
    env.load_state(arrays)
