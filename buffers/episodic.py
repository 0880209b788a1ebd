"""`EpisodeBuffer`: exposes the rows of an episode only after the episode has ended."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from rollout.base import checks, trees
from rollout.buffers import neighbours, ring
from rollout.buffers.replay import ReplayBuffer
from rollout.buffers.types import EpisodicState
from rollout.envs.types import ArrayTree


class EpisodeBuffer(ReplayBuffer):
    """A replay buffer that samples from complete episodes only.

    Rows of an unfinished episode are written after the visible rows of the lane, and
    every method ignores them. When the episode ends, all of its rows become visible
    without a copy. An episode longer than `max_length` is skipped and counted in
    `num_too_long`. An episode interrupted without a flag is discarded and counted in
    `num_abandoned`. Rows of skipped and discarded episodes may already have overwritten
    the oldest rows of the lane.

    Attributes:
        max_length: maximum number of steps of a stored episode, at most `num_slots`;
            None means `num_slots`. See `ReplayBuffer` for all other attributes.

    Raises:
        ValueError: if `max_length` is not an int from 1 to `num_slots`, or as in
            `ReplayBuffer`.
    """

    max_length: int | None = struct.field(pytree_node=False, default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None:
            checks.check_int("max_length", self.max_length, most=self.num_slots)

    def init(self, transition: ArrayTree, params: Any = None) -> EpisodicState:
        """Initializes an empty buffer; takes the arguments of `ReplayBuffer.init`.

        Raises:
            ValueError: as in `ReplayBuffer.init`, and if the transition lacks
                `terminated` or `truncated`.
        """
        empty = super().init(transition, params)
        neighbours.require_fields(empty.experience, neighbours.FLAGS, "`EpisodeBuffer`")
        return EpisodicState(
            ring=empty.replace(lost=jnp.zeros((self.num_envs,), bool)),
            pending=jnp.zeros((self.num_envs,), jnp.int32),
            skipping=jnp.zeros((self.num_envs,), bool),
            last=jax.tree.map(lambda x: x[0], neighbours.marks(empty.experience)),
            num_too_long=jnp.zeros((), jnp.int32),
            num_abandoned=jnp.zeros((), jnp.int32),
        )

    def _add(
        self, state: EpisodicState, rows: ArrayTree, mask: jax.Array
    ) -> EpisodicState:
        """Appends the rows `[T, B, ...]` for which `mask`, `[T, B]` bool, is True."""
        return lax.scan(self._add_step, state, (rows, mask))[0]

    def _add_step(
        self, state: EpisodicState, step: tuple[ArrayTree, jax.Array]
    ) -> tuple[EpisodicState, None]:
        """Appends the rows `[B, ...]` of one time step, subject to the mask."""
        row, mask = step
        # Pending rows follow the head. If the new row does not continue their
        # episode, or exceeds `max_length`, `pending` is reset to 0 and later rows
        # overwrite them.
        pending, skipping = state.pending, state.skipping
        marks = neighbours.marks(row)
        is_next = neighbours.is_next(state.last, marks)
        interrupted = mask & ((pending > 0) | skipping) & ~is_next
        abandoned = interrupted & ~skipping
        pending, skipping = jnp.where(interrupted, 0, pending), skipping & ~interrupted
        too_long = mask & (pending == (self.max_length or self.num_slots))
        pending, skipping = jnp.where(too_long, 0, pending), skipping | too_long

        write_mask = mask & ~skipping
        slot = (state.ring.head + pending) % self.num_slots
        memory = ring.write_slots(
            state.ring,
            jax.tree.map(lambda x: x[None], row),
            jnp.where(write_mask, slot, self.num_slots)[None],
        )
        pending = pending + write_mask.astype(jnp.int32)
        # In a full lane, the slots after the head hold the oldest visible rows.
        size = jnp.minimum(memory.size, self.num_slots - pending)
        lost = memory.lost | (size < memory.size)
        # At an episode end the head passes the pending rows, so they become visible.
        done = mask & neighbours.done_of(row)
        visible = jnp.where(done, pending, 0)
        state = EpisodicState(
            ring=memory.replace(
                head=(memory.head + visible) % self.num_slots,
                size=size + visible,
                lost=lost,
            ),
            pending=pending - visible,
            skipping=skipping & ~done,
            last=trees.select(mask, marks, state.last),
            num_too_long=state.num_too_long + jnp.sum(too_long, dtype=jnp.int32),
            num_abandoned=state.num_abandoned + jnp.sum(abandoned, dtype=jnp.int32),
        )
        return state, None
