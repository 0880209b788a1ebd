"""Converts actions of ours to Gymnasium's, batched or one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollout.envs.host.arrays import Parts
from rollout.envs.spaces import Discrete, as_space
from rollout.envs.types import ArrayTree


def batched_action(space: Any) -> Callable[[ArrayTree], Any]:
    """Makes a function from `[B, ...]` actions to Gymnasium's, of one `space` each.

    It takes a tree with the structure of `as_space(space)`, and returns a copy in
    Gymnasium's dtypes. It raises `ValueError` if an action has another shape.
    """
    parts, casts = Parts(as_space(space), "action"), []
    for path in parts.paths:
        leaf = space
        for key in path:
            leaf = getattr(leaf, "spaces", leaf)[key]
        casts.append(_cast(leaf))
    if parts.is_single:
        return casts[0]

    def batch(action: ArrayTree) -> Any:
        pairs = zip(casts, parts.flatten(action), strict=True)
        return parts.unflatten([cast(leaf) for cast, leaf in pairs])

    return batch


def split_action(space: Any) -> Callable[[ArrayTree], Sequence[Any]]:
    """Makes a function that splits `[B, ...]` actions into `B` of Gymnasium's.

    Each is as `Env.step` takes it: a NumPy scalar for `Discrete`, else an array in the
    dtype of the space, a dict or a tuple.
    """
    parts, batch = Parts(as_space(space), "action"), batched_action(space)
    kinds = [isinstance(x, Discrete) for x in parts.spaces]
    if parts.is_single and kinds[0]:  # the usual case, kept fast
        return lambda action: list(batch(action))

    def split(action: ArrayTree) -> Sequence[Any]:
        columns = [
            list(leaf) if is_discrete else [np.asarray(one) for one in leaf]
            for leaf, is_discrete in zip(
                parts.flatten(batch(action)), kinds, strict=True
            )
        ]
        if parts.is_single:
            return columns[0]
        return [parts.unflatten(row) for row in zip(*columns, strict=True)]

    return split


def _cast(space: Any) -> Callable[[Any], np.ndarray]:
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
