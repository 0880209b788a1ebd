"""Writes rows into a ring per lane, in place.

Lanes that have always received the same number of rows are at the same slot, and a
chunk is one contiguous write. Once a mask has let them drift apart, each row goes to
the slot of its own lane. Which case holds is known only at run time, and a conditional
would copy the ring, so two loops, of zero or one round, write in place. On a GPU every
row always goes to the slot of its own lane: no loop, no wait.
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
    """Makes an empty ring for rows like `transition`, `[B, ...]`.

    Args:
        transition: `[B, ...]`, shapes and dtypes of one step.
        num_envs: B, lanes.
        num_slots: N, rows that a lane can hold.
        final_obs_capacity: F, final observations to keep; 0 if every row keeps its own
            successor.
    """
    if not jax.tree.leaves(transition):
        raise ValueError("`transition` must have at least one array, got none.")
    checks.leading_axes("`transition` must have arrays", transition, (num_envs,))
    for name in fields.FLAGS:
        flag = fields.get(transition, name)
        if flag is not None and flag.dtype != bool:
            raise ValueError(f"`{name}` must be bool, got {flag.dtype}.")
    kept, last = fields.replace(transition, mask=()), ()
    if final_obs_capacity:
        needed = ("obs", "next_obs", *fields.FLAGS)
        obs, next_obs = fields.need(kept, needed, 'next_obs="shared"')[:2]
        chex.assert_trees_all_equal_shapes_and_dtypes(obs, next_obs)
        kept = fields.replace(kept, next_obs=())
        last = final_obs.init(next_obs, final_obs_capacity, num_slots, num_envs)
    return RingState(
        experience=jax.tree.map(
            lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), kept
        ),
        head=jnp.zeros((num_envs,), jnp.int32),
        size=jnp.zeros((num_envs,), jnp.int32),
        final_obs=last,
    )


def check_rows(
    ring: RingState, trajectory: ArrayTree, mask: ArrayTree
) -> tuple[ArrayTree, jax.Array]:
    """Checks rows to add, `[T, B, ...]` or one step `[B, ...]`, and their mask.

    `mask` is None if all rows count.

    Returns:
        The rows without a field `mask`, `[T, B, ...]`, and their mask, `[T, B]` bool.
    """
    kept, rows = ring.experience, fields.replace(trajectory, mask=())
    if ring.final_obs:  # rows come with `next_obs`, which the ring does not keep
        kept = fields.replace(kept, next_obs=fields.get(kept, "obs"))
    first: Any = next(iter(jax.tree.leaves(rows)), None)
    is_step = np.ndim(first) == jax.tree.leaves(kept)[0].ndim - 1
    length = () if is_step else np.shape(first)[:1]
    if length == (0,):
        raise ValueError("`trajectory` must have at least one row, got none.")
    expected = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*length, *x.shape[1:]), x.dtype), kept
    )
    checks.same("`trajectory` must be like the rows of `init`", expected, rows)
    shape = (*length, ring.num_envs)
    mask = jnp.ones(shape, bool) if mask is None else mask
    checks.shaped("`mask` must be", mask, shape, bool)
    if is_step:
        return jax.tree.map(lambda x: x[None], (rows, mask))
    return rows, mask


def write(
    ring: RingState, chunk: ArrayTree, mask: jax.Array
) -> tuple[RingState, jax.Array]:
    """Appends the rows of `chunk`, `[T, B, ...]`, where `mask`, `[T, B]` bool.

    Returns:
        The ring, and `[T, B]` int32, the slots of the written rows; N for rows that
        are not written.
    """
    num_slots = ring.num_slots
    number = jnp.cumsum(mask, axis=0, dtype=jnp.int32)  # from 1 on, in each lane
    # If there are more rows than slots, the last rows stay: no slot is written twice.
    stays = mask & (number > number[-1:] - num_slots)
    slot = jnp.where(stays, (ring.head[None] + number - 1) % num_slots, num_slots)
    ring = write_slots(ring, chunk, slot)
    head, size = (ring.head + number[-1]) % num_slots, ring.size + number[-1]
    return ring.replace(head=head, size=jnp.minimum(size, num_slots)), slot


def write_slots(ring: RingState, chunk: ArrayTree, slot: jax.Array) -> RingState:
    """Writes the rows of `chunk`, `[T, B, ...]`, to `slot`, `[T, B]` int32.

    Slots of a lane follow each other. A row with slot N is not written.
    """
    kept, rows = ring.experience, chunk
    if not ring.final_obs:
        kept = _put(kept, slot, rows)
        return ring.replace(experience=kept)
    next_obs, done = fields.get(chunk, "next_obs"), fields.done(chunk)
    final, place = final_obs.write(ring.final_obs, next_obs, done, slot)
    # The place of its final observation is written along with the row.
    kept, rows = (kept, final.place), (fields.replace(chunk, next_obs=()), place)
    kept, place = _put(kept, slot, rows)
    return ring.replace(experience=kept, final_obs=final.replace(place=place))


def _put(memory: ArrayTree, slot: jax.Array, rows: ArrayTree) -> ArrayTree:
    """Puts `rows`, `[T, B, ...]`, into the slots, `[T, B]`, of `memory`, in place."""
    num_slots = jax.tree.leaves(memory)[0].shape[0]

    def put_in_loops(memory: ArrayTree, slot: jax.Array, rows: ArrayTree) -> ArrayTree:
        fits = slot.shape[0] <= num_slots
        together = fits & jnp.all((slot == slot[:, :1]) & (slot < num_slots))
        if fits:
            memory = platform.write_if(together, _put_together, memory, slot, rows)
        return platform.write_if(~together, _put_apart, memory, slot, rows)

    return platform.choose(put_in_loops, _put_apart, memory, slot, rows)


def _put_together(memory: ArrayTree, slot: jax.Array, rows: ArrayTree) -> ArrayTree:
    """Writes all rows of every lane, from the slot of lane 0 on."""
    num_rows, start = slot.shape[0], slot[0, 0]
    number = jnp.arange(num_rows)

    def put_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        if num_rows == 1:
            return lax.dynamic_update_slice_in_dim(old, new, start, 0)
        # Slots that wrap take two writes of `num_rows` slots, each of which changes
        # none that the other one writes. A slice must fit: so the first is moved back
        # by the slots that wrap, and leaves as many at its beginning unchanged; the
        # second, from slot 0, writes only those that wrap.
        first = jnp.minimum(start, old.shape[0] - num_rows)
        wrapped = start - first  # 0 unless it wraps
        # Rolled by these, the rows fit both: those that wrap come first.
        rolled = jnp.roll(new, wrapped, axis=0)
        for at, keep in ((first, number >= wrapped), (0, number < wrapped)):
            there = lax.dynamic_slice_in_dim(old, at, num_rows, 0)
            there = trees.select(keep, rolled, there)
            old = lax.dynamic_update_slice_in_dim(old, there, at, 0)
        return old

    return jax.tree.map(put_leaf, memory, rows)


def _put_apart(memory: ArrayTree, slot: jax.Array, rows: ArrayTree) -> ArrayTree:
    """Writes every row to the slot of its own lane."""
    num_slots = jax.tree.leaves(memory)[0].shape[0]
    time, lane = jnp.indices(slot.shape, dtype=jnp.int32)
    # Rows that are not written get distinct slots, too: `unique_indices` promises it.
    slot = jnp.where(slot < num_slots, slot, num_slots + time)

    def put_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[slot, lane].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(put_leaf, memory, rows)
