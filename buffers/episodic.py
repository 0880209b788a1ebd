"""`EpisodeBuffer`: shows the rows of an episode only once it has ended."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from rollout import checks
from rollout.buffers import fields, neighbours, ring
from rollout.buffers.replay import ReplayBuffer
from rollout.buffers.types import EpisodicState
from rollout.envs import trees
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
        """Makes an empty buffer; arguments and errors as in `ReplayBuffer.init`.

        Raises:
            ValueError: also if the transition lacks `terminated` or `truncated`.
        """
        empty = super().init(transition, params)
        fields.need(empty.experience, fields.FLAGS, "`EpisodeBuffer`")
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
        """Appends rows `[T, B, ...]` where `mask`, `[T, B]` bool."""
        return lax.scan(self._add_step, state, (rows, mask))[0]

    def _add_step(
        self, state: EpisodicState, step: tuple[ArrayTree, jax.Array]
    ) -> tuple[EpisodicState, None]:
        """Appends `[B, ...]` rows where their mask."""
        row, mask = step
        # Pending rows lie after the head. If the row does not continue them, or is one
        # too many, their number goes back to 0, and later rows overwrite them.
        pending, skipping = state.pending, state.skipping
        marks = neighbours.marks(row)
        goes_on = neighbours.is_next(state.last, marks)
        broken = mask & ((pending > 0) | skipping) & ~goes_on
        abandoned = broken & ~skipping
        pending, skipping = jnp.where(broken, 0, pending), skipping & ~broken
        too_long = mask & (pending == (self.max_length or self.num_slots))
        pending, skipping = jnp.where(too_long, 0, pending), skipping | too_long

        written = mask & ~skipping
        slot = (state.ring.head + pending) % self.num_slots
        memory = ring.write_slots(
            state.ring,
            jax.tree.map(lambda x: x[None], row),
            jnp.where(written, slot, self.num_slots)[None],
        )
        pending = pending + written.astype(jnp.int32)
        # In a full lane the slots after the head are those of its oldest visible rows.
        size = jnp.minimum(memory.size, self.num_slots - pending)
        lost = memory.lost | (size < memory.size)
        # At the ending the head moves past the pending rows: so they become visible.
        done = mask & fields.done(row)
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
