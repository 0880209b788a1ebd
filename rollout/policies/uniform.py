"""Draws actions uniformly, from a whole space or from the allowed ones.

Every draw takes one key for all lanes, and lane i draws the same whatever their number.
"""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from rollout.envs import prng
from rollout.envs.spaces import Composite, Discrete, Repeated
from rollout.envs.types import AnySpace, ArrayTree

_LARGEST_N = 1 << 16  # so that the product of two 16-bit halves fits 32 bits
_MANY = 256  # from this many actions on, a few are tried first
_TRIES = 8
_UNROLL = 32  # columns of a mask per iteration: straight-line for few actions


def uniform(space: AnySpace, num_envs: int, key: chex.PRNGKey) -> ArrayTree:
    """Draws `[B, ...]` actions from the whole space, whose bounds must be finite."""
    if isinstance(space, Discrete):
        return discrete(space, num_envs, key)
    if isinstance(space, Composite):
        drawn = [
            uniform(part, num_envs, prng.fold_in(key, number))
            for number, part in enumerate(space.parts)
        ]
        return space.structure.unflatten(drawn)
    if isinstance(space, Repeated):
        every = uniform(space.space, num_envs * space.num, key)
        return jax.tree.map(
            lambda x: x.reshape(num_envs, space.num, *x.shape[1:]), every
        )
    if space.bounds is not None:
        low, high = space.bounds
        return prng.draw(key, low, high, (num_envs, *space.shape), space.dtype)
    lane = jnp.arange(num_envs, dtype=jnp.int32)
    return jax.vmap(space.sample)(prng.fold_in(key, lane))


def check_bounds(space: AnySpace) -> None:
    """Raises for infinite bounds, between which there is no uniform distribution."""
    for leaf in space.leaves():
        low, high = leaf.bounds or (0, 0)
        if any(isinstance(bound, Tracer) for bound in (low, high)):
            continue  # values are unknown while tracing
        if not all(np.all(np.isfinite(np.asarray(bound))) for bound in (low, high)):
            raise ValueError(
                "`action_space` must have finite bounds to draw from, got "
                f"low={low}, high={high}."
            )


def discrete(space: Discrete, num_envs: int, key: chex.PRNGKey) -> jax.Array:
    """Draws `[B]` actions."""
    action = _below(space.n, space.n, (num_envs,), key).astype(space.dtype)
    return action + jnp.asarray(space.start, space.dtype)


def allowed(
    mask: jax.Array, space: Discrete, key: chex.PRNGKey
) -> tuple[jax.Array, jax.Array]:
    """Draws `[B]` actions uniformly among those allowed by `mask`, `[B, n]` bool.

    Where nothing is allowed, the action is drawn from all; the second array, `[B]`
    bool, is True there.
    """
    if space.n < _UNROLL:  # straight-line anyway
        return _count(mask, space, key)
    # On a GPU a loop waits for the host to read its condition, and a round costs
    # launches.
    draw, draw_at_once = (
        functools.partial(fn, space) for fn in (allowed_in_loops, allowed_at_once)
    )
    return lax.platform_dependent(
        mask, key, cuda=draw_at_once, rocm=draw_at_once, default=draw
    )


def allowed_at_once(
    space: Discrete, mask: jax.Array, key: chex.PRNGKey
) -> tuple[jax.Array, jax.Array]:
    """Draws as `allowed` does, without a loop."""
    if space.n < _MANY:
        return _count_at_once(mask, space, key)
    found, is_found = _try_few(mask, space, key)
    counted, is_none = _count_at_once(mask, space, prng.fold_in(key, 1))
    return jnp.where(is_found, found, counted), is_none


def allowed_in_loops(
    space: Discrete, mask: jax.Array, key: chex.PRNGKey
) -> tuple[jax.Array, jax.Array]:
    """Draws as `allowed` does, in loops that read no more than they need."""
    if space.n < _MANY:
        return _count(mask, space, key)
    # Usually one of a few tries is allowed, and the whole mask is not read.
    found, is_found = _try_few(mask, space, key)

    def count(_: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        counted, is_none = _count(mask, space, prng.fold_in(key, 1))
        return jnp.bool_(True), jnp.where(is_found, found, counted), is_none

    tried = is_found.all(), found, jnp.zeros_like(is_found)
    if prng.num_parts() > 1:  # a condition over all devices would make them wait
        _, action, is_none = count(tried)
        return action, is_none
    # A loop of at most one round: XLA copies what a `cond` reads, here the mask.
    _, action, is_none = lax.while_loop(lambda state: ~state[0], count, tried)
    return action, is_none


def _try_few(
    mask: jax.Array, space: Discrete, key: chex.PRNGKey
) -> tuple[jax.Array, jax.Array]:
    """Draws `[B]` actions a few times; the `[B]` bool is True where one was allowed."""
    # Rejection sampling: the first allowed try is uniform over the allowed actions. The
    # caller counts, with another key, where all tries failed.
    num_envs = mask.shape[0]
    tries = _below(space.n, space.n, (num_envs, _TRIES), prng.fold_in(key, 0))
    index, is_found = tries[:, 0], jnp.zeros(num_envs, bool)
    for this in tries.T:
        index = jnp.where(is_found, index, this)
        is_found |= _at(mask, this)
    found = index.astype(space.dtype) + jnp.asarray(space.start, space.dtype)
    return found, is_found


def _count_at_once(
    mask: jax.Array, space: Discrete, key: chex.PRNGKey
) -> tuple[jax.Array, jax.Array]:
    """Draws as `_count` does: finds the block of columns, then the column in it."""
    num_envs, n = mask.shape
    num_blocks = -(-n // _UNROLL)
    # Allowed actions in each block, and up to its end; then a rank among all of them.
    padded = jnp.pad(mask, ((0, 0), (0, num_blocks * _UNROLL - n)))
    count = padded.reshape(num_envs, num_blocks, _UNROLL).sum(axis=2, dtype=jnp.int32)
    up_to = jnp.cumsum(count, axis=1)
    total = up_to[:, -1]
    is_none = total == 0
    rank = _below(jnp.where(is_none, n, total), n, (num_envs,), key)[:, None]

    # The blocks that end at or before the rank come before the one that contains it.
    block = jnp.sum(up_to <= rank, axis=1, keepdims=True, dtype=jnp.int32)
    before = jnp.sum(jnp.where(up_to <= rank, count, 0), axis=1, keepdims=True)
    column = block * _UNROLL + jnp.arange(_UNROLL, dtype=jnp.int32)[None]
    # Past the end the last column is read again, which is after the rank was reached.
    inside = jnp.take_along_axis(mask, jnp.minimum(column, n - 1), axis=1)
    so_far = before + jnp.cumsum(inside, axis=1, dtype=jnp.int32)
    index = block[:, 0] * _UNROLL + jnp.sum(so_far <= rank, axis=1, dtype=jnp.int32)
    # Where nothing is allowed, the rank was drawn from all actions: it is the action.
    index = jnp.where(is_none, rank[:, 0], index).astype(space.dtype)
    return index + jnp.asarray(space.start, space.dtype), is_none


def _count(
    mask: jax.Array, space: Discrete, key: chex.PRNGKey
) -> tuple[jax.Array, jax.Array]:
    """Draws as `allowed` does: counts the allowed actions, then draws a rank."""
    num_envs, n = mask.shape
    dtype, zero = space.dtype, jnp.zeros(num_envs, jnp.int32)
    if n < _MANY:
        total = mask.sum(axis=-1, dtype=jnp.int32)
    else:  # `sum` would convert the whole mask to integers
        total = _fold_columns(_add, zero, mask)
    is_none = total == 0
    rank = _below(jnp.where(is_none, n, total), n, (num_envs,), key)

    # The action of that rank is the first with more than `rank` allowed up to it.
    # `jnp.cumsum` would do, but is slower on a CPU.
    def count(
        state: tuple[jax.Array, jax.Array], column: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        so_far, action = state
        so_far = _add(so_far, column | is_none)
        return so_far, action + (so_far <= rank).astype(dtype)

    _, index = _fold_columns(count, (zero, zero.astype(dtype)), mask)
    return index + jnp.asarray(space.start, dtype), is_none


def _add(total: jax.Array, flag: jax.Array) -> jax.Array:
    return total + flag.astype(jnp.int32)


def _fold_columns(fn: Callable[..., Any], state: Any, mask: jax.Array) -> Any:
    """Folds the columns of a mask, `[B]` each; a `scan` would copy them all first."""

    def fold(block: jax.Array, state: Any) -> Any:
        for column in range(block.shape[1]):
            state = fn(state, block[:, column])
        return state

    def fold_block(number: jax.Array, state: Any) -> Any:
        start = number * _UNROLL
        return fold(lax.dynamic_slice_in_dim(mask, start, _UNROLL, axis=1), state)

    num_blocks, rest = divmod(mask.shape[1], _UNROLL)
    if num_blocks:
        state = lax.fori_loop(0, num_blocks, fold_block, state)
    return fold(mask[:, mask.shape[1] - rest :], state)


def is_allowed(mask: jax.Array, action: jax.Array, space: Discrete) -> jax.Array:
    """Returns `[B]` bool, True where `mask`, `[B, n]` bool, allows `action`, `[B]`."""
    index = action - jnp.asarray(space.start, action.dtype)
    is_inside = (index >= 0) & (index < space.n)
    return is_inside & _at(mask, jnp.where(is_inside, index, 0))


def _at(mask: jax.Array, index: jax.Array) -> jax.Array:
    """Reads `mask`, `[B, n]`, at `index`, `[B]` from 0 to n - 1; `[B]` bool."""
    at = index[:, None]
    return jnp.take_along_axis(mask, at, axis=1, mode="promise_in_bounds")[:, 0]


def none_allowed(mask: jax.Array) -> jax.Array:
    """Returns `[B]` bool, True where `mask`, `[B, n]` bool, allows nothing."""
    return ~mask.any(axis=-1)


def num_lanes(obs: ArrayTree) -> int:
    """Returns the length of the leading axis, B."""
    return jax.tree.leaves(obs)[0].shape[0]


def _below(
    n: jax.typing.ArrayLike, largest: int, shape: tuple[int, ...], key: chex.PRNGKey
) -> jax.Array:
    """Draws int32 below `n`, each from one word: the high half of word * n.

    `n` is at most `largest`, a Python int. The bias of an integer is below n / 2**32.

    Source:
        "Fast Random Integer Generation in an Interval" (Lemire, 2019), without its
        rejection step; arXiv:1805.10941.
    """
    if largest > _LARGEST_N:
        return prng.draw(key, 0, jnp.asarray(n, jnp.int32) - 1, shape, jnp.int32)
    word = prng.bits(key, shape)
    # word * n has 48 bits, which uint32 does not hold: so each half of the word is
    # multiplied by itself, and `low` carries into the upper product.
    n, half = jnp.asarray(n, jnp.uint32), jnp.uint32(16)
    low = ((word & jnp.uint32(0xFFFF)) * n) >> half
    return (((word >> half) * n + low) >> half).astype(jnp.int32)
