"""Replay buffers: pure functions that store and sample transitions.

A buffer is a static description; its state is explicit. `ReplayBuffer` keeps a ring of
transitions per lane and samples them evenly, `PrioritizedReplayBuffer` samples by
priorities, and `EpisodeBuffer` shows whole episodes only. `shard` shards a buffer over
devices. `rollout.checkpoint` saves a state.

`base` has the methods that all buffers share, and the three modules named after the
buffers the rest. Below them: `ring` and `finals` write, `walk` reads from row to row,
`sampling` and `sum_tree` draw, `batches` builds batches from drawn rows, `lowering`
chooses the program for a platform. `rollout.buffers.offline` fills buffers with
recorded data, and writes their episodes as datasets.
"""

from rollout.buffers import types as types
from rollout.buffers.episodic import EpisodeBuffer
from rollout.buffers.offline import from_data, from_minari, to_minari
from rollout.buffers.prioritized import PrioritizedReplayBuffer
from rollout.buffers.replay import ReplayBuffer
from rollout.buffers.sharded_buffer import shard
from rollout.buffers.types import Batch, PrioritizedState, RingState, Sequences

__all__ = [
    "Batch",
    "EpisodeBuffer",
    "PrioritizedReplayBuffer",
    "PrioritizedState",
    "ReplayBuffer",
    "RingState",
    "Sequences",
    "from_data",
    "from_minari",
    "shard",
    "to_minari",
]
