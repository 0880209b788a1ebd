"""The containers of a stream: its batches, its options and its state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct

from rollout.envs.types import ArrayTree
from rollout.policies.masks import MaskFn
from rollout.stats import CollectStats
from rollout.stream.batch_thread import Job
from rollout.types import Carry, Episodes, Transition

Postprocess = Callable[[Transition], ArrayTree]
Placement = str | jax.sharding.Sharding  # "device", "host"


class StreamBatch(struct.PyTreeNode, kw_only=True):
    """A batch of a stream.

    Attributes:
        trajectory: `[T, B, ...]`, all zero where its `mask` is False; with a
            `postprocess`, its result.
        stats: statistics of the episodes that ended in the batch.
        steps: environment steps of the batch over all lanes.
        warmup_steps: how many of these, the first ones, took random actions.
        params_version: version of the parameters it was made with: 0 for those of the
            constructor, n for those of the n-th `set_params`.
        episodes: with `episodes_per_batch` the episodes, `[N]`, else None.
    """

    trajectory: Any  # [T, B, ...]
    stats: CollectStats
    steps: int
    warmup_steps: int
    params_version: int
    episodes: Episodes | None = None  # [N]


class Options(NamedTuple):
    """The options of a `Stream`; see there."""

    steps_per_batch: Any  # an int, or None
    episodes_per_batch: int | None
    total_steps: int | None
    warmup_steps: int
    mask_fn: MaskFn | None
    max_episode_steps: Any  # an int, or None
    at_batch_end: str
    postprocess: Postprocess | None
    placement: Placement
    prefetch: int
    recycle: bool
    check_finite: bool
    on_fault: str
    window_episodes: int


class BatchSpec(NamedTuple):
    """The steps of a batch, as inputs of the program; `()` int32 each.

    Lane `first_lane` of the `B` lanes steps first, and the order goes round: step
    number k of the batch is row `k // B` of lane `(first_lane + k) % B`. A lane without
    a step in the last row stands still, and is among the first in the next batch.
    """

    num_steps: Any  # of the batch, over all lanes
    first_lane: Any
    num_random: Any  # of the steps of the batch, the first ones


class StreamState(NamedTuple):
    """Where a stream stands; replaced as a whole, so no interrupt can split it."""

    carry: Carry  # after the last batch that was returned
    totals: np.ndarray  # of the batches until then, see `stream_stats.add`
    recent: np.ndarray  # the last episodes until then, see `stream_stats.slide`
    steps: int = 0  # until then, also before a `reset_stats`
    batches: int = 0
    first_lane: int = 0  # of the next batch
    job: Job | None = None  # makes the next batch; None before it begins
    params: Any = None  # for it, and their version, a pair; None: the newest
    memory: ArrayTree | None = None  # of the last batch, to reuse for a later one
