"""Fills buffers with recorded data, from arrays and datasets of Minari."""

from buffers.offline.data import from_data
from buffers.offline.minari import from_minari, to_minari

__all__ = ["from_data", "from_minari", "to_minari"]
