"""`StreamStats`: statistics of a stream, accumulated over its batches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rollout import multihost
from rollout.episode_window import EpisodeWindow
from rollout.moments import Moments, merge, moments, moments_by_name
from rollout.stats import CollectStats, plural
from rollout.types import Carry


class StreamStats(NamedTuple):
    """Statistics of a stream since it began, or since `reset_stats`.

    Attributes:
        collect_batches: batches returned.
        collect_steps: environment steps over all lanes, also those of dropped episodes.
        collect_episodes: episodes that ended.
        collect_seconds: time from the beginning of each batch until `next` had it,
            without compilation; with `prefetch=1` your own code runs in it, too.
        steps_per_second: `collect_steps / collect_seconds`; NaN before the first batch.
        return_mean: mean undiscounted return of these episodes, NaN if there are none.
        length_mean: mean length of these episodes in steps, NaN if there are none.
        faulty_episodes: episodes that `on_fault="drop"` dropped.
        accumulated: the mean over these episodes of each value in
            `CollectStats.accumulated`, by name.
        window_episodes: number of episodes in the two means below, at most the option
            `window_episodes`; None without it. See `EpisodeWindow`.
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


class Totals(NamedTuple):
    """Sums over the batches of a stream, on the host.

    Attributes:
        moments: moments of the returns of all episodes, of their lengths, and of their
            accumulated values by name, in float64.
        steps: environment steps, also those of dropped episodes.
        batches: number of batches.
        seconds: time spent collecting.
        faulty: number of dropped episodes.
        window: the last episodes; None without `window_episodes`.
    """

    moments: tuple[Moments, Moments, dict[str, Moments]]
    steps: int
    batches: int
    seconds: float
    faulty: int
    window: EpisodeWindow | None


def zero(carry: Carry, window_episodes: int) -> Totals:
    """Returns the totals before the first batch."""
    episode = carry.episode
    none = jnp.zeros_like(episode.episode_id, bool)
    nothing = (
        moments(episode.episode_return, none),
        moments(episode.episode_length, none),
        moments_by_name(episode.accumulated, none),
    )
    window = EpisodeWindow.create(window_episodes) if window_episodes else None
    return Totals(merge([nothing]), 0, 0, 0.0, 0, jax.device_get(window))


def add(
    totals: Totals,
    stats: CollectStats,
    counted: Any,
    *,
    steps: int,
    faulty: int,
    seconds: float,
) -> Totals:
    """Adds a batch, whose statistics are on the host."""
    new, window = (stats.returns, stats.lengths, stats.accumulated), totals.window
    if window is not None:
        window = jax.tree.map(multihost.gather, _move_on(window, counted))
    return Totals(
        moments=merge([totals.moments, new]),
        steps=totals.steps + steps,
        batches=totals.batches + 1,
        seconds=totals.seconds + seconds,
        faulty=totals.faulty + faulty,
        window=jax.device_get(window),
    )


_move_on = jax.jit(EpisodeWindow.add)


def read(totals: Totals) -> StreamStats:
    """Computes the statistics from the totals."""
    returns, lengths, accumulated = totals.moments
    seconds = float(totals.seconds)
    window: dict[str, Any] = {}
    if totals.window is not None:
        window = {
            "window_episodes": int(totals.window.num_episodes),
            "window_return_mean": float(totals.window.return_mean),
            "window_length_mean": float(totals.window.length_mean),
        }
    return StreamStats(
        collect_batches=int(totals.batches),
        collect_steps=int(totals.steps),
        collect_episodes=int(returns.count),
        collect_seconds=seconds,
        steps_per_second=int(totals.steps) / seconds if seconds else np.nan,
        return_mean=float(returns.mean),
        length_mean=float(lengths.mean),
        faulty_episodes=int(totals.faulty),
        accumulated={name: float(x.mean) for name, x in accumulated.items()},
        **window,
    )
