"""Assigns exactly N episodes to lanes and collects the results.

Episodes, order and ids are the same as in `rollout.kernel.episodes`: the N episodes are
the first to start. An episode lost to a fault is not replaced, since a replacement
would bias the mean toward episodes that do not fail.
"""

from typing import Any, NamedTuple, Self

import jax
import numpy as np

from rollout.base.types import ArrayTree
from rollout.envs.host.arrays import place_rows
from rollout.host.rows import Rows
from rollout.kernel.episodes import keep_first
from rollout.types import Episodes, Transition

_keep_first = jax.jit(keep_first)


class EpisodePlan(NamedTuple):
    """The assignment of `N` episodes to lanes, a part of `HostState`.

    Attributes:
        num_episodes: N, number of episodes to play.
        first_queued: position of the first episode in the shared queue, from which free
            lanes take episodes. None if every lane plays per-lane episodes instead.
        min_steps: number of steps after which no further episode starts. None plays all
            N episodes.
        first_id: `[B]` int32, ids of the next per-lane episodes at the start.
        index: `[B]` int32, index of the episode of each lane; N or more if idle.
        num_wanted: number of episodes that must end, N until `min_steps` is reached.
        num_started, num_done, num_steps: number of episodes that have started and
            ended, and of their steps.
        lost_ids: ids of the episodes that were lost to a fault.
    """

    num_episodes: int
    first_queued: int | None
    min_steps: int | None
    first_id: np.ndarray
    index: np.ndarray
    num_wanted: int
    num_started: int
    num_done: int = 0
    num_steps: int = 0
    lost_ids: tuple[int, ...] = ()

    @classmethod
    def init(
        cls,
        next_ids: np.ndarray,
        num_episodes: int,
        *,
        first_queued: int | None = None,
        min_steps: int | None = None,
    ) -> Self:
        """Assigns the first B episodes in order, one to each lane."""
        return cls(
            num_episodes=num_episodes,
            first_queued=first_queued,
            min_steps=min_steps,
            first_id=next_ids,
            index=np.arange(len(next_ids), dtype=np.int32),
            num_wanted=num_episodes,
            num_started=len(next_ids),
        )

    @property
    def is_done(self) -> bool:
        """True if all episodes have ended."""
        return self.num_done >= self.num_wanted

    @property
    def mask(self) -> np.ndarray:
        """`[B]` bool, True for lanes that play an assigned episode."""
        return self.index < self.num_episodes

    @property
    def num_used(self) -> int:
        """Number of queue positions used so far."""
        is_queue = self.first_queued is not None
        return min(self.num_started, self.num_episodes) if is_queue else 0

    @property
    def next_ids(self) -> np.ndarray:
        """`[B]` int32, ids of the per-lane episodes that begin after the plan."""
        is_queue = self.first_queued is not None
        return self.first_id + np.int32(0 if is_queue else self.num_episodes)

    @property
    def episode_id(self) -> np.ndarray:
        """`[B]` int32, ids of the episodes that the lanes play."""
        if self.first_queued is not None:  # queued ids count down from -1
            return np.int32(-1 - self.first_queued) - self.index
        return self.first_id + self.index - np.arange(len(self.index), dtype=np.int32)

    def index_of(self, episode_id: np.ndarray) -> np.ndarray:
        """Returns the indices of the episodes with these ids; N or more if idle."""
        if self.first_queued is not None:
            return -1 - self.first_queued - episode_id
        lane = episode_id % len(self.index)  # per-lane ids are `n * B + lane`
        return episode_id - self.first_id[lane] + lane

    def count_steps(self, mask: np.ndarray) -> Self:
        """Counts the steps of a row, one per True in `mask`, for `min_steps`."""
        if self.min_steps is None:
            return self
        return self._replace(num_steps=self.num_steps + int(np.count_nonzero(mask)))

    def assign_next(self, done: np.ndarray) -> Self:
        """Assigns the next episodes, in order, to the lanes whose episode has ended."""
        index, count = self.index.copy(), int(np.count_nonzero(done))
        num_done = self.num_done + int(np.count_nonzero(done & self.mask))
        num_started, num_wanted = self.num_started, self.num_wanted
        if self.min_steps is not None and self.num_steps >= self.min_steps:
            # There are enough steps: these lanes become idle, other episodes continue.
            num_wanted = min(num_wanted, num_started)
            index[done] = self.num_episodes
        elif self.first_queued is not None:
            # Lanes that end in the same row take the next episodes in lane order, as in
            # the kernel. Idle lanes take indices of at least N, so they stay idle.
            index[done] = num_started + np.arange(count, dtype=np.int32)
            num_started += count
        else:  # episode n of lane b has the index n * B + b
            index[done] += len(index)
        return self._replace(
            index=index,
            num_done=num_done,
            num_started=num_started,
            num_wanted=num_wanted,
        )


class EpisodeTable:
    """Collects the results of the episodes of a plan.

    Args:
        num_episodes: N, number of episodes.
        max_length: maximum number of stored steps per episode; None stores no steps.
    """

    def __init__(self, num_episodes: int, max_length: int | None) -> None:
        self._num_episodes, self._max_length = num_episodes, max_length
        self._results: Any = None  # `[N]`
        self._padded: Any = None  # `[max_length, N]`

    @property
    def is_empty(self) -> bool:
        """True before the first `add`, which defines the shapes."""
        return self._results is None

    def add(self, plan: EpisodePlan, rows: Rows, recorded: Transition) -> None:
        """Stores the results of episodes that end in these rows, and their steps."""
        ended = (rows.terminated | rows.truncated) & rows.mask
        # `truncated` excludes truncations by `max_episode_steps`.
        truncated = rows.truncated & ~rows.is_cut
        result = {
            "episode_return": rows.episode_return,
            "episode_length": rows.episode_length,
            "terminated": rows.terminated,
            "truncated": truncated,
            "finished": rows.terminated | truncated,
            "lane": rows.lane,
            "accumulated": jax.device_get(recorded.accumulated),
        }
        index = plan.index_of(rows.episode_id[ended])
        self._results = _write(
            self._results, (self._num_episodes,), index, result, ended
        )
        if self._max_length is not None:
            # Row: number of the step in the episode. Column: index of the episode.
            mask, shape = rows.mask, (self._max_length, self._num_episodes)
            index = rows.episode_length[mask] - 1, plan.index_of(rows.episode_id[mask])
            steps = jax.device_get(recorded)
            self._padded = _write(self._padded, shape, index, steps, mask)

    def read(self, plan: EpisodePlan) -> tuple[Episodes, int]:
        """Returns the episodes, `[N]`, and the number of used queue positions.

        Lost and unused episodes are zero, with `mask` False. `trajectory` has the
        padded steps, `[max_length, N, ...]`, if they are stored.
        """
        mask, num_used = np.ones(self._num_episodes, bool), plan.num_used
        index = plan.index_of(np.array(plan.lost_ids, np.int32))
        mask[index[index < len(mask)]] = False  # idle lanes can also fail
        num_steps = self._results["episode_length"].sum(dtype=np.int32)
        episodes = Episodes(**self._results, num_steps=num_steps, mask=mask)
        if plan.min_steps is not None:
            episodes = _keep_first(episodes, plan.min_steps)
            # The steps of lost episodes are missing, so `keep_first` may select
            # episodes that have not started.
            selected = episodes.mask & (np.arange(len(mask)) < plan.num_started)
            num_used = int(selected.sum())
            episodes = episodes.replace(mask=selected & mask)
        if self._padded is not None:
            for leaf in jax.tree.leaves(self._padded):
                leaf[:, ~np.asarray(episodes.mask)] = 0
            episodes = episodes.replace(trajectory=self._padded)
        return jax.device_put(episodes), num_used


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
