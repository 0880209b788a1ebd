"""Streams: batches for a training loop that is driven by Python.

`stream` is the loop; `fill` the one program that makes a batch, `program` compiles and
calls it, and `worker` is the thread in which it runs; `host` collects batches from
environments that are not JAX. `types` has the containers, `options` the checks, `stats`
the counts over all batches, `progress` the bar.
"""

from rollout.stream.stats import StreamStats
from rollout.stream.stream import Stream
from rollout.stream.types import StreamBatch

__all__ = ["Stream", "StreamBatch", "StreamStats"]
