"""Converts actions of ours to Gymnasium's, batched or one by one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import numpy as np

from rollout.envs.spaces import Dict, Discrete, Tuple, as_space
from rollout.envs.types import ArrayTree

ActionFn = Callable[[ArrayTree], Any]


def batched_action(space: Any) -> ActionFn:
    """Makes a function that converts `[B, ...]` actions to Gymnasium's.

    Args:
        space: Gymnasium's space of one environment's action.

    Returns:
        A function from a tree `[B, ...]` with the structure of `as_space(space)` to a
        copy in Gymnasium's dtypes, as vector environments take it. It raises
        `ValueError` if an action does not have the shape of the space.
    """
    kind = as_space(space)
    if isinstance(kind, Dict):
        parts = {name: batched_action(part) for name, part in space.spaces.items()}
        return lambda action: {name: fn(action[name]) for name, fn in parts.items()}
    if isinstance(kind, Tuple):
        fns = [batched_action(part) for part in space.spaces]
        return lambda action: tuple(
            fn(part) for fn, part in zip(fns, action, strict=True)
        )
    shape, dtype = tuple(space.shape), np.dtype(space.dtype)

    def cast(action: chex.Array) -> np.ndarray:
        action = np.asarray(action)
        if action.ndim == 0 or action.shape[1:] != shape:
            raise ValueError(
                f"`action` must be [B, ...] with the shape {shape} of {space} in each "
                f"entry, got shape {action.shape}."
            )
        # A copy: environments keep actions, and some write to them.
        return action.astype(dtype)

    return cast


def split_action(space: Any) -> Callable[[ArrayTree], Sequence[Any]]:
    """Makes a function that splits `[B, ...]` actions into `B` of Gymnasium's.

    Args:
        space: Gymnasium's space of one environment's action.

    Returns:
        A function to a list of `B` actions, as `Env.step` takes them: a NumPy scalar
        for `Discrete`, else an array in the dtype of the space, a dict or a tuple.
    """
    batch, unstack = batched_action(space), _unstack(space)
    return lambda action: unstack(batch(action))


def _unstack(space: Any) -> Callable[[Any], list[Any]]:
    kind = as_space(space)
    if isinstance(kind, Dict):
        parts = {name: _unstack(part) for name, part in space.spaces.items()}

        def dicts(action: Mapping[str, Any]) -> list[Any]:
            columns = [fn(action[name]) for name, fn in parts.items()]
            return [
                dict(zip(parts, one, strict=True)) for one in zip(*columns, strict=True)
            ]

        return dicts
    if isinstance(kind, Tuple):
        fns = [_unstack(part) for part in space.spaces]
        return lambda action: list(
            zip(*(fn(part) for fn, part in zip(fns, action, strict=True)), strict=True)
        )
    if kind.shape == () and not isinstance(kind, Discrete):
        return lambda action: [np.asarray(one) for one in action]
    return list
