"""Writes rows into a ring per lane, in place.

Lanes that have always received the same number of rows are at the same slot, and a
chunk is one contiguous write. Once a mask has let them drift apart, each row goes to
the slot of its own lane. Which case holds is known only at run time, and a conditional
would copy the ring, so two loops, of zero or one round, write in place. On a GPU every
row always goes to the slot of its own lane: no loop, no wait.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rollout import platform
from rollout.buffers import fields, final_obs
from rollout.buffers.types import ArrayTree, RingState


def init(row: ArrayTree, num_slots: int, final_obs_capacity: int) -> RingState:
    """Makes an empty ring for rows like `row`, `[B, ...]`.

    Args:
        row: `[B, ...]`, shapes and dtypes of one step.
        num_slots: N, rows that a lane can hold.
        final_obs_capacity: F, final observations to keep; 0 if every row keeps its own
            successor.
    """
    num_envs = jax.tree.leaves(row)[0].shape[0]
    kept, last = row, ()
    if final_obs_capacity:
        kept, next_obs = fields.replace(row, next_obs=()), fields.get(row, "next_obs")
        last = final_obs.init(next_obs, final_obs_capacity, num_slots, num_envs)
    return RingState(
        experience=jax.tree.map(
            lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), kept
        ),
        head=jnp.zeros((num_envs,), jnp.int32),
        size=jnp.zeros((num_envs,), jnp.int32),
        final_obs=last,
    )


def write(
    ring: RingState, chunk: ArrayTree, mask: jax.Array
) -> tuple[RingState, jax.Array]:
    """Appends the rows of `chunk`, `[T, B, ...]`, where `mask`, `[T, B]` bool.

    Returns:
        The ring, and `[T, B]` int32, the slots of the written rows; N for rows that
        are not written.
    """
    num_slots = ring.num_slots
    slot = _slots(ring.head, mask, num_slots)
    ring = write_slots(ring, chunk, slot)
    count = jnp.sum(mask, axis=0, dtype=jnp.int32)
    head, size = (ring.head + count) % num_slots, ring.size + count
    return ring.replace(head=head, size=jnp.minimum(size, num_slots)), slot


def clear(ring: RingState) -> RingState:
    """Forgets all rows; the memory stays."""
    empty = (ring.head, ring.size, ring.lost)
    head, size, lost = jax.tree.map(jnp.zeros_like, empty)
    return ring.replace(head=head, size=size, lost=lost)


def write_slots(ring: RingState, chunk: ArrayTree, slot: jax.Array) -> RingState:
    """Writes the rows of `chunk`, `[T, B, ...]`, to `slot`, `[T, B]` int32.

    Slots of a lane follow each other. A row with slot N is not written.
    """
    if ring.final_obs:
        next_obs, done = fields.get(chunk, "next_obs"), fields.done(chunk)
        final, place = final_obs.write(ring.final_obs, next_obs, done, slot)
        # The place of its final observation is written along with the row.
        kept = (ring.experience, final.place)
        rows = (fields.replace(chunk, next_obs=()), place)
        experience, place = _put(kept, rows, slot)
        return ring.replace(experience=experience, final_obs=final.replace(place=place))
    return ring.replace(experience=_put(ring.experience, chunk, slot))


def windows(
    start: jax.Array, length: int, num_slots: int
) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the pieces of a ring that hold the `length` slots from `start` on.

    Slots that wrap take two writes: each covers `length` slots, and changes none that
    the other one writes.

    Returns:
        For each piece, `()` int32, its start, and `[length]` bool, the slots to write.
    """
    number = jnp.arange(length)
    if length == 1:
        return [(start, number == 0)]
    # A slice has a static length and must fit. So the first is moved back by the slots
    # that wrap, and leaves as many at its beginning unchanged; the second, from slot 0,
    # writes only those that wrap.
    first = jnp.minimum(start, num_slots - length)
    wrapped = start - first  # 0 unless it wraps
    return [(first, number >= wrapped), (jnp.zeros_like(first), number < wrapped)]


def is_together(slot: jax.Array, num_slots: int) -> jax.Array:
    """Returns `()` bool: all rows are written, every lane to the same slots."""
    if slot.shape[0] > num_slots:
        return jnp.zeros((), bool)
    return jnp.all((slot == slot[:, :1]) & (slot < num_slots))


def _slots(head: jax.Array, mask: jax.Array, num_slots: int) -> jax.Array:
    """Returns the slot of every row of a chunk, `[T, B]`; N for none."""
    count = jnp.cumsum(mask, axis=0, dtype=jnp.int32)
    # If there are more rows than slots, the last rows stay: no slot is written twice.
    stays = mask & (count > count[-1:] - num_slots)
    return jnp.where(stays, (head[None] + count - 1) % num_slots, num_slots)


def _put(memory: ArrayTree, rows: ArrayTree, slot: jax.Array) -> ArrayTree:
    """Writes `rows`, `[T, B, ...]`, into `memory`, `[N, B, ...]`, in place."""
    return platform.choose(_put_in_loops, _put_apart, memory, rows, slot)


def _put_in_loops(memory: ArrayTree, rows: ArrayTree, slot: jax.Array) -> ArrayTree:
    """Writes all lanes at once where they are at the same slot."""
    num_slots = jax.tree.leaves(memory)[0].shape[0]
    together = is_together(slot, num_slots)
    if slot.shape[0] <= num_slots:
        memory = platform.write_if(together, _put_together, memory, rows, slot)
    return platform.write_if(~together, _put_apart, memory, rows, slot)


def _put_together(memory: ArrayTree, rows: ArrayTree, slot: jax.Array) -> ArrayTree:
    """Writes all rows of every lane, from the slot of lane 0 on."""
    num_rows, start = slot.shape[0], slot[0, 0]

    def put_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        if num_rows == 1:
            return lax.dynamic_update_slice_in_dim(old, new, start, 0)
        pieces = windows(start, num_rows, old.shape[0])
        # Rolled by the slots that wrap, the rows fit both pieces: those that wrap come
        # first, where the second piece writes, and the others where the first does.
        rolled = jnp.roll(new, start - pieces[0][0], axis=0)
        for first, keep in pieces:
            there = lax.dynamic_slice_in_dim(old, first, num_rows, 0)
            keep = keep.reshape(-1, *(1,) * (old.ndim - 1))
            there = jnp.where(keep, rolled, there)
            old = lax.dynamic_update_slice_in_dim(old, there, first, 0)
        return old

    return jax.tree.map(put_leaf, memory, rows)


def _put_apart(memory: ArrayTree, rows: ArrayTree, slot: jax.Array) -> ArrayTree:
    """Writes every row to the slot of its own lane."""
    num_slots = jax.tree.leaves(memory)[0].shape[0]
    time, lane = jnp.indices(slot.shape, dtype=jnp.int32)
    # Rows that are not written get distinct slots, too: `unique_indices` promises it.
    slot = jnp.where(slot < num_slots, slot, num_slots + time)

    def put_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[slot, lane].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(put_leaf, memory, rows)
