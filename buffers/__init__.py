"""Memory: pure stores of transitions.

A buffer is a description; its state is explicit. `ReplayBuffer` keeps a ring of
transitions per lane and samples them evenly, `PrioritizedReplayBuffer` by priorities,
and `EpisodeBuffer` shows whole episodes only. `from_data` and `from_minari` fill one
with recorded data, `to_minari` writes it as a dataset, and `shard` spreads one over
devices. `rollout.checkpoint` saves a state.
"""

from buffers import types as types
from buffers.devices import shard
from buffers.episodic import EpisodeBuffer
from buffers.offline import from_data, from_minari, to_minari
from buffers.prioritized import PrioritizedReplayBuffer
from buffers.replay import ReplayBuffer
from buffers.types import Batch, PrioritizedState, RingState, Sequences

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
