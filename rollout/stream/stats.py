"""What a stream counts over its batches."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout.stats import CollectStats


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


def pack(stats: CollectStats, num_faulty: jax.Array, num_steps: jax.Array) -> jax.Array:
    """Puts what `add` takes of a batch into one array, `[5]` int32, read at once."""
    means = jnp.stack((stats.return_mean, stats.length_mean)).astype(jnp.float32)
    counts = jnp.stack((num_steps, stats.num_episodes, num_faulty)).astype(jnp.int32)
    return jnp.concatenate((counts, lax.bitcast_convert_type(means, jnp.int32)))


def zero() -> np.ndarray:
    """Nothing counted: `[7]` float64, batches, steps, s, episodes, returns, ..."""
    return np.zeros(7)


def add(totals: np.ndarray, counted: np.ndarray, seconds: float) -> np.ndarray:
    """Adds a batch to what was counted; a new array."""
    num_steps, num_episodes, num_faulty = counted[:3]
    means = counted[3:].view(np.float32).astype(np.float64)
    sums = num_episodes * means if num_episodes else np.zeros(2)
    batch = np.array([1, num_steps, seconds, num_episodes, *sums, num_faulty])
    return totals + batch


def read(totals: np.ndarray) -> StreamStats:
    """Reads what was counted."""
    batches, steps, seconds, episodes, returns, lengths, faulty = totals.tolist()
    return StreamStats(
        collect_batches=int(batches),
        collect_steps=int(steps),
        collect_episodes=int(episodes),
        collect_seconds=seconds,
        steps_per_second=steps / seconds if seconds else np.nan,
        return_mean=returns / episodes if episodes else np.nan,
        length_mean=lengths / episodes if episodes else np.nan,
        faulty_episodes=int(faulty),
    )
