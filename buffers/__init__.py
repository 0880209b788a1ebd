"""Memory: pure stores of transitions.

A buffer is a description; its state is explicit. `ReplayBuffer` keeps a ring of
transitions per lane and samples them evenly.
"""

from buffers.replay import ReplayBuffer
from buffers.types import Batch, RingState

__all__ = ["Batch", "ReplayBuffer", "RingState"]
