"""What a batch of a stream is, and which of its steps stands where.

Of the `B` lanes, the one that steps first in a batch is `first_lane`, and the order
goes round: step number k of the batch is row `k // B` of lane `first_lane + k % B`. A
lane without a step in the last row stands still, and is among the next ones to step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rollout.stream._rows import Postprocess


class Spec(NamedTuple):
    """What is settled when the program is compiled."""

    num_rows: int  # T
    has_idle_lanes: bool  # in some row not every lane steps
    has_warmup: bool
    reset_each_batch: bool
    truncate_at_batch_end: bool
    check_finite: bool
    drop_faulty: bool
    postprocess: Postprocess | None
    num_episodes: int | None  # of a batch of whole episodes
    proved: frozenset[str] = frozenset()  # what `check_finite` need not look at


class Window(NamedTuple):
    """Which rows to fill, and of what batch; in the program `()` int32 each."""

    first_row: int
    stop_row: int
    is_last: int  # 1 if the batch is complete with this
    num_steps: int  # of the batch
    first_lane: int
    num_random: int  # of the steps of the batch, the first ones
    max_episode_steps: int


def indices(shape: tuple[int, int], window: Window) -> jax.Array:
    """Which step of the batch stands in each row and lane; `[T, B]` int32."""
    lane = jnp.arange(shape[1], dtype=jnp.int32) - window.first_lane
    order = jnp.where(lane < 0, lane + shape[1], lane)
    row = jnp.arange(shape[0], dtype=jnp.int32)
    return row[:, None] * shape[1] + order[None]
