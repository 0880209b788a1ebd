"""Assigns exactly N episodes to lanes and collects the results.

Episodes, order and ids are the same as in `rollout.kernel.episodes`: the N episodes are
the first to start. An episode lost to a fault is not replaced, since a replacement
would bias the mean toward episodes that do not fail.
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
    """Assigns `N` episodes to lanes and collects the results.

    Args:
        next_ids: `[B]` int32, ids of the next per-lane episodes.
        num_episodes: N, number of episodes to play.
        first_queued: position of the first episode in the shared queue, from which free
            lanes take episodes. None if every lane plays per-lane episodes instead.
        min_steps: number of steps after which no further episode starts. None plays all
            N episodes.
        max_length: maximum number of stored steps per episode; None stores no steps.

    Attributes:
        num_episodes: N.
        next_ids: `[B]` int32, ids of the per-lane episodes that begin after the plan.
        num_used: number of queue positions used so far.
    """

    def __init__(
        self,
        next_ids: np.ndarray,
        num_episodes: int,
        *,
        first_queued: int | None = None,
        min_steps: int | None = None,
        max_length: int | None = None,
    ) -> None:
        self._first_queued, self._min_steps = first_queued, min_steps
        self._lane = np.arange(len(next_ids), dtype=np.int32)
        self._first_id = next_ids
        is_queue = first_queued is not None
        self.next_ids = next_ids if is_queue else next_ids + np.int32(num_episodes)
        self.num_used = min(len(next_ids), num_episodes) if is_queue else 0
        self.num_episodes = self._num_wanted = num_episodes
        self._num_started, self._num_done, self._num_steps = len(next_ids), 0, 0
        # The first B episodes start in order, one in each lane.
        self._index = self._lane.copy()  # [B], index of the episode; idle from N on
        self._lost_ids: list[int] = []
        self._table: Any = None  # `[N]` results
        self._max_length, self._padded = max_length, None

    @property
    def is_done(self) -> bool:
        """True if all episodes have ended."""
        return self._num_done >= self._num_wanted

    @property
    def mask(self) -> np.ndarray:
        """`[B]` bool, True for lanes that play an assigned episode."""
        return self._index < self.num_episodes

    @property
    def episode_id(self) -> np.ndarray:
        """`[B]` int32, ids of the episodes that the lanes play."""
        if self._first_queued is not None:  # queued ids count down from -1
            return np.int32(-1 - self._first_queued) - self._index
        return self._first_id + self._index - self._lane

    def index_of(self, episode_id: np.ndarray) -> np.ndarray:
        """Returns the indices of the episodes with these ids; N or more if idle."""
        if self._first_queued is not None:
            return -1 - self._first_queued - episode_id
        lane = episode_id % len(self._lane)  # per-lane ids are `n * B + lane`
        return episode_id - self._first_id[lane] + lane

    def count_steps(self, mask: np.ndarray) -> None:
        """Counts the steps of a row, one per True in `mask`, for `min_steps`."""
        self._num_steps += int(np.count_nonzero(mask))

    def mark_lost(self, episode_id: np.ndarray) -> None:
        """Marks the episodes with these ids as lost to a fault."""
        self._lost_ids += episode_id.tolist()

    def advance(self, ended: np.ndarray) -> None:
        """Assigns the next episodes, in order, to the lanes whose episode has ended."""
        count = int(np.count_nonzero(ended))
        self._num_done += int(np.count_nonzero(ended & self.mask))
        if self._min_steps is not None and self._num_steps >= self._min_steps:
            # There are enough steps: these lanes become idle, other episodes continue.
            self._num_wanted = min(self._num_wanted, self._num_started)
            self._index[ended] = self.num_episodes
        elif self._first_queued is not None:
            # Lanes that end in the same row take the next episodes in lane order, as in
            # the kernel. Idle lanes take indices of at least N, so they stay idle.
            self._index[ended] = self._num_started + np.arange(count, dtype=np.int32)
            self._num_started += count
            self.num_used = min(self._num_started, self.num_episodes)
        else:  # episode n of lane b has the index n * B + b
            self._index[ended] += len(self._lane)

    def record(self, block: RowBlock, rows: Transition) -> None:
        """Stores the results of episodes that end in a block, and their padded rows."""
        ended = (block.terminated | block.truncated) & block.mask
        # `truncated` excludes truncations by `max_episode_steps`.
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
        index = self.index_of(block.episode_id[ended])
        self._table = _write(self._table, (self.num_episodes,), index, result, ended)
        if self._max_length is not None:
            # Row: number of the step in the episode. Column: index of the episode.
            mask, shape = block.mask, (self._max_length, self.num_episodes)
            index = self.index_of(block.episode_id[mask])
            index, rows = (block.episode_length[mask] - 1, index), jax.device_get(rows)
            self._padded = _write(self._padded, shape, index, rows, mask)

    def read(self) -> tuple[Episodes, Transition]:
        """Returns the episodes, `[N]`, and their padded rows, `[max_length, N, ...]`.

        Lost and unused episodes are zero, with `mask` False. The rows are None if the
        plan stores no steps.
        """
        mask = np.ones(self.num_episodes, bool)
        index = self.index_of(np.array(self._lost_ids, np.int32))
        mask[index[index < len(mask)]] = False  # idle lanes can also fail
        num_steps = self._table["episode_length"].sum(dtype=np.int32)
        episodes = Episodes(**self._table, num_steps=num_steps, mask=mask)
        if self._min_steps is not None:
            episodes = _first_of(episodes, self._min_steps)
            self.num_used = int(episodes.mask.sum())
            episodes = episodes.replace(mask=episodes.mask & mask)
        for padded in jax.tree.leaves(self._padded):
            padded[:, ~np.asarray(episodes.mask)] = 0
        return jax.device_put((episodes, self._padded))


def _write(
    table: ArrayTree, shape: tuple[int, ...], index: Any, rows: ArrayTree, mask: Any
) -> ArrayTree:
    """Writes the rows selected by `mask` to a table; None creates the table."""
    # Flatten `[T, B, ...]` to `[K, ...]`: each of the K selected rows has an index.
    rows = jax.tree.map(lambda x: x[mask], rows)
    if table is None:
        table = jax.tree.map(lambda x: np.zeros(shape + x.shape[1:], x.dtype), rows)
    place_rows(table, index, rows)
    return table
