"""Replay buffers: pure functions that store and sample transitions.

A buffer is a static description; its state is explicit. `ReplayBuffer` keeps a ring of
transitions per lane and samples them evenly, `PrioritizedReplayBuffer` samples by
priorities, and `EpisodeBuffer` shows whole episodes only. `shard` shards a buffer over
devices. `rollout.checkpoint` saves a state.

`replay` has the methods that all buffers share, `prioritized` and `episodic` what
theirs do otherwise, and `sharded_buffer` has `shard`. Below them: `ring` and
`final_obs` write, `neighbours` reads from row to row, `sampling` and `sum_tree` draw,
`batches` builds batches from drawn rows. `types` has the containers, and `fields` reads
fields by name. `rollout.buffers.offline` fills buffers with recorded data, and writes
their episodes as datasets.
"""

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
