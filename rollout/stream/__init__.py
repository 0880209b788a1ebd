"""The stream: batches for a training loop that is driven by Python."""

from rollout.stream._maker import Batch
from rollout.stream.stats import StreamStats, log_stats
from rollout.stream.stream import Stream

__all__ = ["Batch", "Stream", "StreamStats", "log_stats"]
