"""`Stream`: batches for a training loop in Python.

`stream` implements the iterator. `batch` has its options, statistics and state, and
collects the batches, from environments in JAX and from host environments.
"""

from rollout.stream.batch import StreamStats
from rollout.stream.stream import Stream, StreamBatch

__all__ = ["Stream", "StreamBatch", "StreamStats"]
