"""Replay buffers: pure functions that store and sample transitions.

A buffer is a static description, and its state is an explicit pytree. `ReplayBuffer`
stores a ring of transitions per lane and samples them uniformly.
`PrioritizedReplayBuffer` samples them in proportion to their priorities.
`EpisodeBuffer` exposes complete episodes only. `shard` shards a buffer over devices.
`rollout.checkpoint` saves a buffer state.

`replay` implements the methods that all buffers share. `prioritized`, `episodic` and
`sharded_buffer` override some of them. `ring` writes rows, `neighbours` reads fields
and follows episodes from row to row, `sampling` samples rows and builds batches, and
`sum_tree` samples in proportion to priorities. `types` defines the containers.
`offline` converts between buffers and recorded datasets.
"""

from typing import TYPE_CHECKING, Any

from rollout.base.names import raise_missing
from rollout.buffers import offline as offline
from rollout.buffers import types as types
from rollout.buffers.episodic import EpisodeBuffer
from rollout.buffers.offline import from_data
from rollout.buffers.prioritized import PrioritizedReplayBuffer
from rollout.buffers.replay import ReplayBuffer
from rollout.buffers.sharded_buffer import shard

__all__ = [
    "EpisodeBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "from_data",
    "shard",
]

if not TYPE_CHECKING:  # A type checker would accept every attribute.

    def __getattr__(name: str) -> Any:
        """Raises an error that contains the right name if it is known."""
        raise_missing("rollout.buffers", name)
