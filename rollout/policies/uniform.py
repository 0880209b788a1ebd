"""Samples actions uniformly, from a whole space or among the valid actions.

Every function takes one key for all lanes. Lane i samples the same action for any
number of lanes.
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
_MANY = 256  # masks with at least this many columns use rejection sampling first
_TRIES = 8
_WIDE = 128  # masks with at least this many columns are counted in blocks
_BLOCK = 32


def uniform(space: AnySpace, num_envs: int, key: chex.PRNGKey) -> ArrayTree:
    """Samples `[B, ...]` actions from the whole space, whose bounds must be finite."""
    if isinstance(space, Discrete):
        # Sample from 0 and shift by `start`.
        action = _below(space.n, space.n, (num_envs,), key).astype(space.dtype)
        return action + jnp.asarray(space.start, space.dtype)
    if isinstance(space, Composite):
        # Derive the key of a part from its position, so that its samples do not depend
        # on the parts that follow.
        actions = [
            uniform(part, num_envs, prng.fold_in(key, number))
            for number, part in enumerate(space.parts)
        ]
        return space.structure.unflatten(actions)
    if isinstance(space, Repeated):
        # Sample the elements as lanes: one call is faster than one per element.
        elements = uniform(space.space, num_envs * space.num, key)
        return jax.tree.map(
            lambda x: x.reshape(num_envs, space.num, *x.shape[1:]), elements
        )
    if space.bounds is not None:
        low, high = space.bounds
        return prng.draw(key, low, high, (num_envs, *space.shape), space.dtype)
    lane = jnp.arange(num_envs, dtype=jnp.int32)
    return jax.vmap(space.sample)(prng.fold_in(key, lane))


def check_bounds(space: AnySpace) -> None:
    """Raises for infinite bounds, which have no uniform distribution."""
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
    """Samples `[B]` int32 columns uniformly among the True ones of `[B, n]` bool.

    If no column of a lane is True, its column is sampled from all. The second array,
    `[B]` bool, is True in these lanes.
    """
    num_envs, n = action_mask.shape
    if n < _MANY:
        return _choose(action_mask, key)
    # Rejection sampling: the first valid candidate is uniform over the valid columns.
    # If all candidates of a lane are invalid, count the valid columns and sample with
    # another key.
    candidates = _below(n, n, (num_envs, _TRIES), prng.fold_in(key, 0))
    index, is_found = candidates[:, 0], jnp.zeros(num_envs, bool)
    for candidate in candidates.T:
        index = jnp.where(is_found, index, candidate)
        is_found |= take_column(action_mask, candidate)

    def count(_: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        counted, no_valid = _choose(action_mask, prng.fold_in(key, 1))
        return jnp.bool_(True), jnp.where(is_found, index, counted), no_valid

    def count_if_needed(start: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        # Use a loop of at most one round: XLA would copy the operands of a `cond`, here
        # the mask.
        return lax.while_loop(lambda state: ~state[0], count, start)

    # Usually every lane has a valid candidate, and the whole mask is not read. On a GPU
    # the loop would wait for the host. With several devices, lanes would wait for each
    # other.
    start = is_found.all(), index, jnp.zeros_like(is_found)
    if prng.num_parts() > 1:
        return count(start)[1:]
    return lax.platform_dependent(
        start, cuda=count, rocm=count, default=count_if_needed
    )[1:]


def _choose(action_mask: jax.Array, key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
    """Samples as `among`: a rank, and the valid column of that rank."""
    num_envs, n = action_mask.shape
    if n < _WIDE:  # one column after another: `jnp.cumsum` is slower on a CPU
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
    # Positions past the end repeat the last column. The rank is reached before them.
    inside = jnp.take_along_axis(action_mask, jnp.minimum(column, n - 1), axis=1)
    num_valid = num_before + jnp.cumsum(inside, axis=1, dtype=jnp.int32)
    index = block[:, 0] * _BLOCK + jnp.sum(num_valid <= rank, axis=1, dtype=jnp.int32)
    # If no column is valid, the rank was sampled from all columns: it is the column.
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
        return prng.draw(key, 0, jnp.asarray(n, jnp.int32) - 1, shape, jnp.int32)
    word = prng.bits(key, shape)
    # word * n has 48 bits and does not fit uint32. Multiply each half of the word by n;
    # `low` carries into the upper product.
    n, half = jnp.asarray(n, jnp.uint32), jnp.uint32(16)
    low = ((word & jnp.uint32(0xFFFF)) * n) >> half
    return (((word >> half) * n + low) >> half).astype(jnp.int32)
