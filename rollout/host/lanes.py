"""The episodes that the lanes are in, as a loop in Python counts them."""

from typing import Any

import chex
import jax
import numpy as np

from envs.types import ArrayTree
from rollout.host.rows import views_of
from rollout.kernel import episode_keys
from rollout.types import Episode

_AHEAD = 256  # seeds that are drawn at once


class Lanes:
    """Per-lane episode bookkeeping of the host loop, for `E` lanes.

    Attributes:
        episodes: `[3, E]` int32, the memory of the next three, see `rows.views_of`.
        episode_id: `[E]` int32, as `Episode` has it.
        episode_return: `[E]` float32, so far.
        episode_length: `[E]` int32, so far.
        over: `[E]` bool, lanes whose policy has not seen their episode yet.
        any_over: whether there may be one.
        first_row: `[E]` int, the row of the call in which their episode begins.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.episodes = np.zeros((3, num_envs), np.int32)
        self.episode_id, self.episode_return, self.episode_length = views_of(
            self.episodes
        )
        self.episode_id[:] = np.arange(num_envs)
        self.own_id = self.episode_id.copy()  # of the last episode of the lane's own
        self.over, self.any_over = np.ones(num_envs, bool), True
        self.first_row = np.zeros(num_envs, np.int64)

    def begin(self, lane: np.ndarray, episode_id: np.ndarray, row: int) -> None:
        """Begins episodes of these ids in some lanes, `[n]`, with the row `row`."""
        self.episode_id[lane] = episode_id
        if episode_id[0] >= 0:  # all are their own, or none
            self.own_id[lane] = episode_id
        self.episode_return[lane] = 0.0
        self.episode_length[lane] = 0
        self.first_row[lane] = row
        self.over[lane] = True
        self.any_over = True

    def put_back(self, episode: Episode) -> None:
        """Takes what `snapshot` gave."""
        self.own_id[:] = self.episode_id[:] = episode.episode_id
        self.episode_return[:] = episode.episode_return
        self.episode_length[:] = episode.episode_length

    def next_own(self) -> np.ndarray:
        """`[E]` int32, the ids of the lanes' next own episodes."""
        return self.own_id + np.int32(self.num_envs)

    def snapshot(self, accumulated: ArrayTree) -> Episode:
        """The episodes, as a carry has them; their keys follow from their ids."""
        columns: dict[str, Any] = {
            "key": (),
            "episode_return": self.episode_return.copy(),
            "episode_length": self.episode_length.copy(),
            "episode_id": self.episode_id.copy(),
        }
        return Episode(accumulated=accumulated, **columns)


class Seeds:
    """The seeds of episodes, by their ids: counters, as the keys of the kernel are."""

    def __init__(self, key: chex.PRNGKey, num_envs: int) -> None:
        self._key, self._num_envs = key, num_envs
        self._lane = np.arange(num_envs)
        self._first = np.zeros(num_envs, np.int64)  # of each lane's own that are drawn
        self._own = np.zeros((0, num_envs), np.uint32)
        self._queue_first, self._queue = 0, np.zeros(0, np.uint32)

    def of(self, lane: np.ndarray, episode_id: np.ndarray) -> np.ndarray:
        """`[E]` uint32, the seeds of these lanes' episodes, `[n]`; of others zero."""
        seeds = np.zeros(self._num_envs, np.uint32)
        is_queue = episode_id[0] < 0
        seeds[lane] = (self._of_queue if is_queue else self._of_own)(lane, episode_id)
        return seeds

    def _of_own(self, lane: np.ndarray, episode_id: np.ndarray) -> np.ndarray:
        number = episode_id // self._num_envs
        row = number - self._first[lane]
        if not _are_rows(row, self._own):
            self._first[lane] = number  # lanes that are not asked for stay behind
            later = self._first + np.arange(_AHEAD)[:, None]
            self._own = self._draw(later * self._num_envs + self._lane)
            row = number - self._first[lane]
        return self._own[row, lane]

    def _of_queue(self, lane: np.ndarray, episode_id: np.ndarray) -> np.ndarray:
        position = -1 - episode_id
        row = position - self._queue_first
        if not _are_rows(row, self._queue):
            self._queue_first = int(position.min())
            # In the shape of those of the lanes' own: one program draws both.
            later = np.arange(_AHEAD * self._num_envs).reshape(_AHEAD, -1)
            self._queue = self._draw(-1 - (self._queue_first + later)).reshape(-1)
            row = position - self._queue_first
        return self._queue[row]

    def _draw(self, episode_id: np.ndarray) -> np.ndarray:
        return np.asarray(_seeds(self._key, episode_id.astype(np.int32)))


def _are_rows(row: np.ndarray, table: np.ndarray) -> bool:
    """Tells whether a table has all of these rows."""
    row = row.tolist()  # often a single one, for which NumPy's ways are long
    return min(row) >= 0 and max(row) < len(table)


@jax.jit
def _seeds(key: chex.PRNGKey, episode_id: jax.Array) -> jax.Array:
    """`[N, E]` seeds of the episodes of these ids."""
    lanes = episode_keys.all_lanes(episode_id.shape[1])
    of_row = jax.vmap(lambda row: episode_keys.keys_of(key, lanes, row))
    return episode_keys.seeds(of_row(episode_id))
