"""Memory: pure stores of transitions.

A buffer is a description; its state is explicit. `ReplayBuffer` keeps a ring of
transitions per lane and samples them evenly, `PrioritizedReplayBuffer` by priorities,
and `EpisodeBuffer` shows whole episodes only.
"""

from buffers.episodic import EpisodeBuffer
from buffers.io import load, save
from buffers.prioritized import PrioritizedReplayBuffer
from buffers.replay import ReplayBuffer
from buffers.types import (
    Batch,
    EpisodicState,
    Finals,
    PrioritizedState,
    RingState,
    Sequences,
)

__all__ = [
    "Batch",
    "EpisodeBuffer",
    "EpisodicState",
    "Finals",
    "PrioritizedReplayBuffer",
    "PrioritizedState",
    "ReplayBuffer",
    "RingState",
    "Sequences",
    "load",
    "save",
]
