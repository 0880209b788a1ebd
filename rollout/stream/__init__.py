"""`Stream`: batches for a training loop in Python.

`stream` is the loop; `makers` make its batches, of environments in JAX and of others,
by the pure functions of `batch`; `options` are those of a stream, and check themselves;
`stream_stats` accumulates statistics, and `progress` shows the bar.
"""

from rollout.stream.stream import Stream, StreamBatch
from rollout.stream.stream_stats import StreamStats

__all__ = ["Stream", "StreamBatch", "StreamStats"]
