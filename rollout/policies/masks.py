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

MaskFn = Callable[[ArrayTree], ArrayTree]  # obs to a mask

_NAME = "action_mask"


def check_maskable(space: AnySpace, mask_fn: Any) -> None:
    """Raises for a space without a discrete part, or with infinite bounds."""
    checks.function("mask_fn", mask_fn)
    if not _is_maskable(space):
        raise ValueError(
            "`action_space` must be discrete or have discrete parts where `mask_fn` is "
            f"given, got {type(space).__name__}."
        )
    uniform.check_bounds(space)


def find(observation_space: AnySpace, action_space: AnySpace) -> MaskFn | None:
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
    return lambda obs: tuple(jnp.moveaxis(get(obs), 1, 0))  # a mask for each entry


def read(mask_fn: MaskFn, obs: ArrayTree, space: AnySpace) -> Any:
    """Calls `mask_fn`, and checks that the result is a mask of that space.

    Returns:
        The mask as the other functions take it: masks of equal entries are stacked to
        `[B, k, n]`, a joint one is flattened to `[B, n_0 * n_1 * ...]`.
    """
    return _checked(mask_fn(obs), uniform.num_lanes(obs), space)


def draw(mask: Any, space: AnySpace, key: chex.PRNGKey) -> tuple[ArrayTree, jax.Array]:
    """Draws `[B]` actions uniformly among the allowed ones.

    Where nothing is allowed, for the action or for an entry, it is drawn from all; the
    second array, `[B]` bool, is True there.
    """
    if isinstance(space, Discrete):
        return uniform.allowed(mask, space, key)
    if isinstance(space, Composite):
        return _draw_parts(mask, space, key)
    sizes, starts = _ranges(space)
    if isinstance(mask, tuple):
        drawn = [
            uniform.allowed(each, Discrete(n), prng.fold_in(key, number))
            for number, (each, n) in enumerate(zip(mask, sizes, strict=True))
        ]
        index, is_none = (jnp.stack(x, axis=1) for x in zip(*drawn, strict=True))
    elif mask.ndim == 3:  # equal entries, `[B, k, n]`: one draw of B * k lanes
        flat = mask.reshape(-1, mask.shape[-1])
        drawn = uniform.allowed(flat, Discrete(mask.shape[-1]), key)
        index, is_none = (x.reshape(mask.shape[:2]) for x in drawn)
    else:  # a joint mask: one draw among all combinations of the entries
        index, is_none = uniform.allowed(mask, Discrete(mask.shape[-1]), key)
        index = jnp.stack(jnp.unravel_index(index, sizes), axis=1)
        is_none = is_none[:, None]
    action = index + jnp.asarray(starts, jnp.int32)[None]
    action = action.reshape(-1, *space.shape).astype(space.dtype)
    return action, is_none.any(axis=1)


def is_allowed(mask: Any, action: ArrayTree, space: AnySpace) -> jax.Array:
    """Returns `[B]` bool, True where a mask allows an action."""
    if isinstance(space, Discrete):
        return uniform.is_allowed(mask, action, space)
    if isinstance(space, Composite):
        actions = space.structure.flatten_up_to(action)
        flags = [
            is_allowed(each, one, part)
            for each, one, part in zip(mask, actions, space.parts, strict=True)
            if each is not None
        ]
        every = jnp.ones(uniform.num_lanes(action), bool)
        return jnp.stack([every, *flags]).all(axis=0)
    sizes, starts = _ranges(space)
    index = action.astype(jnp.int32).reshape(-1, len(sizes))
    index = index - jnp.asarray(starts, jnp.int32)[None]
    if isinstance(mask, tuple):
        columns = zip(mask, index.T, sizes, strict=True)
        flags = [uniform.is_allowed(each, at, Discrete(n)) for each, at, n in columns]
        return jnp.stack(flags).all(axis=0)
    if mask.ndim == 3:
        flat = mask.reshape(-1, mask.shape[-1])
        flags = uniform.is_allowed(flat, index.reshape(-1), Discrete(mask.shape[-1]))
        return flags.reshape(index.shape).all(axis=1)
    last = jnp.asarray(sizes, jnp.int32)[None] - 1
    is_inside = ((index >= 0) & (index <= last)).all(axis=1)
    at = jnp.ravel_multi_index(tuple(index.T), sizes, mode="clip")
    return is_inside & uniform.is_allowed(mask, at, Discrete(mask.shape[-1]))


def _is_maskable(space: AnySpace) -> bool:
    if isinstance(space, Composite):
        return any(map(_is_maskable, space.parts))
    return isinstance(space, Discrete | MultiDiscrete | MultiBinary)


def _ranges(space: MultiDiscrete | MultiBinary) -> tuple[tuple[int, ...], np.ndarray]:
    """Returns the number of values of each entry, `[k]`, and the smallest, `[k]`."""
    low, high = (np.broadcast_to(x, space.shape).reshape(-1) for x in space.bounds)
    return tuple((high - low + 1).tolist()), low


def _checked(mask: Any, num_envs: int, space: AnySpace) -> Any:
    if isinstance(space, Composite):
        try:
            masks = space.structure.flatten_up_to(mask)
        except (ValueError, TypeError) as error:
            raise ValueError(
                "`mask_fn` must return masks in the structure of the action space, "
                f"{space.structure}, got {jax.tree.structure(mask)}."
            ) from error
        if all(each is None for each in masks):
            raise ValueError("`mask_fn` must return a mask for some part, got none.")
        pairs = zip(masks, space.parts, strict=True)
        return tuple(_checked_part(each, num_envs, part) for each, part in pairs)
    if isinstance(space, Discrete):
        return _bools(mask, (num_envs, space.n))
    if isinstance(space, MultiBinary):
        mask = _bools(mask, (num_envs, *space.shape, 2))
        return mask.reshape(num_envs, -1, 2)
    sizes, _ = _ranges(space)
    if not isinstance(mask, tuple | list):
        mask = _bools(mask, (num_envs, *sizes))
        return mask.reshape(num_envs, math.prod(sizes))
    if len(mask) != len(sizes):
        raise ValueError(
            f"`mask_fn` must return a mask for each of {len(sizes)} entries, got "
            f"{len(mask)}."
        )
    masks = tuple(
        _bools(each, (num_envs, n)) for each, n in zip(mask, sizes, strict=True)
    )
    return jnp.stack(masks, axis=1) if len(set(sizes)) == 1 else masks


def _checked_part(mask: Any, num_envs: int, space: AnySpace) -> Any:
    if mask is None:
        return None
    if not _is_maskable(space):
        raise ValueError(
            "`mask_fn` must return None for a part of the action space that is not "
            f"discrete, got {type(mask).__name__}."
        )
    return _checked(mask, num_envs, space)


def _bools(mask: Any, shape: tuple[int, ...]) -> jax.Array:
    if not hasattr(mask, "dtype") or not hasattr(mask, "shape"):
        got = type(mask).__name__
    elif mask.shape != shape or mask.dtype != jnp.bool_:
        got = f"{mask.dtype} of shape {mask.shape}"
    else:
        return jnp.asarray(mask)
    raise ValueError(
        "`mask_fn` must return one bool per lane and action, bool of shape "
        f"{shape}, got {got}."
    )


def _draw_parts(
    masks: tuple, space: Composite, key: chex.PRNGKey
) -> tuple[Any, jax.Array]:
    num_envs = uniform.num_lanes(masks)
    actions, flags = [], []
    for number, (mask, part) in enumerate(zip(masks, space.parts, strict=True)):
        part_key = prng.fold_in(key, number)
        if mask is None:
            actions.append(uniform.uniform(part, num_envs, part_key))
        else:
            action, is_none = draw(mask, part, part_key)
            actions.append(action)
            flags.append(is_none)
    return space.structure.unflatten(actions), jnp.stack(flags).any(axis=0)
