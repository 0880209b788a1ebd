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
    Gymnasium's dtypes: environments keep actions, and some write to them.
    """
    parts, dtypes = Parts(as_space(space), "action"), []
    # Of Gymnasium's own spaces: ours have at most 32 bits.
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
    """Makes a function that splits `[B, ...]` actions into `B` of Gymnasium's.

    Each is as `Env.step` takes it: a NumPy scalar for `Discrete`, else an array in the
    dtype of the space, a dict or a tuple.
    """
    parts, batch = Parts(as_space(space), "action"), batched_action(space)
    if isinstance(parts.space, Discrete):  # the usual case, kept fast
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
