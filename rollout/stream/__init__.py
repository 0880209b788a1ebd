"""Streams: batches for a training loop that is driven by Python.

`stream` is the loop; `fill` the one program that makes a batch; `worker` the thread in
which it runs; `types` the containers; `options` what is refused.
"""

from rollout.stream.stats import StreamStats
from rollout.stream.stream import Stream
from rollout.stream.types import StreamBatch

__all__ = ["Stream", "StreamBatch", "StreamStats"]
