"""Converts batched actions to Gymnasium's format, as a batch or one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollout.envs.host.arrays import Parts
from rollout.envs.spaces import Discrete, as_space
from rollout.envs.types import ArrayTree


def batched_action(space: Any) -> Callable[[ArrayTree], Any]:
    """Returns a function that converts `[B, ...]` actions to Gymnasium's dtypes.

    The function takes a tree with the structure of `as_space(space)` and returns a
    copy, because environments store actions and some write to them.

    Args:
        space: Gymnasium action space of a single environment.
    """
    parts, dtypes = Parts(as_space(space), "action"), []
    # Read dtypes from Gymnasium's spaces: `as_space` narrows them to 32 bits.
    for path in parts.paths:
        leaf = space
        for key in path:
            leaf = getattr(leaf, "spaces", leaf)[key]
        dtypes.append(np.dtype(leaf.dtype))
    if parts.is_single:
        return lambda action: np.array(action, dtypes[0])

    def batch(action: ArrayTree) -> Any:
        leaves = map(np.array, parts.flatten(action), dtypes)
        return parts.unflatten(list(leaves))

    return batch


def split_action(space: Any) -> Callable[[ArrayTree], Sequence[Any]]:
    """Returns a function that splits `[B, ...]` actions into `B` Gymnasium actions.

    Each action is valid for `gymnasium.Env.step`: a NumPy scalar for `Discrete`, and
    otherwise an array in the dtype of the space, a dict or a tuple.

    Args:
        space: Gymnasium action space of a single environment.
    """
    parts, batch = Parts(as_space(space), "action"), batched_action(space)
    if isinstance(parts.space, Discrete):  # a fast path for the most common case
        return lambda action: list(batch(action))

    def split(action: ArrayTree) -> Sequence[Any]:
        leaves = parts.flatten(batch(action))
        columns = [
            list(leaf) if isinstance(part, Discrete) else list(map(np.asarray, leaf))
            for leaf, part in zip(leaves, parts.spaces, strict=True)
        ]
        if parts.is_single:
            return columns[0]
        return [parts.unflatten(row) for row in zip(*columns, strict=True)]

    return split
