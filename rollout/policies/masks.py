"""Masks of allowed actions: the shape they have in each space, and draws that obey.

A mask is True where an action is allowed. It is `[B, n]` bool for a `Discrete`. For a
`MultiDiscrete` it is a tuple with `[B, n_i]` for each entry, or `[B, *nvec]` in one,
where what is allowed for an entry depends on the others; for a `MultiBinary` it is
`[B, *shape, 2]`. For a space of several parts it has their structure, with None for a
part that has no mask.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from envs import keys
from envs.types import AnySpace, ArrayTree
from rollout.policies import draws
from rollout.policies.draws import Choice

MaskFn = Callable[[ArrayTree], ArrayTree]  # obs to a mask

_NAME = "action_mask"


class Several(NamedTuple):
    """Parameters of a `MultiDiscrete` or a `MultiBinary`; hashable."""

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: jnp.dtype
    is_binary: bool


class Parts(NamedTuple):
    """Parameters of a space of several parts."""

    structure: Any
    kinds: tuple[Any, ...]  # None for a part that takes no mask
    draws: tuple[Callable[..., ArrayTree], ...]  # each from its whole space


Kind = Choice | Several | Parts


def choice(n: int) -> Choice:
    """The integers from 0 to n - 1."""
    return Choice(n, jnp.dtype(jnp.int32), 0)


def kind_of(action_space: AnySpace) -> Kind:
    """Reads a space, and refuses one of which nothing can be masked."""
    kind = _kind_of(action_space)
    if kind is None:
        raise ValueError(
            "`action_space` must be discrete or have discrete parts where `mask_fn` is "
            f"given, got {type(action_space).__name__}."
        )
    return kind


def find(observation_space: AnySpace, action_space: AnySpace) -> MaskFn | None:
    """Finds the mask in observations that have it by the name `action_mask`."""
    parts = getattr(
        observation_space, "spaces", getattr(observation_space, "parts", {})
    )
    get: Callable[[Any], Any] = operator.itemgetter(_NAME)
    if not isinstance(parts, Mapping):
        parts, get = getattr(parts, "_asdict", dict)(), operator.attrgetter(_NAME)
    if _NAME not in parts:
        return None
    sizes = getattr(action_space, "nvec", None)
    if sizes is None or parts[_NAME].shape == sizes:
        return get
    return lambda obs: tuple(jnp.moveaxis(get(obs), 1, 0))  # a mask for each entry


def read(mask_fn: MaskFn, obs: ArrayTree, kind: Kind) -> Any:
    """Calls `mask_fn`, and checks that the result is a mask of that kind.

    Returns:
        The mask as the other functions take it: that of equal entries is `[B, k, n]`,
        a joint one `[B, n_0 * n_1 * ...]`.
    """
    return _checked(mask_fn(obs), draws.num_lanes(obs), kind)


def draw(mask: Any, kind: Kind, key: chex.PRNGKey) -> tuple[ArrayTree, jax.Array]:
    """Draws `[B]` actions evenly among those that are allowed.

    Where nothing is allowed, of the whole or of an entry, it is drawn from all; the
    second array, `[B]` bool, tells where.
    """
    if isinstance(kind, Choice):
        return draws.allowed(mask, kind, key)
    if isinstance(kind, Parts):
        return _draw_parts(mask, kind, key)
    if isinstance(mask, tuple):
        drawn = [
            draws.allowed(each, choice(n), keys.fold_in(key, number))
            for number, (each, n) in enumerate(zip(mask, kind.sizes, strict=True))
        ]
        index, is_none = (jnp.stack(x, axis=1) for x in zip(*drawn, strict=True))
    elif mask.ndim == 3:
        flat = mask.reshape(-1, mask.shape[-1])
        drawn = draws.allowed(flat, choice(mask.shape[-1]), key)
        index, is_none = (x.reshape(mask.shape[:2]) for x in drawn)
    else:
        index, is_none = draws.allowed(mask, choice(mask.shape[-1]), key)
        index = jnp.stack(jnp.unravel_index(index, kind.sizes), axis=1)
        is_none = is_none[:, None]
    action = index + jnp.asarray(kind.starts, jnp.int32)[None]
    action = action.reshape(-1, *kind.shape).astype(kind.dtype)
    return action, is_none.any(axis=1)


def is_allowed(mask: Any, action: ArrayTree, kind: Kind) -> jax.Array:
    """Tells where a mask allows an action, `[B]` bool."""
    if isinstance(kind, Choice):
        return draws.is_allowed(mask, action, kind)
    if isinstance(kind, Parts):
        parts = kind.structure.flatten_up_to(action)
        flags = [
            is_allowed(each, part, kind_of_part)
            for each, part, kind_of_part in zip(mask, parts, kind.kinds, strict=True)
            if each is not None
        ]
        every = jnp.ones(draws.num_lanes(action), bool)
        return jnp.stack([every, *flags]).all(axis=0)
    sizes, starts = (jnp.asarray(x, jnp.int32)[None] for x in kind[:2])
    index = action.astype(jnp.int32).reshape(-1, len(kind.sizes)) - starts
    if isinstance(mask, tuple):
        columns = zip(mask, index.T, kind.sizes, strict=True)
        flags = [draws.is_allowed(each, at, choice(n)) for each, at, n in columns]
        return jnp.stack(flags).all(axis=0)
    if mask.ndim == 3:
        flat = mask.reshape(-1, mask.shape[-1])
        flags = draws.is_allowed(flat, index.reshape(-1), choice(mask.shape[-1]))
        return flags.reshape(index.shape).all(axis=1)
    is_inside = ((index >= 0) & (index < sizes)).all(axis=1)
    at = jnp.ravel_multi_index(tuple(index.T), kind.sizes, mode="clip")
    return is_inside & draws.is_allowed(mask, at, choice(mask.shape[-1]))


def _kind_of(space: AnySpace) -> Kind | None:
    if draws.is_discrete(space):
        return draws.describe(space)
    parts = getattr(space, "spaces", getattr(space, "parts", None))
    if parts is not None:
        leaves, structure = jax.tree.flatten(parts, is_leaf=_is_space)
        kinds = tuple(_kind_of(leaf) for leaf in leaves)
        if not any(kinds):
            return None
        return Parts(structure, kinds, tuple(draws.uniform(leaf) for leaf in leaves))
    sizes = getattr(space, "nvec", None)
    # Gymnasium's `MultiBinary` has an `n`; ours only says so by its name.
    is_binary = sizes is None and type(space).__name__ == "MultiBinary"
    if is_binary:
        sizes = np.full(space.shape, 2)
    if sizes is None:
        return None
    sizes = np.asarray(sizes)
    starts = np.broadcast_to(getattr(space, "start", 0), sizes.shape)
    dtype = jax.dtypes.canonicalize_dtype(space.dtype)
    counts, firsts = (tuple(x.reshape(-1).tolist()) for x in (sizes, starts))
    return Several(counts, firsts, sizes.shape, dtype, is_binary)


def _is_space(x: object) -> bool:
    return hasattr(x, "sample")


def _checked(mask: Any, num_envs: int, kind: Kind) -> Any:
    if isinstance(kind, Parts):
        try:
            parts = kind.structure.flatten_up_to(mask)
        except (ValueError, TypeError) as error:
            raise ValueError(
                "`mask_fn` must return masks in the structure of the action space, "
                f"{kind.structure}, got {jax.tree.structure(mask)}."
            ) from error
        if all(part is None for part in parts):
            raise ValueError("`mask_fn` must return a mask for some part, got none.")
        pairs = zip(parts, kind.kinds, strict=True)
        return tuple(_checked_part(part, num_envs, each) for part, each in pairs)
    if isinstance(kind, Choice):
        return _bools(mask, (num_envs, kind.n))
    if kind.is_binary:
        mask = _bools(mask, (num_envs, *kind.shape, 2))
        return mask.reshape(num_envs, -1, 2)
    if not isinstance(mask, tuple | list):
        mask = _bools(mask, (num_envs, *kind.sizes))
        return mask.reshape(num_envs, math.prod(kind.sizes))
    if len(mask) != len(kind.sizes):
        raise ValueError(
            f"`mask_fn` must return a mask for each of {len(kind.sizes)} entries, got "
            f"{len(mask)}."
        )
    pairs = zip(mask, kind.sizes, strict=True)
    masks = tuple(_bools(each, (num_envs, n)) for each, n in pairs)
    return jnp.stack(masks, axis=1) if len(set(kind.sizes)) == 1 else masks


def _checked_part(mask: Any, num_envs: int, kind: Kind | None) -> Any:
    if mask is None:
        return None
    if kind is None:
        raise ValueError(
            "`mask_fn` must return None for a part of the action space that is not "
            f"discrete, got {type(mask).__name__}."
        )
    return _checked(mask, num_envs, kind)


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


def _draw_parts(mask: tuple, kind: Parts, key: chex.PRNGKey) -> tuple[Any, jax.Array]:
    num_envs = next(x.shape[0] for x in jax.tree.leaves(mask))
    actions, flags = [], []
    for number, each in enumerate(mask):
        part_key = keys.fold_in(key, number)
        if each is None:
            actions.append(kind.draws[number](num_envs, part_key))
        else:
            action, is_none = draw(each, kind.kinds[number], part_key)
            actions.append(action)
            flags.append(is_none)
    return jax.tree.unflatten(kind.structure, actions), jnp.stack(flags).any(axis=0)
