"""Saves one environment as bytes, and loads it: as named arrays, or as a pickle.

An environment with `save_state` and `load_state` is saved as the arrays that it names,
and loading them runs no code from the bytes. Any other can only be pickled, and
`pickle.loads` runs any code in the bytes: both sides must allow it.
"""

import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np

_ARRAYS, _PICKLE, _FAULT = b"a", b"p", b"f"  # the first byte of a state


def save(env: Any, settings: Mapping[str, Any], allow_pickle: bool) -> bytes | None:
    """Saves an environment; returns None if neither arrays nor a pickle are possible.

    Args:
        env: the environment, between two steps.
        settings: its `settings_of` when it was new.
        allow_pickle: whether an environment without `save_state` may be pickled.
    """
    if hasattr(type(env), "save_state"):  # a wrapper forwards attributes
        return _ARRAYS + _write(env.save_state())
    if not allow_pickle:
        return None
    try:
        # Two pickles, so that `check` compares settings without making the environment.
        return _PICKLE + pickle.dumps(dict(settings)) + pickle.dumps(env)
    except Exception:  # whatever the environment's own methods raise
        return None


def save_fault(cause: BaseException) -> bytes:
    """Saves a faulty environment: the text of its fault."""
    return _FAULT + f"{type(cause).__name__}: {cause}".encode()


def is_pickle(state: bytes) -> bool:
    """Returns whether `load` would unpickle."""
    return state[:1] == _PICKLE


def check(state: bytes, env: Any, settings: Mapping[str, Any]) -> None:
    """Checks the bytes of `save` or `save_fault` before `load`; unpickles the settings.

    Args:
        state: the bytes.
        env: the environment to load them into.
        settings: its `settings_of` when it was new.

    Raises:
        ValueError: if the pickled environment was made with other settings, the first
            one named; or if `env` has no `load_state`.
    """
    if state[:1] == _ARRAYS and not hasattr(type(env), "load_state"):
        raise ValueError(
            "`env` must have `load_state`, like the saved environment, got "
            f"{type(env).__name__}."
        )
    if not is_pickle(state):
        return
    old = pickle.loads(state[1:])  # the first of the two
    for name in sorted(old.keys() | settings.keys()):
        if repr(old.get(name)) != repr(settings.get(name)):  # NaN is equal, 1 not True
            raise ValueError(
                "`state` must be of environments with the settings of these, got "
                f"{name} {old.get(name)!r} there and {settings.get(name)!r} here."
            )


def load(state: bytes, env: Any) -> Any:
    """Loads bytes that passed `check`; unpickles a pickle.

    Args:
        state: the bytes.
        env: a new environment, after a reset; it takes the arrays, and keeps its
            settings.

    Returns:
        The environment to use: `env`, or the pickled one. For a faulty environment, a
        `RuntimeError` with the text of its fault.
    """
    kind, content = state[:1], state[1:]
    if kind == _FAULT:
        return RuntimeError(content.decode())
    if kind == _ARRAYS:
        env.load_state(_read(content))
        return env
    file = io.BytesIO(content)
    pickle.load(file)  # the settings
    return pickle.load(file)


def settings_of(env: Any) -> dict[str, Any]:
    """Returns the plain attributes of a new environment and of those it wraps."""
    found = {}
    while env is not None:
        own, kind = getattr(env, "__dict__", {}), type(env).__name__
        found[kind] = f"{type(env).__module__}.{type(env).__qualname__}"
        for name, value in own.items():
            if isinstance(value, bool | int | float | str):
                found[f"{kind}.{name}"] = value
        env = own.get("env")
    return found


def _write(arrays: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    for name, value in arrays.items():
        for array in (np.asarray(name), np.asarray(value)):
            np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def _read(content: bytes) -> dict[str, np.ndarray]:
    file, found = io.BytesIO(content), {}
    while file.tell() < len(content):
        name, value = (
            np.lib.format.read_array(file, allow_pickle=False) for _ in range(2)
        )
        found[str(name)] = value
    return found
