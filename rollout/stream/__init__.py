"""`Stream`: batches for a training loop in Python.

`stream` is the loop; `batch` makes a batch, and `host_batch` makes one from
environments that are not JAX; `batch_program` compiles and calls it; `batch_thread` is
the thread in which it runs; `stream_stats` accumulates statistics; `types` has the
containers, `options` their checks, and `progress` the bar.
"""

from rollout.stream.stream import Stream
from rollout.stream.stream_stats import StreamStats
from rollout.stream.types import StreamBatch

__all__ = ["Stream", "StreamBatch", "StreamStats"]
