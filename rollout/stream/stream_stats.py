"""`StreamStats`: statistics of a stream, accumulated over its batches."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from rollout.logs import EpisodeWindow
from rollout.stats import CollectStats, Moments, by_name, merge, plural
from rollout.types import Carry

_WINDOW = 100  # episodes


class StreamStats(NamedTuple):
    """Statistics of a stream since its start, or since `reset_stats`.

    `at_batch_end="reset"` discards long episodes more often than short episodes, so all
    means are biased toward short episodes.

    Attributes:
        collected: statistics of all completed episodes.
        window: moving window over the last 100 episodes.
        batches: number of returned batches.
        steps: environment steps over all lanes, including steps of dropped episodes.
        seconds: total time from the start of each batch until `next` received it,
            without compilation. With `prefetch=1` it includes the training code.
        faulty_episodes: number of episodes dropped by `on_fault="drop"`.
    """

    collected: CollectStats
    window: EpisodeWindow
    batches: int = 0
    steps: int = 0
    seconds: float = 0.0
    faulty_episodes: int = 0

    @classmethod
    def create(cls, carry: Carry) -> Self:
        """Returns the statistics before the first batch."""
        # Use the types that `merge` returns, so that a state saved before the first
        # batch has the structure of every later state.
        fields: Any = dataclasses.fields(CollectStats)
        counts: Any = {x.name: 0 for x in fields if x.name.startswith("num_")}
        sums: Any = dict.fromkeys(("total", "squared_deviations"), np.float64(0))
        sums |= {"count": np.int64(0), "low": np.float32(np.inf)}
        zero = Moments(**sums, high=-sums["low"])
        names = by_name(carry.episode.accumulated, carry.episode.episode_id.shape)
        collected = CollectStats(
            **counts, returns=zero, lengths=zero, accumulated=dict.fromkeys(names, zero)
        )
        return cls(collected, jax.device_get(EpisodeWindow.init(_WINDOW)))

    def add(
        self,
        stats: CollectStats,
        window: EpisodeWindow,
        *,
        steps: int,
        seconds: float,
        num_faulty: int,
    ) -> Self:
        """Adds a batch; `window` is the window after the batch, on the host."""
        return type(self)(
            collected=merge([self.collected, stats]),
            window=window,
            batches=self.batches + 1,
            steps=self.steps + steps,
            seconds=self.seconds + seconds,
            faulty_episodes=self.faulty_episodes + num_faulty,
        )

    def __str__(self) -> str:
        """Formats the window, the steps, the speed and the dropped episodes."""
        text = f"{self.window}, {plural(self.steps, 'step')}"
        if self.seconds:
            text += f", {self.steps / self.seconds:,.0f} per second"
        if self.faulty_episodes:
            text += f", {plural(self.faulty_episodes, 'episode')} dropped"
        return text
