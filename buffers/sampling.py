"""Draws usable rows, evenly or in proportion to a weight.

Unusable rows (their successor or history is missing) are few and scattered, so they are
drawn and rejected. That is exact, and costs O(sample), not O(capacity). If many rounds
do not find enough usable rows, one pass over all rows does.
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

RowFn = Callable[[jax.Array], jax.Array]  # rows of any shape to flags or numbers
_Round = tuple[jax.Array, jax.Array, jax.Array]  # its number, the rows, their flags

_LOOK = 256  # rows that are looked at together
_ROUNDS = 16  # if half of the rows are usable, these miss one draw in 65,536


def evenly(ring: RingState, key: chex.PRNGKey, num_draws: int) -> jax.Array:
    """Draws `[S]` int32 rows; every stored row has the same chance."""
    # One number over the rows of all lanes, so that each row has the same chance. Where
    # lanes have equal sizes it runs over the lanes, age by age, and needs no search.
    # It is the high half of the product of their number and one random word.
    # `jax.random.randint` draws two words and divides; the bias, below one in 2**32
    # times their number, is the same.
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
    """Replaces unusable rows by drawing again.

    Args:
        first: `[S]` int32, the rows drawn first.
        draw_fn: draws `[S]` rows, each from all rows.
        usable_fn: returns a bool for each row.
        draw_usable_fn: draws `[S]` usable rows, in a pass over all rows.
        key: one typed key.

    Returns:
        `[S]` int32 rows, and `[S]` bool, False where no row is usable.
    """

    def redraw_in_rounds(key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
        """Draws again until all rows are usable: most often in no round."""

        def again(loop: _Round) -> _Round:
            # After `_ROUNDS` rounds one more, in which all rows are looked at.
            number, row, usable = loop
            round_key = jax.random.fold_in(key, number)
            drawn = lax.cond(number < _ROUNDS, draw_fn, draw_usable_fn, round_key)
            row = jnp.where(usable, row, drawn)
            return number + 1, row, usable_fn(row)

        start = jnp.int32(0), first, usable_fn(first)
        return lax.while_loop(
            lambda loop: ~jnp.all(loop[2]) & (loop[0] <= _ROUNDS), again, start
        )[1:]

    def redraw_at_once(key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
        """Draws all rounds side by side, and takes the first usable row."""
        # The same keys, and the same row, as round by round.
        number = jnp.arange(_ROUNDS, dtype=jnp.int32)
        round_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, number)
        rows = jnp.concatenate([first[None], jax.vmap(draw_fn)(round_keys)])
        usable = usable_fn(rows)
        row = jnp.take_along_axis(rows, jnp.argmax(usable, axis=0)[None], axis=0)[0]
        found = usable.any(axis=0)

        def look_at_all(key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
            drawn = jnp.where(found, row, draw_usable_fn(key))
            return drawn, usable_fn(drawn)

        last_key = jax.random.fold_in(key, _ROUNDS)
        return lax.cond(found.all(), lambda _: (row, found), look_at_all, last_key)

    return platform.choose(redraw_in_rounds, redraw_at_once, key)


def in_proportion_to(
    weight_fn: RowFn, ring: RingState, key: chex.PRNGKey, num_draws: int
) -> jax.Array:
    """Draws `[S]` int32 rows in proportion to `weight_fn(row)`: O(capacity)."""
    row = neighbours.all_rows(ring)
    weight = weight_fn(row).astype(jnp.float32)
    weight = jnp.where(neighbours.is_stored(ring, row), weight, 0.0)
    return sum_tree.draw_apart(sum_tree.build(weight), key, num_draws)


def has_usable(
    ring: RingState, usable_fn: RowFn, number: jax.typing.ArrayLike
) -> jax.Array:
    """Returns whether at least `number` rows are usable, `()` bool.

    It goes back from the newest rows, no further than needed: nearly all are usable.
    """
    num_ages = min(ring.num_slots, -(-_LOOK // ring.num_envs) + 1)
    lane = jnp.arange(ring.num_envs, dtype=jnp.int32)[None]
    row_age = jnp.arange(num_ages, dtype=jnp.int32)[:, None]

    def count_back(ring: RingState) -> jax.Array:
        def look(loop: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first, count = loop
            age = first + row_age
            slot = (ring.head[None] - 1 - age) % ring.num_slots
            stored = age < ring.size[None]
            usable = stored & usable_fn(slot * ring.num_envs + lane)
            return first + num_ages, count + jnp.sum(usable, dtype=jnp.int32)

        longest = jnp.max(ring.size)
        return lax.while_loop(
            lambda loop: (loop[1] < number) & (loop[0] < longest),
            look,
            (jnp.int32(0), jnp.int32(0)),
        )[1]

    def count_all(ring: RingState) -> jax.Array:
        return neighbours.count(ring, usable_fn)

    return platform.choose(count_back, count_all, ring) >= number


def _find(size: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns lane and age of the rows `number`, counted lane after lane."""
    end = jnp.cumsum(size, dtype=jnp.int32)
    lane = jnp.searchsorted(end, number, side="right", method="scan_unrolled")
    # If the ring is empty, the search ends beyond the last lane.
    lane = jnp.minimum(lane, end.shape[0] - 1).astype(jnp.int32)
    return lane, end[lane] - 1 - number
