"""Recorded data and buffers: `data` for arrays, `minari` for datasets of Minari."""

from rollout.buffers.offline.data import from_data
from rollout.buffers.offline.minari import from_minari, to_minari

__all__ = ["from_data", "from_minari", "to_minari"]
