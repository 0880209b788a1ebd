"""Converts actions of ours to Gymnasium's, batched or one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollout.envs.host.arrays import Parts
from rollout.envs.spaces import Discrete, as_space
from rollout.envs.types import AnySpace, ArrayTree

CastFn = Callable[[Any], np.ndarray]


def batched_action(space: Any) -> Callable[[ArrayTree], Any]:
    """Makes a function that converts `[B, ...]` actions to Gymnasium's.

    Args:
        space: Gymnasium's space of one environment's action.

    Returns:
        A function from a tree `[B, ...]` with the structure of `as_space(space)` to a
        copy in Gymnasium's dtypes, as vector environments take it. It raises
        `ValueError` if an action does not have the shape of the space.
    """
    parts, casts = _casts(space)
    if parts.is_single:
        return casts[0]

    def batch(action: ArrayTree) -> Any:
        pairs = zip(casts, parts.flatten(action), strict=True)
        return parts.unflatten([cast(leaf) for cast, leaf in pairs])

    return batch


def split_action(space: Any) -> Callable[[ArrayTree], Sequence[Any]]:
    """Makes a function that splits `[B, ...]` actions into `B` of Gymnasium's.

    Args:
        space: Gymnasium's space of one environment's action.

    Returns:
        A function to a list of `B` actions, as `Env.step` takes them: a NumPy scalar
        for `Discrete`, else an array in the dtype of the space, a dict or a tuple.
    """
    parts, casts = _casts(space)

    def column(cast: CastFn, kind: AnySpace) -> Callable[[Any], list[Any]]:
        if kind.shape == () and not isinstance(kind, Discrete):
            return lambda leaf: [np.asarray(one) for one in cast(leaf)]
        return lambda leaf: list(cast(leaf))

    columns = [column(*pair) for pair in zip(casts, parts.spaces, strict=True)]
    if parts.is_single:
        return columns[0]

    def split(action: ArrayTree) -> list[Any]:
        pairs = zip(columns, parts.flatten(action), strict=True)
        rows = zip(*(fn(leaf) for fn, leaf in pairs), strict=True)
        return [parts.unflatten(row) for row in rows]

    return split


def _casts(space: Any) -> tuple[Parts, list[CastFn]]:
    """Returns the parts of an action, and for each the cast to Gymnasium's dtype."""
    parts = Parts(as_space(space), "action")
    found = []
    for path in parts.paths:
        leaf = space
        for key in path:
            leaf = getattr(leaf, "spaces", leaf)[key]
        found.append(_cast(leaf))
    return parts, found


def _cast(space: Any) -> CastFn:
    shape, dtype = tuple(space.shape), np.dtype(space.dtype)

    def cast(action: Any) -> np.ndarray:
        action = np.asarray(action)
        if action.ndim == 0 or action.shape[1:] != shape:
            raise ValueError(
                f"`action` must be [B, ...] with the shape {shape} of {space} in each "
                f"entry, got shape {action.shape}."
            )
        # A copy: environments keep actions, and some write to them.
        return action.astype(dtype)

    return cast
