"""Recorded data: `data` reads arrays, `minari` reads and writes Minari datasets."""

from rollout.buffers.offline.data import from_data
from rollout.buffers.offline.minari import from_minari, to_minari

__all__ = ["from_data", "from_minari", "to_minari"]
