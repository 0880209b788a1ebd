"""Exactly N episodes: which lane plays which, in a loop in Python.

The episodes, their order and their numbers are those of `rollout.kernel.episodes`: what
counts is settled by the order in which they start. One that is lost to a fault is not
played again, for what fails would be missing from the mean.
"""

from typing import Any

import jax
import numpy as np

from envs.types import ArrayTree
from rollout.host.lanes import Lanes
from rollout.types import Episodes


class Seats:
    """Assignment of `N` episodes to lanes, and the results of those that are over.

    Args:
        first: `[E]` int, the episodes that the lanes play first; idle from N on.
        num_episodes: N.
        ids: `[E]` int32, what the id of an episode is counted from, and the difference
            from one to the next: of the queue, or of a lane's own.
        is_queue: whether a lane that is free takes the next episode that has not
            started, rather than the next one of its own.
        min_steps: no episode starts once there are so many steps.
    """

    def __init__(
        self,
        first: np.ndarray,
        num_episodes: int,
        ids: np.ndarray,
        *,
        is_queue: bool,
        min_steps: int | None = None,
    ) -> None:
        self.index, self._first, self._ids = first.copy(), first, ids
        self._is_queue = is_queue
        self._num_episodes, self._min_steps = num_episodes, min_steps
        self._num_started, self._num_over, self._num_steps = len(first), 0, 0
        self._num_wanted = num_episodes
        self._table = {
            "episode_return": np.zeros(num_episodes, np.float32),
            "episode_length": np.zeros(num_episodes, np.int32),
            "terminated": np.zeros(num_episodes, bool),
            "truncated": np.zeros(num_episodes, bool),
            "finished": np.zeros(num_episodes, bool),
            "lane": np.zeros(num_episodes, np.int32),
        }
        self._is_lost = np.zeros(num_episodes, bool)
        self._accumulated: tuple | None = None

    @property
    def is_lost(self) -> np.ndarray:
        """`[N]` bool, the episodes that were lost to a fault."""
        return self._is_lost

    @property
    def is_over(self) -> bool:
        """Tells whether all episodes are over."""
        return self._num_over >= self._num_wanted

    @property
    def mask(self) -> np.ndarray:
        """`[E]` bool, the lanes that play one of the episodes."""
        return self.index < self._num_episodes

    @property
    def episode_id(self) -> np.ndarray:
        """`[E]` int32, the ids of the episodes that the lanes play."""
        sign = -1 if self._is_queue else 1
        return (self._ids + sign * self.index).astype(np.int32)

    @property
    def num_queued(self) -> int:
        """Number of episodes that the call has taken from the queue."""
        if not self._is_queue:
            return 0
        if not self.is_over:  # it was cut short
            return min(self._num_started, self._num_episodes)
        return int(self._counts.sum())

    @property
    def _counts(self) -> np.ndarray:
        """`[N]` bool, the episodes that count, lost ones among them."""
        length = self._table["episode_length"]
        if self._min_steps is None:
            return np.ones(length.shape, bool)
        return np.cumsum(length) - length < self._min_steps

    def after(self, lanes: Lanes) -> np.ndarray:
        """`[E]` int32, the own episodes that the lanes begin when the call is over."""
        if self._is_queue:
            return lanes.next_own()
        return (self._ids + self._first + self._num_episodes).astype(np.int32)

    def count_steps(self, num_steps: int) -> None:
        """Counts steps of lanes that are not idle, before `free`."""
        self._num_steps += num_steps

    def note(
        self,
        done: np.ndarray,
        cut: np.ndarray,
        *,
        lane: np.ndarray,
        **figures: np.ndarray,
    ) -> None:
        """Notes the episodes of the lanes where `done`; `cut`: by `max_steps` alone."""
        here = done & self.mask
        index = self.index[here]
        truncated = figures["truncated"] & ~cut
        finished = figures["terminated"] | truncated
        figures |= {"truncated": truncated, "finished": finished, "lane": lane}
        for name, table in self._table.items():
            table[index] = figures[name][here]
        self._num_over += len(index)

    def lose(self, faulty: np.ndarray) -> None:
        """Notes the episodes of these lanes as lost."""
        here = faulty & self.mask
        self._is_lost[self.index[here]] = True
        self._num_over += int(here.sum())

    def free(self, over: np.ndarray) -> None:
        """Gives the lanes where `over` their next episodes, in the order of lanes."""
        count = int(over.sum())
        if self._is_queue:
            self.index[over] = self._num_started + np.arange(count)
        else:
            self.index[over] += len(self.index)
        if self._min_steps is not None and self._num_steps >= self._min_steps:
            self.index[over] = self._num_episodes
            self._num_wanted = min(self._num_wanted, self._num_started)
        self._num_started += count

    def index_of(self, episode_id: Any, lane: Any) -> np.ndarray:
        """The numbers of episodes among the `N`, of their ids and lanes."""
        return (episode_id - self._ids[lane]) * (-1 if self._is_queue else 1)

    def accumulate(self, index: np.ndarray, figures: ArrayTree) -> None:
        """Notes what was accumulated in the episodes of these numbers, `[n, ...]`."""
        leaves, structure = jax.tree.flatten(figures)
        if self._accumulated is None:
            shape = (self._num_episodes,)
            arrays = [np.zeros(shape + x.shape[1:], x.dtype) for x in leaves]
            self._accumulated = structure, arrays
        for table, rows in zip(self._accumulated[1], leaves, strict=True):
            table[index] = rows

    def read(self) -> Episodes:
        """The episodes, NumPy; zero, with `mask` False, where they do not count."""
        length, mask = self._table["episode_length"], self._counts & ~self._is_lost
        for table in (*self._table.values(), *self._figures()):
            table[~mask] = 0
        structure = self._accumulated[0] if self._accumulated else None
        num_steps: Any = np.int32(length.sum())
        return Episodes(
            **self._table,
            num_steps=num_steps,
            mask=mask,
            accumulated=structure.unflatten(self._figures()) if structure else (),
        )

    def _figures(self) -> list[np.ndarray]:
        return self._accumulated[1] if self._accumulated else []
