"""Finds the next, previous, first and following rows of episodes in a ring.

A row is a number: slot n of lane i is `n * B + i`. Functions take rows of any shape.
Two neighbouring rows of a lane belong together if the earlier one is not an ending and
the `episode_id` and `episode_length` of a transition that has them continue from one to
the other. So an episode that broke off, or lacks rows, ends there as well.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rollout.buffers import fields
from rollout.buffers.types import RingState
from rollout.envs import trees
from rollout.envs.types import ArrayTree


def read(memory: ArrayTree, row: jax.Array) -> ArrayTree:
    """Reads rows of leaves `[N, B, *leaf]`, `[..., *leaf]`."""
    # Not `reshape(-1, ...)`: a leaf of size 0 leaves that axis undetermined.
    flat = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # noqa: E731
    return jax.tree.map(lambda x: flat(x)[row], memory)


def read_field(ring: RingState, name: str, row: jax.Array) -> ArrayTree:
    """Reads a field of rows; raises `ValueError` if they lack it."""
    (memory,) = fields.need(ring.experience, (name,), "This call")
    return read(memory, row)


def move(ring: RingState, row: jax.Array, num_slots: jax.Array | int) -> jax.Array:
    """Moves `num_slots` slots forward in the same lane."""
    slot = (row // ring.num_envs + num_slots) % ring.num_slots
    return slot * ring.num_envs + row % ring.num_envs


def all_rows(ring: RingState) -> jax.Array:
    """Returns every row number, `[N * B]` int32."""
    return jnp.arange(ring.num_slots * ring.num_envs, dtype=jnp.int32)


def count(ring: RingState, fn: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Counts the stored rows for which `fn` returns True, `()` int32: O(capacity)."""
    row = all_rows(ring)
    return jnp.sum(is_stored(ring, row) & fn(row), dtype=jnp.int32)


def age(ring: RingState, row: jax.Array) -> jax.Array:
    """Counts the rows of the lane that are newer, int32."""
    # Slots from the row to the newest one, at `head - 1`, around the ring. An age of at
    # least the lane's size is that of a row that is not stored.
    return (ring.head[row % ring.num_envs] - 1 - row // ring.num_envs) % ring.num_slots


def is_stored(ring: RingState, row: jax.Array) -> jax.Array:
    """Returns bool, True where the ring holds the row."""
    inside = (row >= 0) & (row < ring.num_slots * ring.num_envs)
    return inside & (age(ring, row) < ring.size[row % ring.num_envs])


def is_done(ring: RingState, row: jax.Array) -> jax.Array:
    """Returns bool, True where an episode ended at the row."""
    return read_field(ring, "terminated", row) | read_field(ring, "truncated", row)


def goes_on(ring: RingState, row: jax.Array) -> jax.Array:
    """Returns bool, True where the next row is the episode's next step."""
    kept = marks(ring.experience)
    here, there = (read(kept, r) for r in (row, move(ring, row, 1)))
    return (age(ring, row) > 0) & ~is_done(ring, row) & is_next(here, there)


def marks(rows: ArrayTree) -> dict[str, jax.Array]:
    """Returns the recorded fields of `rows` that `is_next` compares."""
    names = ("episode_id", "episode_length")
    found = {name: fields.get(rows, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def is_next(here: dict[str, jax.Array], there: dict[str, jax.Array]) -> jax.Array:
    """Returns bool, True where `there` is the step after `here`, by their marks."""
    is_next = jnp.ones((), bool)
    if "episode_id" in here:
        is_next &= here["episode_id"] == there["episode_id"]
    if "episode_length" in here:
        is_next &= here["episode_length"] + 1 == there["episode_length"]
    return is_next


def has_successor(ring: RingState, row: jax.Array) -> jax.Array:
    """Returns bool, True where the row's true successor is stored."""
    if not ring.final_obs:
        return jnp.ones(row.shape, bool)
    place = read(ring.final_obs.place, row)
    kept = (place >= 0) & (ring.final_obs.row[place] == row)
    return jnp.where(is_done(ring, row), kept, goes_on(ring, row))


def has_next_obs(ring: RingState) -> bool:
    """Returns whether rows have successors, stored with them or shared."""
    return bool(ring.final_obs) or fields.get(ring.experience, "next_obs") is not None


def successor(ring: RingState, row: jax.Array) -> ArrayTree:
    """Reads the true successors, `[..., *leaf]`; other values if not stored."""
    if not ring.final_obs:
        return read_field(ring, "next_obs", row)
    after = read_field(ring, "obs", move(ring, row, 1))
    place = read(ring.final_obs.place, row)
    final = jax.tree.map(lambda x: x[place], ring.final_obs.obs)
    return trees.select(is_done(ring, row), final, after)


def window(ring: RingState, row: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns the rows that follow in the same episode, each with a successor.

    Args:
        ring: the ring.
        row: `[S]` int32, the first rows; each has a successor.
        length: L, rows at most, including the first one.

    Returns:
        `[L, S]` int32 rows, the last one repeated after the end; and `[L, S]` bool,
        False after the end.
    """

    def reaches(earlier: jax.Array, later: jax.Array) -> jax.Array:
        return goes_on(ring, earlier) & has_successor(ring, later)

    return _connected_rows(ring, row, length, 1, reaches)


def history(
    ring: RingState, row: jax.Array, length: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the rows before in the same episode, oldest first and `row` last.

    Returns:
        `[L, S]` int32 rows, the first one of the episode repeated before its start;
        and `[S]` bool, False where some of them were evicted.
    """

    def reaches(_: jax.Array, earlier: jax.Array) -> jax.Array:
        return is_stored(ring, earlier) & goes_on(ring, earlier)

    rows, valid = _connected_rows(ring, row, length, -1, reaches)
    # Whole if all rows go back, or if they stop at the episode's first one.
    whole = valid[-1] if length == 1 else valid[-1] | is_first(ring, rows[-1])
    return rows[::-1], whole


def _connected_rows(
    ring: RingState,
    row: jax.Array,
    length: int,
    way: int,
    reaches: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Returns each row and the ones after it (`way` 1), or before it (-1), in its lane.

    They end where `reaches(here, there)` is False of two neighbours: `[L, S]`
    int32 rows, the last one repeated, and `[L, S]` bool, False after it.
    """
    step = jnp.arange(length, dtype=jnp.int32)[:, None]
    rows = move(ring, row[None], way * step)
    if length == 1:  # reads no flags, which the rows may lack
        return rows, jnp.ones(rows.shape, bool)
    # The product stays 0 after the first break. After one lap the rows would repeat.
    on = reaches(rows[:-1], rows[1:]) & (step[1:] < ring.num_slots)
    on = jnp.cumprod(on, axis=0, dtype=jnp.int32)
    last = move(ring, row, way * jnp.sum(on, axis=0, dtype=jnp.int32))
    valid = jnp.concatenate([jnp.ones((1, row.shape[0]), bool), on.astype(bool)])
    return jnp.where(valid, rows, last[None]), valid


def is_first(ring: RingState, row: jax.Array) -> jax.Array:
    """Returns bool, True where the row is known to be the first of its episode."""
    if fields.get(ring.experience, "episode_length") is not None:
        return read_field(ring, "episode_length", row) == 1
    before = move(ring, row, -1)
    # The rows before the oldest row of a full lane may have been evicted.
    is_cut = age(ring, row) == ring.num_slots - 1
    if not isinstance(ring.lost, tuple):
        lane = row % ring.num_envs
        is_cut |= ring.lost[lane] & (age(ring, row) == ring.size[lane] - 1)
    return ~(is_stored(ring, before) & goes_on(ring, before)) & ~is_cut


def ends_whole(ring: RingState, row: jax.Array, max_length: int) -> jax.Array:
    """Returns bool, True where a row ends an episode that is stored whole."""
    length = read_field(ring, "episode_length", row)
    # The first row is `length - 1` slots back: it must be stored, and be the first one.
    kept = age(ring, row) + length <= ring.size[row % ring.num_envs]
    whole = is_done(ring, row) & kept & (length <= max_length)
    first = first_of(ring, row)
    if fields.get(ring.experience, "episode_id") is not None:
        here, there = (read_field(ring, "episode_id", r) for r in (row, first))
        whole &= here == there
    whole &= read_field(ring, "episode_length", first) == 1
    return whole & has_successor(ring, row)


def first_of(ring: RingState, row: jax.Array) -> jax.Array:
    """Returns the first row of the episode, by the episode length at `row`."""
    return move(ring, row, 1 - read_field(ring, "episode_length", row))
