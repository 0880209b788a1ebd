"""Draws actions uniformly, from a whole space or from the allowed ones.

Every draw takes one key for all lanes, and lane i draws the same whatever their number.
"""

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
_MANY = 256  # from this many columns of a mask on, a few are tried first
_TRIES = 8
_WIDE = 128  # from this many columns on, whole blocks are counted
_BLOCK = 32


def uniform(space: AnySpace, num_envs: int, key: chex.PRNGKey) -> ArrayTree:
    """Draws `[B, ...]` actions from the whole space, whose bounds must be finite."""
    if isinstance(space, Discrete):
        # Drawn from 0; the space may start elsewhere.
        action = _below(space.n, space.n, (num_envs,), key).astype(space.dtype)
        return action + jnp.asarray(space.start, space.dtype)
    if isinstance(space, Composite):
        # A key for each part by its number: a part draws the same whatever follows it.
        drawn = [
            uniform(part, num_envs, prng.fold_in(key, number))
            for number, part in enumerate(space.parts)
        ]
        return space.structure.unflatten(drawn)
    if isinstance(space, Repeated):
        # As more lanes: one draw costs less than one for each element.
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


def among(allowed: jax.Array, key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
    """Draws `[B]` int32 uniformly among the columns that are `allowed`, `[B, n]` bool.

    Where nothing is allowed, the column is drawn from all; the second array, `[B]`
    bool, is True there.
    """
    num_envs, n = allowed.shape
    if n < _MANY:
        return _choose(allowed, key)
    # Rejection sampling: the first allowed try is uniform over the allowed columns.
    # Where all tries fail, the allowed columns are counted, with another key.
    tries = _below(n, n, (num_envs, _TRIES), prng.fold_in(key, 0))
    index, is_found = tries[:, 0], jnp.zeros(num_envs, bool)
    for this in tries.T:
        index = jnp.where(is_found, index, this)
        is_found |= at(allowed, this)

    def count(_: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        counted, is_none = _choose(allowed, prng.fold_in(key, 1))
        return jnp.bool_(True), jnp.where(is_found, index, counted), is_none

    def count_if_needed(tried: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        # A loop of at most one round: XLA copies what a `cond` reads, here the mask.
        return lax.while_loop(lambda state: ~state[0], count, tried)

    # Usually a try is allowed in every lane, and the whole mask is not read. On a GPU a
    # loop would wait for the host, and on several devices lanes for each other.
    tried = is_found.all(), index, jnp.zeros_like(is_found)
    if prng.num_parts() > 1:
        return count(tried)[1:]
    return lax.platform_dependent(
        tried, cuda=count, rocm=count, default=count_if_needed
    )[1:]


def _choose(allowed: jax.Array, key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
    """Draws as `among` does: a rank, and the allowed column of that rank."""
    num_envs, n = allowed.shape
    if n < _WIDE:  # one column after the other; `jnp.cumsum` is slower on a CPU
        total = allowed.sum(axis=1, dtype=jnp.int32)
        rank, is_none = _rank(total, n, key)
        # The column of that rank is the first with more than `rank` allowed up to it.
        so_far = index = jnp.zeros(num_envs, jnp.int32)
        for column in allowed.T:
            so_far += (column | is_none).astype(jnp.int32)
            index += (so_far <= rank).astype(jnp.int32)
        return index, is_none
    # Allowed columns in each block, and up to its end; then a rank among all of them.
    num_blocks = -(-n // _BLOCK)
    padded = jnp.pad(allowed, ((0, 0), (0, num_blocks * _BLOCK - n)))
    count = padded.reshape(num_envs, num_blocks, _BLOCK).sum(axis=2, dtype=jnp.int32)
    up_to = jnp.cumsum(count, axis=1)
    drawn, is_none = _rank(up_to[:, -1], n, key)
    rank = drawn[:, None]
    # The blocks that end at or before the rank come before the one that contains it.
    block = jnp.sum(up_to <= rank, axis=1, keepdims=True, dtype=jnp.int32)
    before = jnp.sum(jnp.where(up_to <= rank, count, 0), axis=1, keepdims=True)
    column = block * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)[None]
    # Past the end the last column is read again, which is after the rank was reached.
    inside = jnp.take_along_axis(allowed, jnp.minimum(column, n - 1), axis=1)
    so_far = before + jnp.cumsum(inside, axis=1, dtype=jnp.int32)
    index = block[:, 0] * _BLOCK + jnp.sum(so_far <= rank, axis=1, dtype=jnp.int32)
    # Where nothing is allowed, the rank was drawn from all columns: it is the column.
    return jnp.where(is_none, drawn, index), is_none


def _rank(total: jax.Array, n: int, key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
    """Draws `[B]` ranks below `total`, or below n where it is 0, the `[B]` bool."""
    is_none = total == 0
    return _below(jnp.where(is_none, n, total), n, total.shape, key), is_none


def at(allowed: jax.Array, index: jax.Array) -> jax.Array:
    """Reads `allowed`, `[B, n]`, at `index`, `[B]` from 0 to n - 1; `[B]` bool."""
    column = index[:, None]
    return jnp.take_along_axis(allowed, column, axis=1, mode="promise_in_bounds")[:, 0]


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
