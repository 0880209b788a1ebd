"""Spaces of Gymnasium become ours, and our actions become Gymnasium's.

jax has no 64-bit numbers unless it is told to, so ours have 32 bits. Spaces are told by
the names of their classes: gymnasium itself is not imported.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import numpy as np

from envs.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from envs.types import AnySpace, ArrayTree

ActionFn = Callable[[ArrayTree], Any]

_NARROW = {"float64": "float32", "int64": "int32", "uint64": "uint32"}


def from_gymnasium_space(space: Any) -> AnySpace:
    """Turns a space of Gymnasium into one of ours.

    Args:
        space: a `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, `Dict` or `Tuple`.

    Returns:
        The one of ours of that name, with numbers of at most 32 bits.

    Raises:
        ValueError: if the elements are no arrays of one shape, as of `Text`, `Graph`,
            `Sequence` and `OneOf`.
    """
    convert = _CONVERT.get(_kind(space))
    if convert is None:
        raise ValueError(
            "`space` must be a Box, Discrete, MultiDiscrete, MultiBinary, Dict or "
            f"Tuple of gymnasium, got {space}."
        )
    return convert(space)


def batched_action(space: Any) -> ActionFn:
    """Makes a function that turns `[E, ...]` actions of ours into Gymnasium's.

    Args:
        space: Gymnasium's space of one environment's action.

    Returns:
        A function from a tree `[E, ...]` of the structure of `from_gymnasium_space` to
        a copy with Gymnasium's dtypes: what a vector environment takes. It raises
        `ValueError` if the shape of an action is not that of the space.
    """
    if _kind(space) == "Dict":
        parts = {name: batched_action(part) for name, part in space.spaces.items()}
        return lambda action: {name: fn(action[name]) for name, fn in parts.items()}
    if _kind(space) == "Tuple":
        fns = [batched_action(part) for part in space.spaces]
        return lambda action: tuple(
            fn(part) for fn, part in zip(fns, action, strict=True)
        )
    shape, dtype = tuple(space.shape), np.dtype(space.dtype)

    def cast(action: chex.Array) -> np.ndarray:
        action = np.asarray(action)
        if action.ndim == 0 or action.shape[1:] != shape:
            raise ValueError(
                f"`action` must be [E, ...] with the shape {shape} of {space} in each "
                f"row, got shape {action.shape}."
            )
        # A copy, as environments keep actions and some write to them.
        return action.astype(dtype)

    return cast


def split_action(space: Any) -> Callable[[ArrayTree], Sequence[Any]]:
    """Makes a function that turns `[E, ...]` actions of ours into `E` of Gymnasium's.

    Args:
        space: Gymnasium's space of one environment's action.

    Returns:
        A function to a list of `E` actions, as `Env.step` takes them: a scalar of
        NumPy for `Discrete`, arrays of the dtype of the space, a dict, a tuple.
    """
    batch, rows = batched_action(space), _rows(space)
    return lambda action: rows(batch(action))


def _rows(space: Any) -> Callable[[Any], list[Any]]:
    if _kind(space) == "Dict":
        parts = {name: _rows(part) for name, part in space.spaces.items()}

        def dicts(action: Mapping[str, Any]) -> list[Any]:
            columns = [fn(action[name]) for name, fn in parts.items()]
            return [
                dict(zip(parts, row, strict=True)) for row in zip(*columns, strict=True)
            ]

        return dicts
    if _kind(space) == "Tuple":
        fns = [_rows(part) for part in space.spaces]
        return lambda action: list(
            zip(*(fn(part) for fn, part in zip(fns, action, strict=True)), strict=True)
        )
    if tuple(space.shape) == () and _kind(space) != "Discrete":
        return lambda action: [np.asarray(row) for row in action]
    return list


def _kind(space: Any) -> str:
    """Finds the supported class that a space is an instance of."""
    names = (base.__name__ for base in type(space).__mro__)
    return next((name for name in names if name in _CONVERT), "")


def _box(space: Any) -> Box:
    dtype: np.dtype = np.dtype(_NARROW.get(str(space.dtype), space.dtype))
    low, high = np.asarray(space.low), np.asarray(space.high)
    if dtype != space.dtype and dtype.kind in "iu":
        range_ = np.iinfo(dtype)
        low, high = low.clip(range_.min, range_.max), high.clip(range_.min, range_.max)
    with np.errstate(over="ignore"):  # beyond float32 there is no bound
        return Box(low.astype(dtype), high.astype(dtype), tuple(space.shape), dtype)


def _discrete(space: Any) -> Discrete:
    return Discrete(int(space.n), np.dtype(np.int32), int(space.start))


def _multi_discrete(space: Any) -> MultiDiscrete:
    start = getattr(space, "start", 0)
    return MultiDiscrete(space.nvec, np.dtype(np.int32), start)


def _multi_binary(space: Any) -> MultiBinary:
    return MultiBinary(tuple(space.shape), np.dtype(np.int8))


def _dict(space: Any) -> Dict:
    parts = space.spaces.items()
    return Dict({name: from_gymnasium_space(part) for name, part in parts})


def _tuple(space: Any) -> Tuple:
    return Tuple(tuple(from_gymnasium_space(part) for part in space.spaces))


_CONVERT = {
    "Box": _box,
    "Discrete": _discrete,
    "MultiDiscrete": _multi_discrete,
    "MultiBinary": _multi_binary,
    "Dict": _dict,
    "Tuple": _tuple,
}
