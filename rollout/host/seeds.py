"""Draws the seeds of episodes by their ids, as the kernel draws keys.

A call of jax for each reset would be slow, so tables of the next seeds are drawn ahead.
"""

import chex
import jax
import numpy as np

from rollout.kernel import episode_keys

_AHEAD = 256  # seeds that are drawn at once


class Seeds:
    """The seeds of the episodes of `B` lanes, under one typed root key."""

    def __init__(self, key: chex.PRNGKey, num_envs: int) -> None:
        self._key, self._num_envs = key, num_envs
        self._lane = np.arange(num_envs)
        # `_own[k, i]` is the seed of lane i's episode number `_first[i] + k`, and
        # `_queue[k]` that of the queue's episode number `_queue_first + k`.
        self._first = np.zeros(num_envs, np.int64)  # [B]
        self._own = np.zeros((0, num_envs), np.uint32)
        self._queue_first, self._queue = 0, np.zeros(0, np.uint32)

    def of(self, lane: np.ndarray, episode_id: np.ndarray) -> np.ndarray:
        """Returns `[B]` uint32, the seeds of the episodes of `n` lanes, zero elsewhere.

        Args:
            lane: `[n]` int.
            episode_id: `[n]` int32, all of the queue, below 0, or all of the lanes'
                own episodes.
        """
        seeds = np.zeros(self._num_envs, np.uint32)
        is_queue = episode_id[0] < 0
        seeds[lane] = (self._of_queue if is_queue else self._of_own)(lane, episode_id)
        return seeds

    def _of_own(self, lane: np.ndarray, episode_id: np.ndarray) -> np.ndarray:
        number = episode_id // self._num_envs  # own ids are `number * B + lane`
        row = number - self._first[lane]
        if not _are_rows(row, self._own):
            first = self._first.copy()
            first[lane] = number  # the other lanes keep theirs
            later = first + np.arange(_AHEAD)[:, None]
            own = self._draw(later * self._num_envs + self._lane)
            # One line, so that an interrupt leaves a table that fits its first numbers.
            self._first, self._own = first, own
            row = number - first[lane]
        return self._own[row, lane]

    def _of_queue(self, lane: np.ndarray, episode_id: np.ndarray) -> np.ndarray:
        position = -1 - episode_id  # ids of the queue count down from -1
        row = position - self._queue_first
        if not _are_rows(row, self._queue):
            first = int(position.min())
            # In the shape of the lanes' own seeds: one program draws both.
            later = np.arange(_AHEAD * self._num_envs).reshape(_AHEAD, -1)
            queue = self._draw(-1 - (first + later)).reshape(-1)
            self._queue_first, self._queue = first, queue
            row = position - first
        return self._queue[row]

    def _draw(self, episode_id: np.ndarray) -> np.ndarray:
        return np.asarray(_seeds(self._key, episode_id.astype(np.int32)))


def _are_rows(row: np.ndarray, table: np.ndarray) -> bool:
    """Returns whether a table has all of these rows."""
    row = row.tolist()  # often a single one, for which NumPy takes longer
    return min(row) >= 0 and max(row) < len(table)


@jax.jit
def _seeds(key: chex.PRNGKey, episode_id: jax.Array) -> jax.Array:
    """Returns the seeds of the episodes with these ids, `[N, B]`."""
    lanes = episode_keys.all_lanes(episode_id.shape[1])
    of_row = jax.vmap(lambda row: episode_keys.keys_of(key, lanes, row))
    return episode_keys.seeds(of_row(episode_id))
