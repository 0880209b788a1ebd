"""`StreamStats`: statistics of a stream, accumulated over its batches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout.envs.types import ArrayTree
from rollout.stats import CollectStats, plural


class StreamStats(NamedTuple):
    """Statistics of a stream since it began, or since `reset_stats`.

    Attributes:
        collect_batches: batches returned.
        collect_steps: environment steps over all lanes, also those of dropped episodes.
        collect_episodes: episodes that ended.
        collect_seconds: time spent collecting, without compilation; with `prefetch=1`
            it passes while your own code runs.
        steps_per_second: `collect_steps / collect_seconds`; NaN before the first batch.
        return_mean: mean undiscounted return of these episodes, NaN if there are none.
        length_mean: mean length of these episodes in steps, NaN if there are none.
        faulty_episodes: episodes that `on_fault="drop"` dropped.
        accumulated: the mean over these episodes of each value in
            `CollectStats.accumulated`, by name.
        window_episodes: number of last episodes in the two means below, at most the
            option `window_episodes`; None without it.
        window_return_mean: mean return of these, NaN if there are none.
        window_length_mean: mean length of these in steps, NaN if there are none.
    """

    collect_batches: int
    collect_steps: int
    collect_episodes: int
    collect_seconds: float
    steps_per_second: float
    return_mean: float
    length_mean: float
    faulty_episodes: int
    accumulated: dict[str, float]
    window_episodes: int | None = None
    window_return_mean: float | None = None
    window_length_mean: float | None = None

    def __str__(self) -> str:
        """Formats mean returns, and the numbers of episodes, steps and faults."""
        text = "no episode has ended"
        if self.collect_episodes:
            number = plural(self.collect_episodes, "episode")
            text = f"return {self.return_mean:.6g}, {number}"
        if self.window_episodes:
            last = plural(self.window_episodes, "episode")
            text += f" ({self.window_return_mean:.6g}, last {last})"
        text += f", {plural(self.collect_steps, 'step')}"
        if self.collect_batches:
            text += f", {self.steps_per_second:,.0f} per second"
        if self.faulty_episodes:
            text += f", {plural(self.faulty_episodes, 'episode')} dropped"
        return text


def totals_of(
    stats: CollectStats, num_faulty: jax.Array, num_steps: jax.Array
) -> jax.Array:
    """Packs the counts of a batch for `add` into one array, `[5 + K]` int32.

    One array is one copy to the host. K values are accumulated per episode.
    """
    moments = stats.returns, stats.lengths, *stats.accumulated.values()
    sums = jnp.stack([x.total for x in moments]).astype(jnp.float32)
    counts = jnp.stack((num_steps, stats.num_episodes, num_faulty)).astype(jnp.int32)
    # The bits of the float sums as int32, which `add` views as float32 again.
    return jnp.concatenate((counts, lax.bitcast_convert_type(sums, jnp.int32)))


def slide(recent: np.ndarray, newest: np.ndarray) -> np.ndarray:
    """Moves the window on by the episodes of a batch; returns a new array."""
    # Slots of length 0 are unused.
    return np.concatenate((recent, newest[newest[:, 1] > 0]))[-len(recent) :]


def zero(names: tuple[str, ...]) -> np.ndarray:
    """Returns zero totals, `[7 + K]` float64, as `add` sums them up."""
    return np.zeros(7 + len(names))


def add(totals: np.ndarray, counted: np.ndarray, seconds: float) -> np.ndarray:
    """Adds a batch to the totals; returns a new array."""
    num_steps, num_episodes, num_faulty = counted[:3]
    sums = counted[3:].view(np.float32).astype(np.float64)
    batch = np.array([1, num_steps, seconds, num_episodes, num_faulty, *sums])
    return totals + batch


def names_of(accumulated: ArrayTree, num_envs: int) -> tuple[str, ...]:
    """Returns the names of the values that are one number per episode, in order."""
    return tuple(
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree.leaves_with_path(accumulated)
        if leaf.shape == (num_envs,)
    )


def read(totals: np.ndarray, recent: np.ndarray, names: tuple[str, ...]) -> StreamStats:
    """Computes the statistics from the totals and the window."""
    batches, steps, seconds, episodes, faulty, *sums = totals.tolist()
    window: dict[str, Any] = {}
    if len(recent):
        last = recent[recent[:, 1] > 0].astype(np.float64)
        of_window = last.mean(axis=0) if len(last) else np.full(2, np.nan)
        window = {
            "window_episodes": len(last),
            "window_return_mean": float(of_window[0]),
            "window_length_mean": float(of_window[1]),
        }
    returns, lengths, *means = (x / episodes if episodes else np.nan for x in sums)
    return StreamStats(
        collect_batches=int(batches),
        collect_steps=int(steps),
        collect_episodes=int(episodes),
        collect_seconds=seconds,
        steps_per_second=steps / seconds if seconds else np.nan,
        return_mean=returns,
        length_mean=lengths,
        faulty_episodes=int(faulty),
        accumulated=dict(zip(names, means, strict=True)),
        **window,
    )
