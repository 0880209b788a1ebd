"""Writes rows into a ring per lane, in place.

While all lanes have received the same number of rows, their heads are equal and a chunk
is one contiguous write. After a mask has made the lanes diverge, the rows of each lane
are scattered from the head of that lane. The case is known only at run time, and
`lax.cond` would copy the ring, so two loops of zero or one iteration write in place. On
a GPU all rows are always scattered: this needs no loop and no synchronization.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout.base import checks, platform, trees
from rollout.buffers import neighbours
from rollout.buffers.types import FinalObs, RingState
from rollout.envs.types import ArrayTree


def init_final_obs(
    obs: ArrayTree, final_obs_capacity: int, num_slots: int, num_envs: int
) -> FinalObs:
    """Initializes an empty side ring for observations like `obs`, `[B, ...]`."""
    return FinalObs(
        obs=jax.tree.map(
            lambda x: jnp.zeros((final_obs_capacity, *x.shape[1:]), x.dtype), obs
        ),
        row=jnp.full((final_obs_capacity,), -1, jnp.int32),
        place=jnp.full((num_slots, num_envs), -1, jnp.int32),
        head=jnp.zeros((), jnp.int32),
    )


def write_final_obs(
    final_obs: FinalObs, next_obs: ArrayTree, done: jax.Array, slot: jax.Array
) -> tuple[FinalObs, jax.Array]:
    """Stores the successors of written rows that end an episode.

    Args:
        final_obs: side ring before the write.
        next_obs: `[T, B, ...]`, true successors.
        done: `[T, B]` bool, True if the row ends an episode.
        slot: `[T, B]` int32, slot of each row; N if the row is not written.

    Returns:
        The side ring after the write, and the values of `FinalObs.place` for the rows,
        `[T, B]` int32.
    """
    num_slots, num_envs = final_obs.place.shape
    capacity = final_obs.row.shape[0]
    is_final = (done & (slot < num_slots)).reshape(-1)
    # Final observations are numbered from 1 in time order.
    number = jnp.cumsum(is_final, dtype=jnp.int32)
    total = number[-1]
    # If they exceed the capacity, write only the last ones: no index repeats.
    is_kept = is_final & (number > total - capacity)
    index = jnp.where(is_kept, (final_obs.head + number - 1) % capacity, -1)
    row = (slot * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]).reshape(-1)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), next_obs), row
    # The rows to write are numbered from 0, oldest first.
    order = jnp.where(is_kept, number - 1 - jnp.maximum(total - capacity, 0), -1)
    memory = final_obs.obs, final_obs.row
    obs, final_row = platform.choose(
        _write_in_rounds, _write_scattered, memory, rows, order, index
    )
    head = (final_obs.head + total) % capacity
    new_final_obs = final_obs.replace(obs=obs, row=final_row, head=head)
    return new_final_obs, index.reshape(slot.shape)


def _write_in_rounds(
    memory: ArrayTree, rows: ArrayTree, order: jax.Array, index: jax.Array
) -> ArrayTree:
    """Writes rows to `index` in the given `order`, a few rows per round.

    Few rows are final, so one round usually suffices. `order` and `index` are `[T * B]`
    int32, -1 for unwritten rows.
    """
    num_rows = order.shape[0]
    capacity = jax.tree.leaves(memory)[0].shape[0]
    # One round of this many rows nearly always suffices, and it is cheap.
    chunk_size = max(1, num_rows // 16)
    padded_size = -(-min(num_rows, capacity) // chunk_size) * chunk_size
    # `source` inverts `order`. It is padded with the invalid row number `num_rows`.
    source = jnp.full((padded_size,), num_rows, jnp.int32)
    source = source.at[jnp.where(order >= 0, order, padded_size)].set(
        jnp.arange(num_rows, dtype=jnp.int32), mode="drop"
    )

    def write_chunk(loop: tuple[jax.Array, ArrayTree]) -> tuple[jax.Array, ArrayTree]:
        start, memory = loop
        row = lax.dynamic_slice_in_dim(source, start, chunk_size)
        target = jnp.where(row < num_rows, index.at[row].get(mode="clip"), capacity)
        return start + chunk_size, jax.tree.map(
            lambda old, new: old.at[target].set(
                new.at[row].get(mode="clip"), mode="drop"
            ),
            memory,
            rows,
        )

    count = jnp.max(order) + 1
    start = jnp.int32(0), memory
    return lax.while_loop(lambda loop: loop[0] < count, write_chunk, start)[1]


def _write_scattered(
    memory: ArrayTree, rows: ArrayTree, order: jax.Array, index: jax.Array
) -> ArrayTree:
    """Writes all rows with one scatter."""
    del order  # unused
    capacity = jax.tree.leaves(memory)[0].shape[0]
    # `unique_indices` requires distinct indices, also for unwritten rows.
    out_of_bounds = capacity + jnp.arange(index.shape[0], dtype=jnp.int32)
    target = jnp.where(index >= 0, index, out_of_bounds)

    def put_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[target].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(put_leaf, memory, rows)


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
    checks.check_leading_axes("`transition` must have arrays", transition, (num_envs,))
    for name in neighbours.FLAGS:
        flag = neighbours.get_field(transition, name)
        if flag is not None and flag.dtype != bool:
            raise ValueError(f"`{name}` must be bool, got {flag.dtype}.")
    experience, side_ring = neighbours.replace_fields(transition, mask=()), ()
    if final_obs_capacity:
        names = ("obs", "next_obs", *neighbours.FLAGS)
        obs, next_obs = neighbours.require_fields(
            experience, names, 'next_obs="shared"'
        )[:2]
        message = '`next_obs` must be like `obs` with next_obs="shared"'
        checks.check_same_types(message, obs, next_obs)
        experience = neighbours.replace_fields(experience, next_obs=())
        side_ring = init_final_obs(next_obs, final_obs_capacity, num_slots, num_envs)
    return RingState(
        experience=jax.tree.map(
            lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), experience
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
    experience, rows = ring.experience, neighbours.replace_fields(trajectory, mask=())
    if ring.final_obs:  # new rows have `next_obs`, but the ring does not store it
        experience = neighbours.replace_fields(
            experience, next_obs=neighbours.get_field(experience, "obs")
        )
    first: Any = next(iter(jax.tree.leaves(rows)), None)
    is_step = np.ndim(first) == jax.tree.leaves(experience)[0].ndim - 1
    length = () if is_step else np.shape(first)[:1]
    if length == (0,):
        raise ValueError("`trajectory` must have at least one row, got none.")
    expected = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*length, *x.shape[1:]), x.dtype), experience
    )
    checks.check_same_types(
        "`trajectory` must match the transition of `init`", expected, rows
    )
    shape = (*length, ring.num_envs)
    mask = jnp.ones(shape, bool) if mask is None else mask
    checks.check_shape("`mask` must be", mask, shape, bool)
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
    experience, rows = ring.experience, chunk
    if not ring.final_obs:
        experience = _put(experience, slot, rows)
        return ring.replace(experience=experience)
    next_obs, done = neighbours.get_field(chunk, "next_obs"), neighbours.done_of(chunk)
    final, index = write_final_obs(ring.final_obs, next_obs, done, slot)
    # Write each row together with the index of its final observation.
    experience, rows = (
        (experience, final.place),
        (neighbours.replace_fields(chunk, next_obs=()), index),
    )
    experience, index = _put(experience, slot, rows)
    return ring.replace(experience=experience, final_obs=final.replace(place=index))


def _put(memory: ArrayTree, slot: jax.Array, rows: ArrayTree) -> ArrayTree:
    """Writes `rows`, `[T, B, ...]`, to the slots `[T, B]` of `memory`, in place."""
    num_slots = jax.tree.leaves(memory)[0].shape[0]

    def put_in_loops(memory: ArrayTree, slot: jax.Array, rows: ArrayTree) -> ArrayTree:
        fits = slot.shape[0] <= num_slots
        contiguous = fits & jnp.all((slot == slot[:, :1]) & (slot < num_slots))
        if fits:
            memory = platform.write_if(contiguous, _put_contiguous, memory, slot, rows)
        return platform.write_if(~contiguous, _scatter_rows, memory, slot, rows)

    return platform.choose(put_in_loops, _scatter_rows, memory, slot, rows)


def _put_contiguous(memory: ArrayTree, slot: jax.Array, rows: ArrayTree) -> ArrayTree:
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


def _scatter_rows(memory: ArrayTree, slot: jax.Array, rows: ArrayTree) -> ArrayTree:
    """Scatters all rows to their slots."""
    num_slots = jax.tree.leaves(memory)[0].shape[0]
    time, lane = jnp.indices(slot.shape, dtype=jnp.int32)
    # `unique_indices` requires distinct slots, also for unwritten rows.
    slot = jnp.where(slot < num_slots, slot, num_slots + time)

    def put_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[slot, lane].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(put_leaf, memory, rows)
