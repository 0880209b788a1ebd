"""Assigns exactly N episodes to lanes, and collects their results.

The episodes, their order and their ids are those of `rollout.kernel.episodes`: the
order in which they start decides which ones count. One that is lost to a fault is not
played again, since the mean would then favour the episodes that do not fail.
"""

from typing import Any

import jax
import numpy as np

from rollout.envs.host.arrays import place_rows
from rollout.envs.types import ArrayTree
from rollout.host.rows import RowBlock
from rollout.kernel.episodes import first_of
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
        max_length: of the rows of an episode; None to keep none.

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
        max_length: int | None = None,
    ) -> None:
        self._first_queued, self._min_steps = first_queued, min_steps
        self._lane = np.arange(len(next_own), dtype=np.int32)
        self._first_id = next_own
        is_queue = first_queued is not None
        self.next_own = next_own if is_queue else next_own + np.int32(num_episodes)
        self.num_used = min(len(next_own), num_episodes) if is_queue else 0
        self.num_episodes = self._num_wanted = num_episodes
        self._num_started, self._num_done, self.num_steps = len(next_own), 0, 0
        # The first B episodes start in order, one in each lane.
        self._index = self._lane.copy()  # [B], of the lanes' episodes; idle from N on
        self.lost: list[int] = []
        self._table: Any = None  # of `[N]` results
        self._max_length, self._padded = max_length, None

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
        """Assigns the next episodes, in order, to the lanes whose episode is over."""
        count = int(np.count_nonzero(ended))
        self._num_done += int(np.count_nonzero(ended & self.mask))
        if self._min_steps is not None and self.num_steps >= self._min_steps:
            # Enough: these lanes become idle, and only started episodes are awaited.
            self._num_wanted = min(self._num_wanted, self._num_started)
            self._index[ended] = self.num_episodes
        elif self._first_queued is not None:
            # Lanes that end in the same row take the next episodes by their numbers, as
            # in the kernel; idle lanes take numbers from N on, and so stay idle.
            self._index[ended] = self._num_started + np.arange(count, dtype=np.int32)
            self._num_started += count
            self.num_used = min(self._num_started, self.num_episodes)
        else:  # episode n of lane b has the number n * B + b
            self._index[ended] += len(self._lane)

    def note(self, block: RowBlock, rows: Transition) -> None:
        """Records the episodes that end in a block, and pads its recorded rows."""
        ended = (block.terminated | block.truncated) & block.mask
        # A cut at `max_episode_steps` is no ending of the episode's own.
        truncated = block.truncated & ~block.cut
        result = {
            "episode_return": block.episode_return,
            "episode_length": block.episode_length,
            "terminated": block.terminated,
            "truncated": truncated,
            "finished": block.terminated | truncated,
            "lane": block.lane,
            "accumulated": jax.device_get(rows.accumulated),
        }
        place = self.index_of(block.episode_id[ended])
        self._table = _place(self._table, (self.num_episodes,), place, result, ended)
        if self._max_length is not None:
            # A step's column is its episode, its row its number in the episode.
            mask, shape = block.mask, (self._max_length, self.num_episodes)
            index = self.index_of(block.episode_id[mask])
            place, rows = (block.episode_length[mask] - 1, index), jax.device_get(rows)
            self._padded = _place(self._padded, shape, place, rows, mask)

    def read(self) -> tuple[Episodes, Transition]:
        """Returns the episodes, zero with `mask` False where they do not count.

        Also returns their rows, `[max_length, N, ...]`, None if they are not padded.
        """
        kept = np.ones(self.num_episodes, bool)
        index = self.index_of(np.array(self.lost, np.int32))
        kept[index[index < len(kept)]] = False  # an idle lane may fail, too
        num_steps = self._table["episode_length"].sum(dtype=np.int32)
        episodes = Episodes(**self._table, num_steps=num_steps, mask=kept)
        if self._min_steps is not None:
            episodes = _first_of(episodes, self._min_steps)
            self.num_used = int(episodes.mask.sum())
            episodes = episodes.replace(mask=episodes.mask & kept)
        for padded in jax.tree.leaves(self._padded):
            padded[:, ~np.asarray(episodes.mask)] = 0
        return jax.device_put((episodes, self._padded))


def _place(
    table: ArrayTree, shape: tuple[int, ...], place: Any, rows: ArrayTree, mask: Any
) -> ArrayTree:
    """Writes the rows where `mask` to a table, which is made of `shape` at first."""
    # `[T, B, ...]` become `[K, ...]`, and each of the K has a place.
    rows = jax.tree.map(lambda x: x[mask], rows)
    if table is None:
        table = jax.tree.map(lambda x: np.zeros(shape + x.shape[1:], x.dtype), rows)
    place_rows(table, place, rows)
    return table
