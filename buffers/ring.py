"""A ring of rows per lane: writing into it, in place.

Lanes that have always been given the same number of rows stand at the same slot, and
then a chunk is one contiguous write. Where a mask has let them drift apart, each row
goes to the slot of its own lane. Which of the two it is, is known only at run time, and
a conditional would copy the ring: two loops of no or one round write in place.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax import lax

from buffers.types import RingState


def init(row: chex.ArrayTree, num_slots: int, num_envs: int) -> RingState:
    """Makes an empty ring for rows like `row`, `[B, ...]`."""
    return RingState(
        experience=jax.tree.map(
            lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), row
        ),
        head=jnp.zeros((num_envs,), jnp.int32),
        size=jnp.zeros((num_envs,), jnp.int32),
    )


def write(state: RingState, chunk: chex.ArrayTree, mask: jax.Array) -> RingState:
    """Appends the rows of `chunk`, `[T, B, ...]`, where `mask`, `[T, B]` bool."""
    num_slots = jax.tree.leaves(state.experience)[0].shape[0]
    experience = state.experience
    if mask.shape[0] <= num_slots:
        together = jnp.all(mask) & jnp.all(state.head == state.head[0])
        experience = _once(
            together, _write_together, experience, state.head, chunk, mask
        )
        apart = ~together
    else:
        apart = jnp.ones((), bool)
    experience = _once(apart, _write_apart, experience, state.head, chunk, mask)
    count = jnp.sum(mask, axis=0, dtype=jnp.int32)
    return RingState(
        experience=experience,
        head=(state.head + count) % num_slots,
        size=jnp.minimum(state.size + count, num_slots),
    )


def _once(
    flag: jax.Array,
    write_fn: Callable[..., chex.ArrayTree],
    experience: chex.ArrayTree,
    *args: chex.ArrayTree,
) -> chex.ArrayTree:
    """Applies `write_fn` to `experience` if `flag`, in place."""

    def body(
        loop: tuple[jax.Array, chex.ArrayTree],
    ) -> tuple[jax.Array, chex.ArrayTree]:
        return jnp.zeros((), bool), write_fn(loop[1], *args)

    return lax.while_loop(lambda loop: loop[0], body, (flag, experience))[1]


def _write_together(
    experience: chex.ArrayTree, head: jax.Array, chunk: chex.ArrayTree, mask: jax.Array
) -> chex.ArrayTree:
    """Every lane writes all rows from the slot that lane 0 stands at."""
    num_rows = mask.shape[0]
    del mask  # unused: all are written

    def write_leaf(ring: jax.Array, rows: jax.Array) -> jax.Array:
        num_slots, start = ring.shape[0], head[0]
        if num_rows == 1:
            return lax.dynamic_update_slice_in_dim(ring, rows, start, 0)
        # A chunk that wraps is two writes: what the window of one does not cover keeps
        # what stands there.
        number = jnp.arange(num_rows)
        column = (slice(None), *(None,) * (ring.ndim - 1))
        first = jnp.minimum(start, num_slots - num_rows)
        shift = start - first  # 0 unless it wraps
        rolled = jnp.roll(rows, shift, axis=0)
        for window, keep in ((first, number >= shift), (0, number < shift)):
            old = lax.dynamic_slice_in_dim(ring, window, num_rows, 0)
            new = jnp.where(keep[column], rolled, old)
            ring = lax.dynamic_update_slice_in_dim(ring, new, window, 0)
        return ring

    return jax.tree.map(write_leaf, experience, chunk)


def _write_apart(
    experience: chex.ArrayTree, head: jax.Array, chunk: chex.ArrayTree, mask: jax.Array
) -> chex.ArrayTree:
    """Every row goes to the next slot of its lane, if it is not masked."""
    num_slots = jax.tree.leaves(experience)[0].shape[0]
    count = jnp.cumsum(mask, axis=0, dtype=jnp.int32)
    # Of more rows than slots the last ones stay: no slot is written twice.
    stays = mask & (count > count[-1:] - num_slots)
    slot = jnp.where(stays, (head[None] + count - 1) % num_slots, num_slots)
    lane = jnp.broadcast_to(jnp.arange(mask.shape[1])[None], mask.shape)
    return jax.tree.map(
        lambda ring, rows: ring.at[slot, lane].set(rows, mode="drop"), experience, chunk
    )


def draw(
    state: RingState, key: chex.PRNGKey, num_draws: int
) -> tuple[jax.Array, jax.Array]:
    """Draws rows evenly: `[S]` int32 slots and lanes."""
    num_slots = jax.tree.leaves(state.experience)[0].shape[0]
    num_envs = state.size.shape[0]
    number = below(jnp.sum(state.size), (num_draws,), key)
    lane, age = lax.cond(
        jnp.all(state.size == state.size[0]),
        lambda: (number % num_envs, number // num_envs),
        lambda: _find(state.size, number),
    )
    return (state.head[lane] - 1 - age) % num_slots, lane


def below(n: jax.Array, shape: tuple[int, ...], key: chex.PRNGKey) -> jax.Array:
    """Draws int32 numbers evenly from 0 to `n - 1`, `()` int32; 0 if `n` is 0.

    From one word each, the high half of the product word * n: `jax.random.randint`
    draws two and divides. The bias of a number is below n / 2**32, as there.
    """
    word, n = jax.random.bits(key, shape, jnp.uint32), n.astype(jnp.uint32)
    half, low = jnp.uint32(16), jnp.uint32(0xFFFF)
    lows = (word & low) * (n & low)
    middle = (word >> half) * (n & low) + (lows >> half)
    other = (word & low) * (n >> half) + (middle & low)
    high = (word >> half) * (n >> half) + (middle >> half) + (other >> half)
    return high.astype(jnp.int32)


def read(state: RingState, slot: jax.Array, lane: jax.Array) -> chex.ArrayTree:
    """Reads rows, `[S, ...]`."""
    row = slot * state.size.shape[0] + lane
    return jax.tree.map(
        lambda ring: ring.reshape(-1, *ring.shape[2:])[row], state.experience
    )


def _find(size: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lane and age of the rows `number`, counted lane after lane."""
    end = jnp.cumsum(size)
    lane = jnp.searchsorted(end, number, side="right", method="scan_unrolled")
    lane = jnp.minimum(lane, end.shape[0] - 1).astype(jnp.int32)
    return lane, end[lane] - 1 - number
