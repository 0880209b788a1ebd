"""Follows episodes from row to row: next, previous, first and following rows.

A row is identified by its number: slot n of lane i is row `n * B + i`. All functions
accept rows of any shape. Two adjacent rows of a lane are consecutive steps of an
episode if the first row has no flag set and the recorded `episode_id` and
`episode_length` continue. An interrupted episode and an episode with missing rows
therefore also end at the gap.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rollout.base import trees
from rollout.buffers.types import RingState
from rollout.envs.types import ArrayTree

FLAGS = ("terminated", "truncated")


def get_field(tree: ArrayTree, name: str) -> ArrayTree | None:
    """Returns the field `name` of `tree`, or None if it is not recorded."""
    value = tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)
    return None if isinstance(value, tuple) and not value else value


def replace_fields(tree: ArrayTree, **values: ArrayTree) -> ArrayTree:
    """Returns `tree` with fields replaced; ignores fields that `tree` lacks."""
    if isinstance(tree, Mapping):
        mapping_type: Any = type(tree)
        return mapping_type({**tree, **{k: values[k] for k in values if k in tree}})
    values = {name: values[name] for name in values if hasattr(tree, name)}
    if not values:
        return tree
    if isinstance(tree, tuple):
        named_tuple: Any = tree
        return named_tuple._replace(**values)
    return dataclasses.replace(tree, **values)


def done_of(tree: ArrayTree) -> jax.Array:
    """Returns `terminated | truncated`, bool."""
    terminated, truncated = require_fields(tree, FLAGS, "The buffer")
    return terminated | truncated


def require_fields(
    tree: ArrayTree, names: tuple[str, ...], caller: str
) -> tuple[Any, ...]:
    """Returns the fields `names`; raises `ValueError` if `tree` lacks one."""
    values = tuple(get_field(tree, name) for name in names)
    for name, value in zip(names, values, strict=True):
        if value is None:
            raise ValueError(f"{caller} needs the field `{name}` in the transition.")
    return values


def read(memory: ArrayTree, row: jax.Array) -> ArrayTree:
    """Reads rows `[..., *leaf]` from leaves `[N, B, *leaf]`."""
    # Spell out the first axis: `reshape(-1, ...)` is ambiguous for leaves of size 0.
    flat = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # noqa: E731
    return jax.tree.map(lambda x: flat(x)[row], memory)


def read_field(ring: RingState, name: str, row: jax.Array) -> ArrayTree:
    """Reads a field of rows; raises `ValueError` if the field is not recorded."""
    (memory,) = require_fields(ring.experience, (name,), "This call")
    return read(memory, row)


def move(ring: RingState, row: jax.Array, num_slots: jax.Array | int) -> jax.Array:
    """Returns the rows `num_slots` slots later in the same lane."""
    slot = (row // ring.num_envs + num_slots) % ring.num_slots
    return slot * ring.num_envs + row % ring.num_envs


def all_rows(ring: RingState) -> jax.Array:
    """Returns all row numbers, `[N * B]` int32."""
    return jnp.arange(ring.num_slots * ring.num_envs, dtype=jnp.int32)


def count(ring: RingState, fn: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Counts the stored rows for which `fn` is True, `()` int32, in O(capacity)."""
    row = all_rows(ring)
    return jnp.sum(is_stored(ring, row) & fn(row), dtype=jnp.int32)


def age(ring: RingState, row: jax.Array) -> jax.Array:
    """Counts the newer rows of the same lane, int32."""
    # The age is the distance to the newest row, at slot `head - 1`, around the ring. If
    # it is at least the size of the lane, the row is not stored.
    return (ring.head[row % ring.num_envs] - 1 - row // ring.num_envs) % ring.num_slots


def is_stored(ring: RingState, row: jax.Array) -> jax.Array:
    """Returns bool, True for rows that the ring stores."""
    in_range = (row >= 0) & (row < ring.num_slots * ring.num_envs)
    return in_range & (age(ring, row) < ring.size[row % ring.num_envs])


def is_done(ring: RingState, row: jax.Array) -> jax.Array:
    """Returns bool, True for rows that end an episode."""
    return read_field(ring, "terminated", row) | read_field(ring, "truncated", row)


def continues(ring: RingState, row: jax.Array) -> jax.Array:
    """Returns bool, True if the next row of the lane is the next step."""
    columns = marks(ring.experience)
    first, second = (read(columns, r) for r in (row, move(ring, row, 1)))
    return (age(ring, row) > 0) & ~is_done(ring, row) & is_next(first, second)


def marks(rows: ArrayTree) -> dict[str, jax.Array]:
    """Returns the fields of `rows` that `is_next` compares, if recorded."""
    names = ("episode_id", "episode_length")
    columns = {name: get_field(rows, name) for name in names}
    return {name: value for name, value in columns.items() if value is not None}


def is_next(first: dict[str, jax.Array], second: dict[str, jax.Array]) -> jax.Array:
    """Returns bool, True if the marks `second` continue the marks `first`."""
    is_next = jnp.ones((), bool)
    if "episode_id" in first:
        is_next &= first["episode_id"] == second["episode_id"]
    if "episode_length" in first:
        is_next &= first["episode_length"] + 1 == second["episode_length"]
    return is_next


def has_successor(ring: RingState, row: jax.Array) -> jax.Array:
    """Returns bool, True for rows whose true successor is stored."""
    if not ring.final_obs:
        return jnp.ones(row.shape, bool)
    index = read(ring.final_obs.place, row)
    has_final = (index >= 0) & (ring.final_obs.row[index] == row)
    return jnp.where(is_done(ring, row), has_final, continues(ring, row))


def has_next_obs(ring: RingState) -> bool:
    """Returns whether rows have successors, either stored or shared."""
    return bool(ring.final_obs) or get_field(ring.experience, "next_obs") is not None


def successor(ring: RingState, row: jax.Array) -> ArrayTree:
    """Reads the true successors, `[..., *leaf]`; undefined if not stored."""
    if not ring.final_obs:
        return read_field(ring, "next_obs", row)
    shared = read_field(ring, "obs", move(ring, row, 1))
    index = read(ring.final_obs.place, row)
    final = jax.tree.map(lambda x: x[index], ring.final_obs.obs)
    return trees.select(is_done(ring, row), final, shared)


def window(ring: RingState, row: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns the following rows of the same episode that have a successor.

    Args:
        ring: state of the ring.
        row: `[S]` int32, first rows; each row must have a successor.
        length: L, maximum number of rows, including the first row.

    Returns:
        `[L, S]` int32 rows, padded with the last row of the window; and `[L, S]` bool,
        False for padding.
    """

    def reaches(first: jax.Array, second: jax.Array) -> jax.Array:
        return continues(ring, first) & has_successor(ring, second)

    return _connected_rows(ring, row, length, 1, reaches)


def history(
    ring: RingState, row: jax.Array, length: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the previous rows of the same episode, oldest first and `row` last.

    Returns:
        `[L, S]` int32 rows, padded at the front with the first row of the episode; and
        `[S]` bool, False if rows of the history were evicted.
    """

    def reaches(_: jax.Array, previous: jax.Array) -> jax.Array:
        return is_stored(ring, previous) & continues(ring, previous)

    rows, valid = _connected_rows(ring, row, length, -1, reaches)
    # A history is complete if it has L rows or reaches the first row of the episode.
    complete = valid[-1] if length == 1 else valid[-1] | is_first(ring, rows[-1])
    return rows[::-1], complete


def _connected_rows(
    ring: RingState,
    row: jax.Array,
    length: int,
    direction: int,
    reaches: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Follows a lane from `row`, forward (`direction` 1) or backward (-1).

    A chain of rows ends at the first pair for which `reaches(row, adjacent_row)` is
    False. Returns `[L, S]` int32 rows, padded with the last row of the chain, and
    `[L, S]` bool, False for padding.
    """
    step = jnp.arange(length, dtype=jnp.int32)[:, None]
    rows = move(ring, row[None], direction * step)
    if length == 1:  # skip `reaches`: the flags may not be recorded
        return rows, jnp.ones(rows.shape, bool)
    # The product stays 0 after the first gap. Rows repeat after `num_slots` steps.
    linked = reaches(rows[:-1], rows[1:]) & (step[1:] < ring.num_slots)
    linked = jnp.cumprod(linked, axis=0, dtype=jnp.int32)
    last = move(ring, row, direction * jnp.sum(linked, axis=0, dtype=jnp.int32))
    valid = jnp.concatenate([jnp.ones((1, row.shape[0]), bool), linked.astype(bool)])
    return jnp.where(valid, rows, last[None]), valid


def is_first(ring: RingState, row: jax.Array) -> jax.Array:
    """Returns bool, True for rows that certainly begin an episode."""
    if get_field(ring.experience, "episode_length") is not None:
        return read_field(ring, "episode_length", row) == 1
    previous = move(ring, row, -1)
    # The row before the oldest row of a full lane may have been evicted.
    may_be_evicted = age(ring, row) == ring.num_slots - 1
    if not isinstance(ring.lost, tuple):
        lane = row % ring.num_envs
        may_be_evicted |= ring.lost[lane] & (age(ring, row) == ring.size[lane] - 1)
    return ~(is_stored(ring, previous) & continues(ring, previous)) & ~may_be_evicted


def ends_whole(ring: RingState, row: jax.Array, max_length: int) -> jax.Array:
    """Returns bool, True for rows that end a completely stored episode."""
    length = read_field(ring, "episode_length", row)
    # The row `length - 1` slots earlier must be stored and be the first step.
    is_kept = age(ring, row) + length <= ring.size[row % ring.num_envs]
    complete = is_done(ring, row) & is_kept & (length <= max_length)
    first = first_row(ring, row)
    if get_field(ring.experience, "episode_id") is not None:
        last_id, first_id = (read_field(ring, "episode_id", r) for r in (row, first))
        complete &= last_id == first_id
    complete &= read_field(ring, "episode_length", first) == 1
    return complete & has_successor(ring, row)


def first_row(ring: RingState, row: jax.Array) -> jax.Array:
    """Returns the first row of the episode, computed from its length at `row`."""
    return move(ring, row, 1 - read_field(ring, "episode_length", row))
