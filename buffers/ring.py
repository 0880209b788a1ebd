"""Writes rows into a ring per lane, in place.

While all lanes have received the same number of rows, their heads are equal and a chunk
is one contiguous write. After a mask has made the lanes diverge, the rows of each lane
are scattered from the head of that lane. The case is known only at run time, and
`lax.cond` would copy the ring, so two loops of zero or one iteration write in place. On
a GPU all rows are always scattered: this needs no loop and no synchronization.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout import checks, platform
from rollout.buffers import fields, final_obs
from rollout.buffers.types import RingState
from rollout.envs import trees
from rollout.envs.types import ArrayTree


def init(
    transition: ArrayTree, num_envs: int, num_slots: int, final_obs_capacity: int
) -> RingState:
    """Initializes an empty ring for rows like `transition`, `[B, ...]`.

    Args:
        transition: `[B, ...]`, shapes and dtypes of one step.
        num_envs: B, number of lanes.
        num_slots: N, capacity of a lane in rows.
        final_obs_capacity: F, capacity of the side ring in final observations; 0 if
            every row stores its successor.
    """
    if not jax.tree.leaves(transition):
        raise ValueError("`transition` must have at least one array, got none.")
    checks.leading_axes("`transition` must have arrays", transition, (num_envs,))
    for name in fields.FLAGS:
        flag = fields.get(transition, name)
        if flag is not None and flag.dtype != bool:
            raise ValueError(f"`{name}` must be bool, got {flag.dtype}.")
    stored, side_ring = fields.replace(transition, mask=()), ()
    if final_obs_capacity:
        needed = ("obs", "next_obs", *fields.FLAGS)
        obs, next_obs = fields.need(stored, needed, 'next_obs="shared"')[:2]
        chex.assert_trees_all_equal_shapes_and_dtypes(obs, next_obs)
        stored = fields.replace(stored, next_obs=())
        side_ring = final_obs.init(next_obs, final_obs_capacity, num_slots, num_envs)
    return RingState(
        experience=jax.tree.map(
            lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), stored
        ),
        head=jnp.zeros((num_envs,), jnp.int32),
        size=jnp.zeros((num_envs,), jnp.int32),
        final_obs=side_ring,
    )


def check_rows(
    ring: RingState, trajectory: ArrayTree, mask: ArrayTree
) -> tuple[ArrayTree, jax.Array]:
    """Validates the arguments of `add`: rows `[T, B, ...]` or one step `[B, ...]`.

    `mask` is None if all rows are valid.

    Returns:
        The rows `[T, B, ...]` without their field `mask`, and the mask `[T, B]` bool.
    """
    stored, rows = ring.experience, fields.replace(trajectory, mask=())
    if ring.final_obs:  # new rows have `next_obs`, but the ring does not store it
        stored = fields.replace(stored, next_obs=fields.get(stored, "obs"))
    first: Any = next(iter(jax.tree.leaves(rows)), None)
    is_step = np.ndim(first) == jax.tree.leaves(stored)[0].ndim - 1
    length = () if is_step else np.shape(first)[:1]
    if length == (0,):
        raise ValueError("`trajectory` must have at least one row, got none.")
    expected = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*length, *x.shape[1:]), x.dtype), stored
    )
    checks.same("`trajectory` must match the transition of `init`", expected, rows)
    shape = (*length, ring.num_envs)
    mask = jnp.ones(shape, bool) if mask is None else mask
    checks.shaped("`mask` must be", mask, shape, bool)
    if is_step:
        return jax.tree.map(lambda x: x[None], (rows, mask))
    return rows, mask


def write(
    ring: RingState, chunk: ArrayTree, mask: jax.Array
) -> tuple[RingState, jax.Array]:
    """Appends the rows of `chunk`, `[T, B, ...]`, where `mask` `[T, B]` is True.

    Returns:
        The ring after the write, and the slot of each row, `[T, B]` int32; N for
        unwritten rows.
    """
    num_slots = ring.num_slots
    number = jnp.cumsum(mask, axis=0, dtype=jnp.int32)  # from 1, per lane
    # If the rows exceed the slots, write only the last rows: no slot repeats.
    is_kept = mask & (number > number[-1:] - num_slots)
    slot = jnp.where(is_kept, (ring.head[None] + number - 1) % num_slots, num_slots)
    ring = write_slots(ring, chunk, slot)
    head, size = (ring.head + number[-1]) % num_slots, ring.size + number[-1]
    return ring.replace(head=head, size=jnp.minimum(size, num_slots)), slot


def write_slots(ring: RingState, chunk: ArrayTree, slot: jax.Array) -> RingState:
    """Writes the rows of `chunk`, `[T, B, ...]`, to `slot`, `[T, B]` int32.

    The slots of a lane must be consecutive. A row with slot N is not written.
    """
    stored, rows = ring.experience, chunk
    if not ring.final_obs:
        stored = _put(stored, slot, rows)
        return ring.replace(experience=stored)
    next_obs, done = fields.get(chunk, "next_obs"), fields.done(chunk)
    final, index = final_obs.write(ring.final_obs, next_obs, done, slot)
    # Write each row together with the index of its final observation.
    stored, rows = (stored, final.place), (fields.replace(chunk, next_obs=()), index)
    stored, index = _put(stored, slot, rows)
    return ring.replace(experience=stored, final_obs=final.replace(place=index))


def _put(memory: ArrayTree, slot: jax.Array, rows: ArrayTree) -> ArrayTree:
    """Writes `rows`, `[T, B, ...]`, to the slots `[T, B]` of `memory`, in place."""
    num_slots = jax.tree.leaves(memory)[0].shape[0]

    def put_in_loops(memory: ArrayTree, slot: jax.Array, rows: ArrayTree) -> ArrayTree:
        fits = slot.shape[0] <= num_slots
        contiguous = fits & jnp.all((slot == slot[:, :1]) & (slot < num_slots))
        if fits:
            memory = platform.write_if(contiguous, _put_together, memory, slot, rows)
        return platform.write_if(~contiguous, _put_apart, memory, slot, rows)

    return platform.choose(put_in_loops, _put_apart, memory, slot, rows)


def _put_together(memory: ArrayTree, slot: jax.Array, rows: ArrayTree) -> ArrayTree:
    """Writes the rows of all lanes contiguously, from the first slot of lane 0."""
    num_rows, start = slot.shape[0], slot[0, 0]
    number = jnp.arange(num_rows)

    def put_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        if num_rows == 1:
            return lax.dynamic_update_slice_in_dim(old, new, start, 0)
        # A chunk that wraps around the ring takes two masked writes of `num_rows` rows.
        # The first write ends at the last slot, so it starts `wrapped` slots early and
        # leaves its first `wrapped` slots unchanged. The second write starts at slot 0
        # and changes only its first `wrapped` slots.
        first = jnp.minimum(start, old.shape[0] - num_rows)
        wrapped = start - first  # 0 unless the chunk wraps
        # Rolling moves the wrapped rows to the front, which aligns both writes.
        rolled = jnp.roll(new, wrapped, axis=0)
        for offset, mask in ((first, number >= wrapped), (0, number < wrapped)):
            rows = lax.dynamic_slice_in_dim(old, offset, num_rows, 0)
            rows = trees.select(mask, rolled, rows)
            old = lax.dynamic_update_slice_in_dim(old, rows, offset, 0)
        return old

    return jax.tree.map(put_leaf, memory, rows)


def _put_apart(memory: ArrayTree, slot: jax.Array, rows: ArrayTree) -> ArrayTree:
    """Scatters all rows to their slots."""
    num_slots = jax.tree.leaves(memory)[0].shape[0]
    time, lane = jnp.indices(slot.shape, dtype=jnp.int32)
    # `unique_indices` requires distinct slots, also for unwritten rows.
    slot = jnp.where(slot < num_slots, slot, num_slots + time)

    def put_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[slot, lane].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(put_leaf, memory, rows)
