"""Saves one environment as bytes, and loads it: as named arrays, or as a pickle.

An environment with `save_state` and `load_state` is saved as the arrays that it names,
and loading them runs no code from the bytes. Any other can only be pickled, and
`pickle.loads` runs any code in the bytes: both sides must allow it. Where neither keeps
the state, the bytes say why.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rollout.envs.host.types import UNSAVED

_ARRAYS, _PICKLE, _FAULT = b"a", b"p", b"f"  # the first byte of a state


def save(env: Any, settings: Mapping[str, str], allow_pickle: bool) -> bytes | None:
    """Saves an environment; returns None if only a pickle could, and is not allowed.

    Args:
        env: the environment, between two steps.
        settings: its `settings_of` when it was new.
        allow_pickle: whether an environment without `save_state` may be pickled.
    """
    if hasattr(type(env), "save_state"):  # a wrapper forwards attributes
        file = io.BytesIO(_ARRAYS)
        file.seek(1)
        for name, value in env.save_state().items():
            for array in (np.asarray(name), np.asarray(value)):
                np.lib.format.write_array(file, array, allow_pickle=False)
        return file.getvalue()
    if not allow_pickle:
        return None
    inner = next((x for x in _chain(env) if _keeps_arguments_only(x)), None)
    if inner is not None:
        kind = type(inner).__name__
        why = f"{kind} is an EzPickle, whose pickle has its arguments and no state"
        return UNSAVED + why.encode()
    try:
        # Two pickles, so that `load` compares settings without making the environment.
        return _PICKLE + pickle.dumps(settings) + pickle.dumps(env)
    except Exception as error:  # whatever the environment's own methods raise
        why = f"pickling {type(env).__name__} raises {type(error).__name__}: {error}"
        return UNSAVED + why.encode()


def save_fault(cause: BaseException) -> bytes:
    """Saves a faulty environment: the text of its fault."""
    return _FAULT + f"{type(cause).__name__}: {cause}".encode()


def can_load(state: bytes, allow_pickle: bool) -> bool:
    """Returns whether `load` takes a state."""
    kind = state[:1]
    return kind != UNSAVED and (allow_pickle or kind != _PICKLE)


def load(state: bytes, make: Callable[[], Any], settings: Mapping[str, str]) -> Any:
    """Makes an environment of the bytes of `save` or `save_fault`.

    Args:
        state: the bytes.
        make: makes a new environment, for arrays to be loaded into.
        settings: the `settings_of` a new environment.

    Returns:
        The environment. For a faulty one, a `RuntimeError` with the text of its fault.

    Raises:
        ValueError: if the pickled environment was made with other settings, the first
            one named; or if a new one has no `load_state`.
    """
    file = io.BytesIO(state)
    kind = file.read(1)
    if kind == _FAULT:
        return RuntimeError(file.read().decode())
    if kind == _PICKLE:
        old = pickle.load(file)
        for name in sorted(old.keys() | settings.keys()):
            if old.get(name) != settings.get(name):
                raise ValueError(
                    "`state` must be of environments with the settings of these, got "
                    f"{name} {old.get(name)} there and {settings.get(name)} here."
                )
        return pickle.load(file)
    env, arrays = make(), {}
    if not hasattr(type(env), "load_state"):
        raise ValueError(
            "`env` must have `load_state`, like the saved environment, got "
            f"{type(env).__name__}."
        )
    while file.tell() < len(state):
        name = np.lib.format.read_array(file, allow_pickle=False)
        arrays[str(name)] = np.lib.format.read_array(file, allow_pickle=False)
    env.reset(seed=0)
    env.load_state(arrays)
    return env


def settings_of(env: Any) -> dict[str, str]:
    """Returns the plain attributes of a new environment and of those it wraps."""
    found = {}
    for part in _chain(env):
        own, kind = getattr(part, "__dict__", {}), type(part).__name__
        found[kind] = f"{type(part).__module__}.{type(part).__qualname__}"
        for name, value in own.items():
            if isinstance(value, bool | int | float | str):
                found[f"{kind}.{name}"] = repr(value)  # NaN is equal, 1 is not True
    return found


def _chain(env: Any) -> Iterator[Any]:
    """Yields an environment and those it wraps."""
    while env is not None:
        yield env
        env = getattr(env, "__dict__", {}).get("env")


def _keeps_arguments_only(env: Any) -> bool:
    """Returns whether a pickle of it makes a new one, as those of MuJoCo and Atari."""
    state_fn = getattr(type(env), "__getstate__", None)
    return getattr(state_fn, "__qualname__", "") == "EzPickle.__getstate__"
