"""`EpisodeBuffer`: shows the rows of an episode only once it has ended."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from rollout import platform
from rollout.buffers import checks, fields, neighbours, ring
from rollout.buffers.replay import ReplayBuffer
from rollout.buffers.types import ArrayTree, EpisodicState


class EpisodeBuffer(ReplayBuffer):
    """A ring per lane whose rows become visible when their episode has ended.

    Until then they are written after the visible rows, where `size`, `sample` and the
    other methods do not see them. When the episode ends they become visible all at
    once, without a copy. An episode longer than `max_length` is skipped as a whole and
    counted in `num_too_long`; one that breaks off without an ending is counted in
    `num_abandoned`. By then its rows have replaced the oldest ones of the lane.

    Attributes:
        max_length: steps of the longest episode to keep, at most the slots of a lane,
            by default all of them. For the other attributes see `RingBuffer`.

    Raises:
        ValueError: if `max_length` is not an int of at least 1 or more than a lane
            holds, and as `RingBuffer`.
    """

    max_length: int | None = struct.field(pytree_node=False, default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is None:
            return
        checks.positive_int("max_length", self.max_length)
        if self.max_length > self.num_slots:
            raise ValueError(
                "`max_length` must be at most the slots of a lane, capacity // "
                f"num_envs={self.num_slots}, got {self.max_length}."
            )

    def init(self, transition: ArrayTree, params: Any = None) -> EpisodicState:
        """Makes an empty buffer; arguments and errors as in `ReplayBuffer.init`.

        Raises:
            ValueError: also if the transition has no `terminated` or `truncated`.
        """
        empty = self._init(transition, params)
        fields.need(empty.experience, checks.FLAGS, "`EpisodeBuffer`")
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

        def add_step(
            carry: tuple[EpisodicState, dict[str, jax.Array]],
            step: tuple[ArrayTree, jax.Array],
        ) -> tuple[tuple[EpisodicState, dict[str, jax.Array]], None]:
            return self._add_step(*carry, *step), None

        # Read the ring once, before the loop: a read inside it would copy the ring.
        return lax.scan(add_step, (state, _last_marks(state)), (rows, mask))[0][0]

    def clear(self, state: EpisodicState) -> EpisodicState:
        """Forgets all transitions, counts and unfinished episodes; the memory stays."""
        zeros = jax.tree.map(jnp.zeros_like, state.replace(ring=()))
        return zeros.replace(ring=ring.clear(state.ring))

    def _add_step(
        self,
        state: EpisodicState,
        last: dict[str, jax.Array],
        row: ArrayTree,
        mask: jax.Array,
    ) -> tuple[EpisodicState, dict[str, jax.Array]]:
        """Appends `[B, ...]` rows where `mask`; `last` are the marks before them."""
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
        pending = pending + (mask & ~skipping)
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
        return state, last


def _last_marks(state: EpisodicState) -> dict[str, jax.Array]:
    """Reads the marks of the last rows of unfinished episodes, `[B]`; void if none."""
    memory = state.ring
    slot = (memory.head + jnp.maximum(state.pending, 1) - 1) % memory.num_slots
    row = slot * memory.num_envs + jnp.arange(memory.num_envs, dtype=jnp.int32)

    # XLA moves no read out of a conditional; a read after the write would copy.
    def read_if_any(marks: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return lax.cond(
            jnp.any((state.pending > 0) | state.skipping),
            lambda marks: neighbours.read_leaves(marks, row),
            lambda marks: jax.tree.map(lambda x: jnp.zeros(row.shape, x.dtype), marks),
            marks,
        )

    def read(marks: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return lax.optimization_barrier(neighbours.read_leaves(marks, row))

    return platform.choose(read_if_any, read, neighbours.marks(memory.experience))
