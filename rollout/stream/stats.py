"""What a stream counts over its batches, and statistics as a flat dict of floats."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout.stats import CollectStats

_MAX_UNREAD = 64  # batches whose statistics stay on the device


class StreamStats(NamedTuple):
    """What a stream collected since it began, or since `reset_stats`.

    Attributes:
        collect_batches: batches handed over.
        collect_steps: environment steps over all lanes, those of dropped episodes too.
        collect_episodes: episodes that ended.
        collect_seconds: time in which steps were taken, compiling not counted; with
            `prefetch=1` it passes while your own code runs.
        steps_per_second: `collect_steps / collect_seconds`; NaN before the first batch.
        return_mean: mean undiscounted return of these episodes, NaN if there are none.
        length_mean: mean length of these episodes in steps, NaN if there are none.
        faulty_episodes: episodes that `on_fault="drop"` dropped.
    """

    collect_batches: int
    collect_steps: int
    collect_episodes: int
    collect_seconds: float
    steps_per_second: float
    return_mean: float
    length_mean: float
    faulty_episodes: int


def pack(stats: CollectStats, num_faulty: jax.Array) -> jax.Array:
    """Puts what `Totals` adds up into one array, `[4]` int32, to be read at once."""
    means = jnp.stack((stats.return_mean, stats.length_mean)).astype(jnp.float32)
    counts = jnp.stack((stats.num_episodes, num_faulty))
    return jnp.concatenate((counts, lax.bitcast_convert_type(means, jnp.int32)))


class Totals:
    """The sums behind `StreamStats`; what a batch counted is read when it is asked."""

    def __init__(self) -> None:
        self._sums = np.zeros(7)
        self._unread: list[jax.Array] = []

    def add(self, steps: int, seconds: float, counted: jax.Array) -> None:
        """Adds a batch; `counted` is what `pack` made."""
        self._sums[:3] += 1, steps, seconds
        self._unread.append(counted)
        if len(self._unread) >= _MAX_UNREAD:
            self.save()

    def save(self) -> np.ndarray:
        """The sums as `[7]` float64: batches, steps, s, episodes, returns, ..."""
        unread, self._unread = self._unread, []
        for counted in jax.device_get(unread):
            count, num_faulty = counted[:2]
            return_mean, length_mean = counted[2:].view(np.float32)
            self._sums[3] += count
            if count:
                self._sums[4] += count * float(return_mean)
                self._sums[5] += count * float(length_mean)
            self._sums[6] += num_faulty
        return self._sums.copy()

    def load(self, sums: np.ndarray) -> None:
        """Takes back what `save` gave."""
        self._sums, self._unread = np.array(sums, np.float64), []

    def read(self) -> StreamStats:
        """Reads what was counted."""
        batches, steps, seconds, episodes, returns, lengths, faulty = self.save()
        return StreamStats(
            collect_batches=int(batches),
            collect_steps=int(steps),
            collect_episodes=int(episodes),
            collect_seconds=float(seconds),
            steps_per_second=float(steps / seconds) if seconds else np.nan,
            return_mean=float(returns / episodes) if episodes else np.nan,
            length_mean=float(lengths / episodes) if episodes else np.nan,
            faulty_episodes=int(faulty),
        )


def log_stats(stats: Any, *, prefix: str = "") -> dict[str, float]:
    """Makes of statistics what any logger takes: a flat dict of Python floats.

    Args:
        stats: a `CollectStats`, a `StreamStats`, a mapping, or any of these nested;
            every leaf a number or a `()` array.
        prefix: put in front of every name.

    Returns:
        Names, those of nested ones joined by "/", to floats. A mean over no episode is
        NaN there too.

    Raises:
        ValueError: if a leaf is not a scalar.
    """
    flat = {}
    for path, leaf in jax.tree.leaves_with_path(jax.device_get(_named(stats))):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if np.shape(leaf):
            raise ValueError(
                f"`stats` must have scalar leaves, got shape {np.shape(leaf)} at "
                f"{name}."
            )
        flat[prefix + name] = float(leaf)
    return flat


def _named(stats: Any) -> Any:
    if isinstance(stats, Mapping):
        return {name: _named(value) for name, value in stats.items()}
    return stats
