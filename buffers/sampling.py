"""Samples usable rows, uniformly or in proportion to a weight.

A row is unusable if its successor or a part of its history is missing. Unusable rows
are few and scattered, so rejection sampling is exact and costs O(sample), not
O(capacity). If usable rows are still missing after many rounds, one pass over all rows
samples them.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax import lax

from rollout import platform
from rollout.buffers import neighbours, sum_tree
from rollout.buffers.types import RingState
from rollout.envs import prng

RowFn = Callable[[jax.Array], jax.Array]  # maps rows of any shape to flags or weights
_Round = tuple[jax.Array, jax.Array, jax.Array]  # round number, rows, usable flags

_CHUNK = 256  # rows that `has_usable` reads per iteration
_ROUNDS = 16  # if half of the rows are usable, 1 of 65,536 samples fails all rounds


def evenly(ring: RingState, key: chex.PRNGKey, num_draws: int) -> jax.Array:
    """Samples `[S]` int32 rows uniformly from the stored rows, with replacement."""
    # One number enumerates the stored rows of all lanes, so rows are equally likely. If
    # all lanes have the same size, it enumerates the lanes for each age, which needs no
    # search. The number is the high word of (random word * number of rows): unlike
    # `jax.random.randint`, this uses one random word and no division. The bias is the
    # same, below (number of rows) / 2**32.
    word = jax.random.bits(key, (num_draws,), jnp.uint32)
    number = prng.product(word, jnp.sum(ring.size, dtype=jnp.uint32))[0]
    number = number.astype(jnp.int32)
    lane, age = lax.cond(
        jnp.all(ring.size == ring.size[0]),
        lambda: (number % ring.num_envs, number // ring.num_envs),
        lambda: _find(ring.size, number),
    )
    slot = (ring.head[lane] - 1 - age) % ring.num_slots
    return slot * ring.num_envs + lane


def redraw(
    first: jax.Array,
    draw_fn: Callable[[chex.PRNGKey], jax.Array],
    usable_fn: RowFn,
    draw_usable_fn: Callable[[chex.PRNGKey], jax.Array],
    key: chex.PRNGKey,
) -> tuple[jax.Array, jax.Array]:
    """Replaces unusable rows by rejection sampling.

    Args:
        first: `[S]` int32, initial sample.
        draw_fn: function that samples `[S]` rows from all rows.
        usable_fn: function that returns a bool for each row.
        draw_usable_fn: function that samples `[S]` usable rows in a pass over all rows.
        key: one typed key.

    Returns:
        `[S]` int32 rows, and `[S]` bool, False if the buffer has no usable row.
    """

    def redraw_in_rounds(key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
        """Resamples until all rows are usable; usually no round is needed."""

        def resample(carry: _Round) -> _Round:
            # After `_ROUNDS` rounds, a last round makes a pass over all rows.
            number, row, usable = carry
            round_key = jax.random.fold_in(key, number)
            sampled = lax.cond(number < _ROUNDS, draw_fn, draw_usable_fn, round_key)
            row = jnp.where(usable, row, sampled)
            return number + 1, row, usable_fn(row)

        start = jnp.int32(0), first, usable_fn(first)
        return lax.while_loop(
            lambda carry: ~jnp.all(carry[2]) & (carry[0] <= _ROUNDS), resample, start
        )[1:]

    def redraw_at_once(key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
        """Samples all rounds in parallel, and takes the first usable row."""
        # The keys and the selected rows are the same as in `redraw_in_rounds`.
        number = jnp.arange(_ROUNDS, dtype=jnp.int32)
        round_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, number)
        rows = jnp.concatenate([first[None], jax.vmap(draw_fn)(round_keys)])
        usable = usable_fn(rows)
        row = jnp.take_along_axis(rows, jnp.argmax(usable, axis=0)[None], axis=0)[0]
        valid = usable.any(axis=0)

        def use_all_rows(key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
            sampled = jnp.where(valid, row, draw_usable_fn(key))
            return sampled, usable_fn(sampled)

        last_key = jax.random.fold_in(key, _ROUNDS)
        return lax.cond(valid.all(), lambda _: (row, valid), use_all_rows, last_key)

    return platform.choose(redraw_in_rounds, redraw_at_once, key)


def in_proportion_to(
    weight_fn: RowFn, ring: RingState, key: chex.PRNGKey, num_draws: int
) -> jax.Array:
    """Samples `[S]` int32 rows in proportion to `weight_fn(row)`, in O(capacity)."""
    row = neighbours.all_rows(ring)
    weight = weight_fn(row).astype(jnp.float32)
    weight = jnp.where(neighbours.is_stored(ring, row), weight, 0.0)
    return sum_tree.draw_apart(sum_tree.build(weight), key, num_draws)


def has_usable(
    ring: RingState, usable_fn: RowFn, number: jax.typing.ArrayLike
) -> jax.Array:
    """Returns whether at least `number` rows are usable, `()` bool.

    Nearly all rows are usable, so the search starts at the newest rows and stops early.
    """
    num_ages = min(ring.num_slots, -(-_CHUNK // ring.num_envs) + 1)
    lane = jnp.arange(ring.num_envs, dtype=jnp.int32)[None]
    row_age = jnp.arange(num_ages, dtype=jnp.int32)[:, None]

    def count_back(ring: RingState) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first, count = carry
            age = first + row_age
            slot = (ring.head[None] - 1 - age) % ring.num_slots
            stored = age < ring.size[None]
            usable = stored & usable_fn(slot * ring.num_envs + lane)
            return first + num_ages, count + jnp.sum(usable, dtype=jnp.int32)

        longest = jnp.max(ring.size)
        return lax.while_loop(
            lambda carry: (carry[1] < number) & (carry[0] < longest),
            step,
            (jnp.int32(0), jnp.int32(0)),
        )[1]

    def count_all(ring: RingState) -> jax.Array:
        return neighbours.count(ring, usable_fn)

    return platform.choose(count_back, count_all, ring) >= number


def _find(size: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the lanes and ages of rows, numbered lane after lane."""
    end = jnp.cumsum(size, dtype=jnp.int32)
    lane = jnp.searchsorted(end, number, side="right", method="scan_unrolled")
    # In an empty ring the search returns an index past the last lane.
    lane = jnp.minimum(lane, end.shape[0] - 1).astype(jnp.int32)
    return lane, end[lane] - 1 - number
