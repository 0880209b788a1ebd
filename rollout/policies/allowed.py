"""Which of n actions are allowed, and draws among them; `masks` knows other spaces.

Every draw takes one key for all lanes, and lane i draws the same whatever their number.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from envs import keys
from rollout.policies.draws import Choice, below

_MANY = 256  # actions of which a few are tried first
_TRIES = 8
_UNROLL = 32  # columns of a mask per iteration: straight-line for few actions


def draw(
    mask: jax.Array, choice: Choice, key: chex.PRNGKey
) -> tuple[jax.Array, jax.Array]:
    """Draws `[B]` actions evenly among those where `mask`, `[B, n]` bool.

    Where nothing is allowed, the action is drawn from all; the second array, `[B]`
    bool, tells where.
    """
    if choice.n < _MANY:
        return _count(mask, choice, key)
    # Most often one of a few tries is allowed, so that nobody reads the whole mask.
    num_envs = mask.shape[0]
    tries = below(choice.n, choice.n, (num_envs, _TRIES), keys.fold_in(key, 0))
    index, is_found = tries[:, 0], jnp.zeros(num_envs, bool)
    for this in tries.T:
        index = jnp.where(is_found, index, this)
        is_found |= _at(mask, this)
    found = index.astype(choice.dtype) + jnp.asarray(choice.start, choice.dtype)

    def count(_: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        counted, is_none = _count(mask, choice, keys.fold_in(key, 1))
        return jnp.bool_(True), jnp.where(is_found, found, counted), is_none

    tried = is_found.all(), found, jnp.zeros_like(is_found)
    if keys.num_parts() > 1:  # devices would have to ask each other
        return count(tried)[1:]
    # A loop of at most one round: XLA copies what a `cond` reads, here the mask.
    return lax.while_loop(lambda state: ~state[0], count, tried)[1:]


def _count(
    mask: jax.Array, choice: Choice, key: chex.PRNGKey
) -> tuple[jax.Array, jax.Array]:
    """Draws as `draw` does, one of those that are counted to be allowed."""
    num_envs, n = mask.shape
    dtype, zero = choice.dtype, jnp.zeros(num_envs, jnp.int32)
    if n < _MANY:
        total = mask.sum(axis=-1, dtype=jnp.int32)
    else:  # `sum` would make integers of the whole mask
        total = _fold_columns(_add, zero, mask)
    is_none = total == 0
    rank = below(jnp.where(is_none, n, total), n, (num_envs,), key)

    # The allowed action of that rank comes after all those up to which at most `rank`
    # are allowed. `jnp.cumsum` would do, but is ten times slower on CPU.
    def count(
        state: tuple[jax.Array, jax.Array], column: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        so_far, action = state
        so_far = _add(so_far, column | is_none)
        return so_far, action + (so_far <= rank).astype(dtype)

    _, index = _fold_columns(count, (zero, zero.astype(dtype)), mask)
    return index + jnp.asarray(choice.start, dtype), is_none


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


def is_allowed(mask: jax.Array, action: jax.Array, choice: Choice) -> jax.Array:
    """Tells where `mask`, `[B, n]` bool, allows `action`, `[B]`; `[B]` bool."""
    index = action - jnp.asarray(choice.start, action.dtype)
    is_inside = (index >= 0) & (index < choice.n)
    return is_inside & _at(mask, jnp.where(is_inside, index, 0))


def _at(mask: jax.Array, index: jax.Array) -> jax.Array:
    """What `mask`, `[B, n]`, says of `index`, `[B]` from 0 to n - 1; `[B]` bool."""
    at = index[:, None]
    return jnp.take_along_axis(mask, at, axis=1, mode="promise_in_bounds")[:, 0]


def none_allowed(mask: jax.Array) -> jax.Array:
    """Tells where `mask`, `[B, n]` bool, allows nothing; `[B]` bool."""
    return ~mask.any(axis=-1)
