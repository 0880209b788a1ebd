"""`EpisodeBuffer`: shows the rows of an episode only once it has ended."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from rollout import checks, platform
from rollout.buffers import fields, neighbours, ring
from rollout.buffers.replay import ReplayBuffer
from rollout.buffers.types import EpisodicState
from rollout.envs.types import ArrayTree


class EpisodeBuffer(ReplayBuffer):
    """A ring per lane whose rows become visible when their episode has ended.

    Until then they are written after the visible rows, where `size`, `sample` and the
    other methods do not see them. When the episode ends they become visible all at
    once, without a copy. An episode longer than `max_length` is skipped as a whole and
    counted in `num_too_long`; one that breaks off without an ending is counted in
    `num_abandoned`. By then its rows have replaced the oldest ones of the lane.

    Attributes:
        max_length: steps of the longest episode to keep, at most the slots of a lane,
            by default all of them. For the other attributes see `ReplayBuffer`.

    Raises:
        ValueError: if `max_length` is not an int of at least 1 or more than a lane
            holds, and as `ReplayBuffer`.
    """

    max_length: int | None = struct.field(pytree_node=False, default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None:
            checks.int_between("max_length", self.max_length, most=self.num_slots)

    def init(self, transition: ArrayTree, params: Any = None) -> EpisodicState:
        """Makes an empty buffer; arguments and errors as in `ReplayBuffer.init`."""
        empty = super().init(transition, params)
        fields.need(empty.experience, fields.FLAGS, "`EpisodeBuffer`")
        return EpisodicState(
            ring=empty.replace(lost=jnp.zeros((self.num_envs,), bool)),
            pending=jnp.zeros((self.num_envs,), jnp.int32),
            skipping=jnp.zeros((self.num_envs,), bool),
            num_too_long=jnp.zeros((), jnp.int32),
            num_abandoned=jnp.zeros((), jnp.int32),
        )

    def _add(
        self, state: EpisodicState, rows: ArrayTree, mask: jax.Array
    ) -> EpisodicState:
        """Appends rows `[T, B, ...]` where `mask`, `[T, B]` bool."""
        # Read the ring once, before the loop: a read inside it would copy the ring.
        start = state, _last_marks(state)
        return lax.scan(self._add_step, start, (rows, mask))[0][0]

    def clear(self, state: EpisodicState) -> EpisodicState:
        """Forgets all transitions, counts and unfinished episodes; the memory stays."""
        zeros = jax.tree.map(jnp.zeros_like, state.replace(ring=()))
        return zeros.replace(ring=super().clear(state.ring))

    def _add_step(
        self,
        carry: tuple[EpisodicState, dict[str, jax.Array]],
        step: tuple[ArrayTree, jax.Array],
    ) -> tuple[tuple[EpisodicState, dict[str, jax.Array]], None]:
        """Appends `[B, ...]` rows where their mask; the carry has the marks before."""
        (state, last), (row, mask) = carry, step
        # Pending rows lie after the head. If the row does not continue them, or is one
        # too many, their number goes back to 0, and later rows overwrite them.
        pending, skipping = state.pending, state.skipping
        marks = neighbours.marks(row)
        broken = mask & ((pending > 0) | skipping) & ~neighbours.is_next(last, marks)
        last = jax.tree.map(lambda old, new: jnp.where(mask, new, old), last, marks)
        abandoned = broken & ~skipping
        pending, skipping = jnp.where(broken, 0, pending), skipping & ~broken
        too_long = mask & (pending == (self.max_length or self.num_slots))
        pending, skipping = jnp.where(too_long, 0, pending), skipping | too_long

        # The last row of a skipped episode is kept at the head, to see whether the
        # next row belongs to it.
        done = mask & fields.done(row)
        written = mask & ~(skipping & done)
        slot = (state.ring.head + pending) % self.num_slots
        memory = ring.write_slots(
            state.ring,
            jax.tree.map(lambda x: x[None], row),
            jnp.where(written, slot, self.num_slots)[None],
        )
        pending = pending + (mask & ~skipping).astype(jnp.int32)
        # In a full lane the slots after the head are those of its oldest visible rows.
        size = jnp.minimum(memory.size, self.num_slots - pending)
        lost = memory.lost | (size < memory.size)
        # At the ending the head moves past the pending rows: so they become visible.
        visible = jnp.where(done, pending, 0)
        state = EpisodicState(
            ring=memory.replace(
                head=(memory.head + visible) % self.num_slots,
                size=size + visible,
                lost=lost,
            ),
            pending=pending - visible,
            skipping=skipping & ~done,
            num_too_long=state.num_too_long + jnp.sum(too_long, dtype=jnp.int32),
            num_abandoned=state.num_abandoned + jnp.sum(abandoned, dtype=jnp.int32),
        )
        return (state, last), None


def _last_marks(state: EpisodicState) -> dict[str, jax.Array]:
    """Reads the marks of the last rows of unfinished episodes, `[B]`; void if none."""
    memory = state.ring
    slot = (memory.head + jnp.maximum(state.pending, 1) - 1) % memory.num_slots
    row = slot * memory.num_envs + jnp.arange(memory.num_envs, dtype=jnp.int32)

    # XLA moves no read out of a conditional; a read after the write would copy.
    def read_if_any(marks: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return lax.cond(
            jnp.any((state.pending > 0) | state.skipping),
            lambda marks: neighbours.read(marks, row),
            lambda marks: jax.tree.map(lambda x: jnp.zeros(row.shape, x.dtype), marks),
            marks,
        )

    def read(marks: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return lax.optimization_barrier(neighbours.read(marks, row))

    return platform.choose(read_if_any, read, neighbours.marks(memory.experience))
