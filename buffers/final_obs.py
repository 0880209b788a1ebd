"""Stores final observations in a side ring, for `next_obs="shared"`.

Within an episode, the successor of a row is the observation of the next row. At the end
of an episode, the next row belongs to another episode, so the side ring stores the
successor.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rollout import platform
from rollout.buffers.types import FinalObs
from rollout.envs.types import ArrayTree


def init(
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


def write(
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
    # If they exceed the capacity, only the last ones are written: no index repeats.
    is_kept = is_final & (number > total - capacity)
    index = jnp.where(is_kept, (final_obs.head + number - 1) % capacity, -1)
    row = (slot * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]).reshape(-1)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), next_obs), row
    # The rows to write are numbered from 0, oldest first.
    order = jnp.where(is_kept, number - 1 - jnp.maximum(total - capacity, 0), -1)
    memory = final_obs.obs, final_obs.row
    obs, final_row = platform.choose(
        _write_in_rounds, _write_apart, memory, rows, order, index
    )
    head = (final_obs.head + total) % capacity
    written = final_obs.replace(obs=obs, row=final_row, head=head)
    return written, index.reshape(slot.shape)


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

    def write_some(loop: tuple[jax.Array, ArrayTree]) -> tuple[jax.Array, ArrayTree]:
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
    return lax.while_loop(lambda loop: loop[0] < count, write_some, start)[1]


def _write_apart(
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
