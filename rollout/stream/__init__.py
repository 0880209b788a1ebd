"""`Stream`: batches for a training loop in Python.

`stream` implements the iterator. `makers` collects its batches, from environments in
JAX and from host environments, with the pure functions of `batch`. `options` validates
the options of a stream, `stream_stats` accumulates statistics, and `progress` displays
a progress bar.
"""

from rollout.stream.stream import Stream, StreamBatch
from rollout.stream.stream_stats import StreamStats

__all__ = ["Stream", "StreamBatch", "StreamStats"]
