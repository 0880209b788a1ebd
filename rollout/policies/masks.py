"""Reads masks of allowed actions in every kind of space, and draws actions by them.

A mask is True where an action is allowed. It is `[B, n]` bool for a `Discrete`. For a
`MultiDiscrete` it is a tuple with `[B, n_i]` for each entry, or a joint `[B, *nvec]`
where the allowed values of an entry depend on the others; for a `MultiBinary` it is
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


def check_drawable(space: AnySpace, action_mask_fn: ActionMaskFn | None) -> None:
    """Raises for infinite bounds, and where a mask has no discrete part to be of."""
    if action_mask_fn is not None:
        checks.function("action_mask_fn", action_mask_fn)
        if not any(isinstance(part, DISCRETE) for part in space.leaves()):
            raise ValueError(
                "`action_space` must be discrete or have discrete parts where "
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
    # `[B, k, n]` in the observation, one `[B, n]` for each of the k entries here.
    return lambda obs: tuple(jnp.moveaxis(get(obs), 1, 0))  # a mask for each entry


def read(action_mask_fn: ActionMaskFn, obs: ArrayTree, space: AnySpace) -> Any:
    """Calls `action_mask_fn`, and checks that the result is a mask of that space.

    Returns:
        The mask as `draw` and `is_allowed` take it: `[B, k, n]` for k entries of n
        values each, `[B, n_0 * n_1 * ...]` for a joint one, and a tuple for parts, or
        for entries of different sizes.
    """
    return _checked(action_mask_fn(obs), uniform.num_lanes(obs), space)


def draw(
    allowed: Any, space: AnySpace, key: chex.PRNGKey
) -> tuple[ArrayTree, jax.Array]:
    """Draws `[B]` actions uniformly among the allowed ones.

    Where nothing is allowed, for the action or for an entry, it is drawn from all; the
    second array, `[B]` bool, is True there.
    """
    if isinstance(allowed, tuple):
        actions, flags = [], []
        for number, (each, part) in enumerate(zip(allowed, _parts(space), strict=True)):
            part_key = prng.fold_in(key, number)
            if each is None:
                action = uniform.uniform(part, uniform.num_lanes(allowed), part_key)
            else:
                action, is_none = draw(each, part, part_key)
                flags.append(is_none)
            actions.append(action)
        no_valid_action = jnp.stack(flags).any(axis=0)
        if isinstance(space, Composite):
            return space.structure.unflatten(actions), no_valid_action
        return jnp.stack(actions, axis=1).reshape(-1, *space.shape), no_valid_action
    sizes, starts = _ranges(space)
    # Entries are drawn as lanes; a joint mask is one draw among all combinations.
    index, is_none = uniform.among(allowed.reshape(-1, allowed.shape[-1]), key)
    if allowed.ndim == 3:
        index, is_none = (x.reshape(allowed.shape[:2]) for x in (index, is_none))
        is_none = is_none.any(axis=1)
    else:
        index = jnp.stack(jnp.unravel_index(index, sizes), axis=1)
    action = (index + starts[None]).reshape(-1, *space.shape)
    return action.astype(space.dtype), is_none


def is_allowed(allowed: Any, action: ArrayTree, space: AnySpace) -> jax.Array:
    """Returns `[B]` bool, True where a mask allows an action."""
    if isinstance(allowed, tuple):
        if isinstance(space, Composite):
            actions = space.structure.flatten_up_to(action)
        else:
            actions = action.reshape(len(action), -1).T
        flags = [
            is_allowed(each, one, part)
            for each, one, part in zip(allowed, actions, _parts(space), strict=True)
            if each is not None
        ]
        return jnp.stack(flags).all(axis=0)
    sizes, starts = _ranges(space)
    last = np.asarray(sizes, np.int32) - 1
    index = action.astype(jnp.int32).reshape(-1, len(sizes)) - starts[None]
    is_inside = (index >= 0) & (index <= last[None])
    # Only to read within the mask: an action outside of the space is never allowed.
    index = jnp.clip(index, 0, last[None])
    if allowed.ndim == 2:
        index = jnp.ravel_multi_index(tuple(index.T), sizes, mode="clip")
    flags = uniform.at(allowed.reshape(-1, allowed.shape[-1]), index.reshape(-1))
    return (is_inside & flags.reshape(len(allowed), -1)).all(axis=1)


def _ranges(space: AnySpace) -> tuple[tuple[int, ...], np.ndarray]:
    """Returns the number of values of each entry, `[k]`, and the smallest, `[k]`."""
    low, high = (np.broadcast_to(x, space.shape).reshape(-1) for x in space.bounds)
    return tuple((high - low + 1).tolist()), low.astype(np.int32)


def _parts(space: AnySpace) -> list[AnySpace]:
    """Returns the parts of a composite space, or the entries of another."""
    if isinstance(space, Composite):
        return space.parts
    pairs = zip(*_ranges(space), strict=True)
    return [Discrete(n, space.dtype, int(start)) for n, start in pairs]


def _checked(allowed: Any, num_envs: int, space: AnySpace) -> Any:
    if isinstance(space, Composite):
        masks = space.structure.flatten_up_to(allowed)
        return tuple(
            None if each is None else _checked(each, num_envs, part)
            for each, part in zip(masks, space.parts, strict=True)
        )
    if not isinstance(space, DISCRETE):
        what = "`action_mask_fn` must return None for a part that is not discrete"
        raise ValueError(f"{what}, got {checks.describe(allowed)}.")
    sizes, _ = _ranges(space)
    if isinstance(space, Discrete):
        return _bools(allowed, (num_envs, space.n))[:, None]
    if isinstance(space, MultiBinary):
        return _bools(allowed, (num_envs, *space.shape, 2)).reshape(num_envs, -1, 2)
    if not isinstance(allowed, tuple | list):
        return _bools(allowed, (num_envs, *sizes)).reshape(num_envs, math.prod(sizes))
    masks = tuple(
        _bools(each, (num_envs, n))[:, None]
        for each, n in zip(allowed, sizes, strict=True)
    )
    # Entries of one size are drawn together, `[B, k, n]`: one draw instead of k.
    return jnp.concatenate(masks, axis=1) if len(set(sizes)) == 1 else masks


def _bools(allowed: Any, shape: tuple[int, ...]) -> jax.Array:
    what = "`action_mask_fn` must return one bool per lane and action,"
    checks.shaped(what, allowed, shape, bool)
    return jnp.asarray(allowed)
