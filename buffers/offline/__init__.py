"""Recorded data and buffers: `data` for arrays, `minari` for datasets of Minari."""

from buffers.offline.data import from_data
from buffers.offline.minari import from_minari, to_minari

__all__ = ["from_data", "from_minari", "to_minari"]
