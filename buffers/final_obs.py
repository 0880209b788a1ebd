"""Keeps final observations in a side ring, for `next_obs="shared"`.

Within an episode the successor of a row is the observation of the next row. Where an
episode ends, the next row belongs to another one, and the successor is kept here.
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
    """Makes an empty ring for observations like `obs`, `[B, ...]`."""
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
    """Keeps `next_obs`, `[T, B, ...]`, of written rows where `done`.

    Args:
        final_obs: the ring before.
        next_obs: `[T, B, ...]`, the true successors.
        done: `[T, B]` bool.
        slot: `[T, B]` int32, slots of the written rows; N for rows that are not
            written.

    Returns:
        The ring after, and `[T, B]` int32, the entries of `place` for the rows.
    """
    num_slots, num_envs = final_obs.place.shape
    capacity = final_obs.row.shape[0]
    is_final = (done & (slot < num_slots)).reshape(-1)
    # Numbers from 1 on, in the order of time.
    number = jnp.cumsum(is_final, dtype=jnp.int32)
    total = number[-1]
    # If there are more of them than places, the last ones stay: none is written twice.
    stays = is_final & (number > total - capacity)
    place = jnp.where(stays, (final_obs.head + number - 1) % capacity, -1)
    row = (slot * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]).reshape(-1)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), next_obs), row
    # The rows that stay are numbered from 0 on, the oldest first.
    order = jnp.where(stays, number - 1 - jnp.maximum(total - capacity, 0), -1)
    memory = final_obs.obs, final_obs.row
    obs, owner = platform.choose(
        _write_in_rounds, _write_apart, memory, rows, order, place
    )
    head = (final_obs.head + total) % capacity
    written = final_obs.replace(obs=obs, row=owner, head=head)
    return written, place.reshape(slot.shape)


def _write_in_rounds(
    memory: ArrayTree, rows: ArrayTree, order: jax.Array, place: jax.Array
) -> ArrayTree:
    """Writes rows to their `place`, in their `order`; `[T * B]` int32, -1: none.

    It writes a few rows per round, since few rows are final.
    """
    num_rows = order.shape[0]
    capacity = jax.tree.leaves(memory)[0].shape[0]
    # Large enough that one round nearly always suffices, small enough to cost little.
    size = max(1, num_rows // 16)
    most = -(-min(num_rows, capacity) // size) * size
    # The inverse of `order`: the rows to write, padded by a row that does not exist.
    source = jnp.full((most,), num_rows, jnp.int32)
    source = source.at[jnp.where(order >= 0, order, most)].set(
        jnp.arange(num_rows, dtype=jnp.int32), mode="drop"
    )

    def write_some(loop: tuple[jax.Array, ArrayTree]) -> tuple[jax.Array, ArrayTree]:
        start, memory = loop
        some = lax.dynamic_slice_in_dim(source, start, size)
        target = jnp.where(some < num_rows, place.at[some].get(mode="clip"), capacity)
        return start + size, jax.tree.map(
            lambda old, new: old.at[target].set(
                new.at[some].get(mode="clip"), mode="drop"
            ),
            memory,
            rows,
        )

    count = jnp.max(order) + 1
    start = jnp.int32(0), memory
    return lax.while_loop(lambda loop: loop[0] < count, write_some, start)[1]


def _write_apart(
    memory: ArrayTree, rows: ArrayTree, order: jax.Array, place: jax.Array
) -> ArrayTree:
    """Writes every row on its own."""
    del order  # unused
    capacity = jax.tree.leaves(memory)[0].shape[0]
    # No number twice, not even beyond the memory: `unique_indices` promises it.
    beyond = capacity + jnp.arange(place.shape[0], dtype=jnp.int32)
    target = jnp.where(place >= 0, place, beyond)

    def put_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[target].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(put_leaf, memory, rows)
