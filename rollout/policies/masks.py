"""Masks of valid actions, and uniform random actions in every space.

A sampling function takes one key for all lanes. The sample of lane i does not depend on
the number of lanes.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from rollout.base import checks, prng
from rollout.base.platform import choose
from rollout.envs.spaces import (
    Composite,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Repeated,
    as_space,
)
from rollout.envs.types import AnySpace, ArrayTree

_LARGEST_N = 1 << 16  # so that the product of two 16-bit halves fits 32 bits
_MANY = 256  # masks with at least this many columns use rejection sampling first
_TRIES = 16  # candidates of a lane
_WIDE = 128  # masks with at least this many columns are counted in blocks
_BLOCK = 32
_INVALID_VALUE = -1e9
ActionMaskFn = Callable[[ArrayTree], ArrayTree]  # obs to a mask

_NAME = "action_mask"
DISCRETE = Discrete | MultiDiscrete | MultiBinary


def mask_values(values: jax.Array, action_mask: jax.Array | None) -> jax.Array:
    """Replaces the values of invalid actions by -1e9. Use it before `argmax`.

        action_mask = rollout.envs.spaces.get_action_mask(obs)
        action = mask_values(q_values, action_mask).argmax(-1)

    A row of the mask without a valid action is ignored, because a policy must choose an
    action.

    Args:
        values: `[..., n]` float, one value per action.
        action_mask: `[..., n]`, True or 1 for valid actions. None returns `values`.
    """
    if action_mask is None:
        return values
    is_valid = jnp.asarray(action_mask, bool)
    is_valid |= ~is_valid.any(-1, keepdims=True)
    return jnp.where(is_valid, values, _INVALID_VALUE)


def sample_actions(space: AnySpace, num_envs: int, key: chex.PRNGKey) -> ArrayTree:
    """Samples `[B, ...]` actions from the whole space, whose bounds must be finite."""
    if isinstance(space, Discrete):
        # Sample from 0 and shift by `start`.
        action = _below(space.n, space.n, (num_envs,), key).astype(space.dtype)
        return action + jnp.asarray(space.start, space.dtype)
    if isinstance(space, Composite):
        # Derive the key of a part from its position, so that its samples do not depend
        # on the parts that follow.
        actions = [
            sample_actions(part, num_envs, prng.fold_in(key, number))
            for number, part in enumerate(space.parts)
        ]
        return space.structure.unflatten(actions)
    if isinstance(space, Repeated):
        # Sample the elements as lanes: one call is faster than one per element.
        elements = sample_actions(space.space, num_envs * space.num, key)
        return jax.tree.map(
            lambda x: x.reshape(num_envs, space.num, *x.shape[1:]), elements
        )
    if space.bounds is not None:
        low, high = space.bounds
        return prng.sample_uniform(
            key, low, high, (num_envs, *space.shape), space.dtype
        )
    lane = jnp.arange(num_envs, dtype=jnp.int32)
    return jax.vmap(space.sample)(prng.fold_in(key, lane))


def check_bounds(space: AnySpace) -> None:
    """Raises for infinite bounds: there is no uniform distribution."""
    for leaf in space.leaves():
        low, high = leaf.bounds or (0, 0)
        if any(isinstance(bound, Tracer) for bound in (low, high)):
            continue  # values are unknown while tracing
        if not all(np.all(np.isfinite(np.asarray(bound))) for bound in (low, high)):
            raise ValueError(
                "`action_space` must have finite bounds to sample from, got "
                f"low={low}, high={high}."
            )


def among(action_mask: jax.Array, key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
    """Samples `[B]` int32 columns uniformly from the True columns of `[B, n]` bool.

    If no column of a lane is True, its column is sampled from all columns. The second
    array, `[B]` bool, is True in these lanes.
    """
    num_envs, n = action_mask.shape
    if n < _MANY:
        return _among_counted(action_mask, key)
    # Rejection sampling: the first valid candidate is uniform over the valid columns,
    # and most of the mask is not read. If all candidates of a lane are invalid, count
    # the valid columns of all lanes and sample with another key.
    candidates = _below(n, n, (num_envs, _TRIES), prng.fold_in(key, 0))
    index, is_found = candidates[:, 0], jnp.zeros(num_envs, bool)
    for candidate in candidates.T:
        index = jnp.where(is_found, index, candidate)
        is_found |= take_column(action_mask, candidate)

    def count(state: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        _, index, _ = state
        counted, no_valid = _among_counted(action_mask, prng.fold_in(key, 1))
        return jnp.ones((), bool), jnp.where(is_found, index, counted), no_valid

    def count_if_necessary(state: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        # A loop of at most one round, because a conditional would copy the mask.
        return jax.lax.while_loop(lambda state: ~state[0], count, state)

    state = is_found.all(), index, jnp.zeros(num_envs, bool)
    if prng.num_parts() > 1:  # the lanes of all devices would wait for each other
        return count(state)[1:]
    # On a GPU the host would wait for the condition of the loop.
    return choose(count_if_necessary, count, state)[1:]


def _among_counted(
    action_mask: jax.Array, key: chex.PRNGKey
) -> tuple[jax.Array, jax.Array]:
    """Samples like `among`: a rank among valid columns, and the column of this rank."""
    num_envs, n = action_mask.shape
    if n < _WIDE:  # count column by column: `jnp.cumsum` is slower on a CPU
        total = action_mask.sum(axis=1, dtype=jnp.int32)
        rank, no_valid = _rank(total, n, key)
        # `index` counts the columns with at most `rank` valid columns up to them.
        num_valid = index = jnp.zeros(num_envs, jnp.int32)
        for column in action_mask.T:
            num_valid += (column | no_valid).astype(jnp.int32)
            index += (num_valid <= rank).astype(jnp.int32)
        return index, no_valid
    # Count the valid columns in each block and up to the end of each block, and sample
    # a rank among all of them.
    num_blocks = -(-n // _BLOCK)
    padded = jnp.pad(action_mask, ((0, 0), (0, num_blocks * _BLOCK - n)))
    count = padded.reshape(num_envs, num_blocks, _BLOCK).sum(axis=2, dtype=jnp.int32)
    cumulative_count = jnp.cumsum(count, axis=1)
    lane_rank, no_valid = _rank(cumulative_count[:, -1], n, key)
    rank = lane_rank[:, None]
    # The blocks that end at or before the rank come before the block that contains it.
    is_before = cumulative_count <= rank
    block = jnp.sum(is_before, axis=1, keepdims=True, dtype=jnp.int32)
    num_before = jnp.sum(jnp.where(is_before, count, 0), axis=1, keepdims=True)
    column = block * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)[None]
    # Columns past the end repeat the last column. The rank is reached before them.
    block_mask = jnp.take_along_axis(action_mask, jnp.minimum(column, n - 1), axis=1)
    num_valid = num_before + jnp.cumsum(block_mask, axis=1, dtype=jnp.int32)
    index = block[:, 0] * _BLOCK + jnp.sum(num_valid <= rank, axis=1, dtype=jnp.int32)
    # If no column is valid, the rank was sampled from all columns and is the column.
    return jnp.where(no_valid, lane_rank, index), no_valid


def _rank(total: jax.Array, n: int, key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
    """Samples `[B]` ranks below `total`, and below n in lanes with a total of 0."""
    no_valid = total == 0
    return _below(jnp.where(no_valid, n, total), n, total.shape, key), no_valid


def take_column(action_mask: jax.Array, index: jax.Array) -> jax.Array:
    """Reads `[B, n]` bool at column `index`, `[B]` from 0 to n - 1; `[B]` bool."""
    column, mode = index[:, None], "promise_in_bounds"
    return jnp.take_along_axis(action_mask, column, axis=1, mode=mode)[:, 0]


def num_lanes(obs: ArrayTree) -> int:
    """Returns the length of the leading axis, B."""
    return jax.tree.leaves(obs)[0].shape[0]


def _below(
    n: jax.typing.ArrayLike, largest: int, shape: tuple[int, ...], key: chex.PRNGKey
) -> jax.Array:
    """Samples int32 below `n`, each from one random word: the high half of word * n.

    `n` is at most `largest`, a Python int. The bias of an integer is below n / 2**32.

    Source:
        "Fast Random Integer Generation in an Interval" (Lemire, 2019), without its
        rejection step; arXiv:1805.10941.
    """
    if largest > _LARGEST_N:
        return prng.sample_uniform(
            key, 0, jnp.asarray(n, jnp.int32) - 1, shape, jnp.int32
        )
    word = prng.bits(key, shape)
    # word * n has 48 bits and does not fit uint32. Multiply each half of the word by n;
    # `low` carries into the upper product.
    n, half = jnp.asarray(n, jnp.uint32), jnp.uint32(16)
    low = ((word & jnp.uint32(0xFFFF)) * n) >> half
    return (((word >> half) * n + low) >> half).astype(jnp.int32)


def check_can_sample(space: AnySpace, action_mask_fn: ActionMaskFn | None) -> None:
    """Raises for infinite bounds, and for a mask of a space without discrete parts."""
    has_discrete = any(isinstance(part, DISCRETE) for part in space.leaves())
    if action_mask_fn is not None and not has_discrete:
        raise ValueError(
            "`action_space` must be discrete or have discrete parts if "
            f"`action_mask_fn` is given, got {type(space).__name__}."
        )
    check_bounds(space)


def find_mask(
    observation_space: AnySpace, action_space: AnySpace
) -> ActionMaskFn | None:
    """Finds the mask in observations with an entry `action_mask`, also in `info`."""
    observed, space = as_space(observation_space), as_space(action_space)
    parts: Any = observed.spaces if isinstance(observed, Composite) else {}
    if isinstance(parts, Mapping) and "info" in parts:  # by `observe_info`
        info_mask_fn = find_mask(parts["info"], space)
        return info_mask_fn and (lambda obs: info_mask_fn(obs["info"]))
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
    return _check_mask(action_mask_fn(obs), num_lanes(obs), space)


def sample(
    action_mask: Any, space: AnySpace, key: chex.PRNGKey
) -> tuple[ArrayTree, jax.Array]:
    """Samples `[B]` actions uniformly from the valid actions.

    If no value is valid, for the action or for one of its entries, the value is sampled
    from all values. The second array, `[B]` bool, is True in these lanes.
    """
    if isinstance(action_mask, tuple):
        actions, flags = [], []
        for i, (mask, part) in enumerate(zip(action_mask, _parts(space), strict=True)):
            part_key = prng.fold_in(key, i)
            if mask is None:
                action = sample_actions(part, num_lanes(action_mask), part_key)
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
    index, no_valid = among(action_mask.reshape(-1, action_mask.shape[-1]), key)
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
    flags = take_column(rows, index.reshape(-1)).reshape(len(action_mask), -1)
    return (is_inside & flags).all(axis=1)


def _ranges(space: AnySpace) -> tuple[tuple[int, ...], np.ndarray]:
    """Returns the number of values and the smallest value of each entry, `[k]`."""
    # The range of int8 does not fit into int8.
    low, high = (
        np.broadcast_to(x, space.shape).reshape(-1).astype(np.int64)
        for x in space.bounds
    )
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
    # Sample entries of equal size together, `[B, k, n]`, with one call instead of k.
    return jnp.concatenate(masks, axis=1) if len(set(sizes)) == 1 else masks


def _bools(action_mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """Checks the shape of a mask, and converts numbers to bool."""
    message = "`action_mask_fn` must return one flag per lane and action,"
    checks.check_shape(message, action_mask, shape)
    return jnp.asarray(action_mask, bool)
