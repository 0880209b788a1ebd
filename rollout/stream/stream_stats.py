"""`StreamStats`: statistics of a stream, accumulated over its batches."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from rollout.episode_window import EpisodeWindow
from rollout.moments import Moments, by_name, merge
from rollout.stats import CollectStats, plural
from rollout.types import Carry

_WINDOW = 100  # episodes


class StreamStats(NamedTuple):
    """Statistics of a stream since it began, or since `reset_stats`.

    With `at_batch_end="reset"`, which gives up the longer episodes, all means favour
    short ones.

    Attributes:
        collected: statistics of all episodes that ended.
        window: the last 100 episodes.
        batches: batches returned.
        steps: environment steps over all lanes, also those of dropped episodes.
        seconds: time from the beginning of each batch until `next` had it, without
            compilation; with `prefetch=1` your own code runs in it, too.
        faulty_episodes: episodes that `on_fault="drop"` dropped.
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
        # The types are those that `merge` returns: a state that is saved before the
        # first batch has the structure of a later one.
        fields: Any = dataclasses.fields(CollectStats)
        counts: Any = {x.name: 0 for x in fields if x.name.startswith("num_")}
        sums: Any = dict.fromkeys(("total", "squared_deviations"), np.float64(0))
        sums |= {"count": np.int64(0), "low": np.float32(np.inf)}
        none = Moments(**sums, high=-sums["low"])
        names = by_name(carry.episode.accumulated, carry.episode.episode_id.shape)
        collected = CollectStats(
            **counts, returns=none, lengths=none, accumulated=dict.fromkeys(names, none)
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
        """Adds a batch; `window` is that after it, on the host."""
        return type(self)(
            collected=merge([self.collected, stats]),
            window=window,
            batches=self.batches + 1,
            steps=self.steps + steps,
            seconds=self.seconds + seconds,
            faulty_episodes=self.faulty_episodes + num_faulty,
        )

    def __str__(self) -> str:
        """Formats the window, the steps and their speed, and the number of faults."""
        text = f"{self.window}, {plural(self.steps, 'step')}"
        if self.seconds:
            text += f", {self.steps / self.seconds:,.0f} per second"
        if self.faulty_episodes:
            text += f", {plural(self.faulty_episodes, 'episode')} dropped"
        return text
