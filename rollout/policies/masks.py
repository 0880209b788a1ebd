"""Reads masks of valid actions in every kind of space, and samples valid actions.

A mask is True for valid actions. It is `[B, n]` bool for a `Discrete`. For a
`MultiDiscrete` it is a tuple with one `[B, n_i]` per entry, or a joint `[B, *nvec]` if
the valid values of an entry depend on other entries. For a `MultiBinary` it is
`[B, *shape, 2]`. For a composite space it has the structure of the parts, with None for
a part without a mask.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rollout import checks
from rollout.envs import prng
from rollout.envs.spaces import (
    Composite,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    as_space,
)
from rollout.envs.types import AnySpace, ArrayTree
from rollout.policies import uniform

ActionMaskFn = Callable[[ArrayTree], ArrayTree]  # obs to a mask

_NAME = "action_mask"
DISCRETE = Discrete | MultiDiscrete | MultiBinary


def check_can_sample(space: AnySpace, action_mask_fn: ActionMaskFn | None) -> None:
    """Raises for infinite bounds, and for a mask of a space without discrete parts."""
    if action_mask_fn is not None:
        checks.function("action_mask_fn", action_mask_fn)
        if not any(isinstance(part, DISCRETE) for part in space.leaves()):
            raise ValueError(
                "`action_space` must be discrete or have discrete parts if "
                f"`action_mask_fn` is given, got {type(space).__name__}."
            )
    uniform.check_bounds(space)


def find(observation_space: AnySpace, action_space: AnySpace) -> ActionMaskFn | None:
    """Finds the mask in observations that have an entry `action_mask`."""
    observed, space = as_space(observation_space), as_space(action_space)
    parts: Any = observed.spaces if isinstance(observed, Composite) else {}
    get: Callable[[Any], Any] = operator.itemgetter(_NAME)
    if not isinstance(parts, Mapping):
        parts, get = getattr(parts, "_asdict", dict)(), operator.attrgetter(_NAME)
    if _NAME not in parts:
        return None
    if not isinstance(space, MultiDiscrete) or parts[_NAME].shape == space.nvec:
        return get
    # Split `[B, k, n]` of the observation into one mask, `[B, n]`, for each entry.
    return lambda obs: tuple(jnp.moveaxis(get(obs), 1, 0))


def read(action_mask_fn: ActionMaskFn, obs: ArrayTree, space: AnySpace) -> Any:
    """Calls `action_mask_fn` and validates the mask against the space.

    Returns:
        The mask for `sample` and `is_valid`: `[B, k, n]` for k entries of n values
        each, `[B, n_0 * n_1 * ...]` for a joint mask, or a tuple with a mask for each
        part, or for each entry if the entries have different sizes.
    """
    return _check_mask(action_mask_fn(obs), uniform.num_lanes(obs), space)


def sample(
    action_mask: Any, space: AnySpace, key: chex.PRNGKey
) -> tuple[ArrayTree, jax.Array]:
    """Samples `[B]` actions uniformly among the valid ones.

    If no value is valid, for the action or for one of its entries, the value is sampled
    from all values. The second array, `[B]` bool, is True in these lanes.
    """
    if isinstance(action_mask, tuple):
        actions, flags = [], []
        for i, (mask, part) in enumerate(zip(action_mask, _parts(space), strict=True)):
            part_key = prng.fold_in(key, i)
            if mask is None:
                action = uniform.uniform(part, uniform.num_lanes(action_mask), part_key)
            else:
                action, no_valid = sample(mask, part, part_key)
                flags.append(no_valid)
            actions.append(action)
        no_valid_action = jnp.stack(flags).any(axis=0)
        if isinstance(space, Composite):
            return space.structure.unflatten(actions), no_valid_action
        return jnp.stack(actions, axis=1).reshape(-1, *space.shape), no_valid_action
    sizes, starts = _ranges(space)
    # Entries are sampled as lanes; a joint mask is sampled once over all combinations.
    index, no_valid = uniform.among(action_mask.reshape(-1, action_mask.shape[-1]), key)
    if action_mask.ndim == 3:
        index, no_valid = (x.reshape(action_mask.shape[:2]) for x in (index, no_valid))
        no_valid = no_valid.any(axis=1)
    else:
        index = jnp.stack(jnp.unravel_index(index, sizes), axis=1)
    action = (index + starts[None]).reshape(-1, *space.shape)
    return action.astype(space.dtype), no_valid


def is_valid(action_mask: Any, action: ArrayTree, space: AnySpace) -> jax.Array:
    """Returns `[B]` bool, True for valid actions."""
    if isinstance(action_mask, tuple):
        if isinstance(space, Composite):
            actions = space.structure.flatten_up_to(action)
        else:
            actions = action.reshape(len(action), -1).T
        flags = [
            is_valid(mask, x, part)
            for mask, x, part in zip(action_mask, actions, _parts(space), strict=True)
            if mask is not None
        ]
        return jnp.stack(flags).all(axis=0)
    sizes, starts = _ranges(space)
    last = np.asarray(sizes, np.int32) - 1
    index = action.astype(jnp.int32).reshape(-1, len(sizes)) - starts[None]
    is_inside = (index >= 0) & (index <= last[None])
    # Clip to read within the mask: `is_inside` marks actions outside the space invalid.
    index = jnp.clip(index, 0, last[None])
    if action_mask.ndim == 2:
        index = jnp.ravel_multi_index(tuple(index.T), sizes, mode="clip")
    rows = action_mask.reshape(-1, action_mask.shape[-1])
    flags = uniform.take_column(rows, index.reshape(-1)).reshape(len(action_mask), -1)
    return (is_inside & flags).all(axis=1)


def _ranges(space: AnySpace) -> tuple[tuple[int, ...], np.ndarray]:
    """Returns the number of values and the smallest value of each entry, `[k]`."""
    low, high = (np.broadcast_to(x, space.shape).reshape(-1) for x in space.bounds)
    return tuple((high - low + 1).tolist()), low.astype(np.int32)


def _parts(space: AnySpace) -> list[AnySpace]:
    """Returns the parts of a composite space, or the entries of another space."""
    if isinstance(space, Composite):
        return space.parts
    pairs = zip(*_ranges(space), strict=True)
    return [Discrete(n, space.dtype, int(start)) for n, start in pairs]


def _check_mask(action_mask: Any, num_envs: int, space: AnySpace) -> Any:
    """Validates a mask, and returns it in the layout of `read`."""
    if isinstance(space, Composite):
        masks = space.structure.flatten_up_to(action_mask)
        return tuple(
            None if mask is None else _check_mask(mask, num_envs, part)
            for mask, part in zip(masks, space.parts, strict=True)
        )
    if not isinstance(space, DISCRETE):
        message = "`action_mask_fn` must return None for a part that is not discrete"
        raise ValueError(f"{message}, got {checks.describe(action_mask)}.")
    sizes, _ = _ranges(space)
    if isinstance(space, Discrete):
        return _bools(action_mask, (num_envs, space.n))[:, None]
    if isinstance(space, MultiBinary):
        return _bools(action_mask, (num_envs, *space.shape, 2)).reshape(num_envs, -1, 2)
    if not isinstance(action_mask, tuple | list):
        joint_mask = _bools(action_mask, (num_envs, *sizes))
        return joint_mask.reshape(num_envs, math.prod(sizes))
    masks = tuple(
        _bools(mask, (num_envs, n))[:, None]
        for mask, n in zip(action_mask, sizes, strict=True)
    )
    # Entries of one size are sampled together, `[B, k, n]`, with one call instead of k.
    return jnp.concatenate(masks, axis=1) if len(set(sizes)) == 1 else masks


def _bools(action_mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """Checks the shape of a mask, and converts numbers to bool."""
    message = "`action_mask_fn` must return one flag per lane and action,"
    checks.shaped(message, action_mask, shape)
    return jnp.asarray(action_mask, bool)
