"""Assigns exactly N episodes to lanes, and collects their results.

The episodes, their order and their ids are those of `rollout.kernel.episodes`: the
order in which they start decides which ones count. One that is lost to a fault is not
played again, since the mean would then favour the episodes that do not fail.
"""

from typing import Any

import jax
import numpy as np

from rollout.envs.types import ArrayTree
from rollout.host.rows import RowBlock, place_rows
from rollout.kernel.episodes import count_steps, first_of
from rollout.types import Episodes, Transition

_first_of = jax.jit(first_of)


class EpisodePlan:
    """Assigns `N` episodes to lanes, and collects their results.

    Args:
        next_own: `[B]` int32, the ids of the lanes' own next episodes.
        num_episodes: N.
        first_queued: the position of the first one in the queue, from which a free
            lane takes the next one; None if each lane plays its own next episodes.
        min_steps: no episode starts after so many steps; None for all N.

    Attributes:
        num_episodes: N.
        next_own: `[B]` int32, the own episodes that lanes begin afterwards.
        num_used: positions of the queue that are used up so far.
        num_steps: taken so far in lanes that are not idle; the caller counts them.
        lost: ids of the episodes that were lost to a fault.
    """

    def __init__(
        self,
        next_own: np.ndarray,
        num_episodes: int,
        *,
        first_queued: int | None = None,
        min_steps: int | None = None,
    ) -> None:
        self._first_queued, self._min_steps = first_queued, min_steps
        self._lane = np.arange(len(next_own), dtype=np.int32)
        self._first_id = next_own
        is_queue = first_queued is not None
        self.next_own = next_own if is_queue else next_own + np.int32(num_episodes)
        self.num_used = min(len(next_own), num_episodes) if is_queue else 0
        self.num_episodes = self._num_wanted = num_episodes
        self._num_started, self._num_done, self.num_steps = len(next_own), 0, 0
        self._index = self._lane.copy()  # [B], of the lanes' episodes; idle from N on
        self.lost: list[int] = []
        self._table: Any = None  # of `[N]` results

    @property
    def is_done(self) -> bool:
        """True if all episodes have ended."""
        return self._num_done >= self._num_wanted

    @property
    def mask(self) -> np.ndarray:
        """`[B]` bool, the lanes that play one of the episodes."""
        return self._index < self.num_episodes

    @property
    def episode_id(self) -> np.ndarray:
        """`[B]` int32, the ids of the episodes that the lanes play."""
        if self._first_queued is not None:  # ids of the queue count down from -1
            return np.int32(-1 - self._first_queued) - self._index
        return self._first_id + self._index - self._lane

    def index_of(self, episode_id: np.ndarray) -> np.ndarray:
        """Returns the indices among the `N` of episodes with these ids."""
        if self._first_queued is not None:
            return -1 - self._first_queued - episode_id
        lane = episode_id % len(self._lane)  # own ids are `n * B + lane`
        return episode_id - self._first_id[lane] + lane

    def advance(self, ended: np.ndarray) -> None:
        """Assigns the next episodes, in order, to the lanes where `ended`.

        Args:
            ended: `[B]` bool, lanes whose episode ended or was lost.
        """
        count = int(np.count_nonzero(ended))
        self._num_done += int(np.count_nonzero(ended & self.mask))
        if self._min_steps is not None and self.num_steps >= self._min_steps:
            # Enough: these lanes become idle, and only started episodes are awaited.
            self._num_wanted = min(self._num_wanted, self._num_started)
            self._index[ended] = self.num_episodes
        elif self._first_queued is not None:
            self._index[ended] = self._num_started + np.arange(count, dtype=np.int32)
            self._num_started += count
            self.num_used = min(self._num_started, self.num_episodes)
        else:
            self._index[ended] += len(self._lane)

    def pad(
        self, padded: ArrayTree, block: RowBlock, rows: Transition, max_length: int
    ) -> ArrayTree:
        """Writes rows to whole episodes, `[max_length, N, ...]`; None makes these."""
        if padded is None:
            shape = max_length, self.num_episodes
            padded = jax.tree.map(
                lambda x: np.zeros(shape + x.shape[2:], x.dtype), rows
            )
        # A step's column is its episode, its row its number in the episode.
        mask = block.mask
        place = block.episode_length[mask] - 1, self.index_of(block.episode_id[mask])
        place_rows(padded, place, jax.tree.map(lambda x: x[mask], rows))
        return padded

    def note(self, block: RowBlock, accumulated: ArrayTree) -> None:
        """Records the episodes that end in a block of rows.

        Args:
            block: `[T, B]`, recorded.
            accumulated: `[T, B, ...]`, the accumulators after each row.
        """
        here = (block.terminated | block.truncated) & block.mask
        truncated = block.truncated & ~block.cut
        result = {
            "episode_return": block.episode_return,
            "episode_length": block.episode_length,
            "terminated": block.terminated,
            "truncated": truncated,
            "finished": block.terminated | truncated,
            "lane": block.lane,
            "accumulated": jax.device_get(accumulated),
        }
        ended = jax.tree.map(lambda x: x[here], result)
        if self._table is None:
            make = lambda x: np.zeros((self.num_episodes, *x.shape[1:]), x.dtype)  # noqa: E731
            self._table = jax.tree.map(make, ended)
        place_rows(self._table, self.index_of(block.episode_id[here]), ended)

    def read(self) -> Episodes:
        """Returns the episodes, zero with `mask` False where they do not count."""
        kept = np.ones(self.num_episodes, bool)
        index = self.index_of(np.array(self.lost, np.int32))
        kept[index[index < len(kept)]] = False
        num_steps = count_steps(self._table["episode_length"])
        episodes = Episodes(**self._table, num_steps=num_steps, mask=kept)
        if self._min_steps is not None:
            episodes = _first_of(episodes, self._min_steps)
            self.num_used = int(episodes.mask.sum())
            episodes = episodes.replace(mask=episodes.mask & kept)
        return jax.device_put(episodes)
