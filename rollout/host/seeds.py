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
        # Row k of a table has the seeds of the episodes k after the first ones: of the
        # lanes' own first ones, `[B]`, or of one in the queue.
        self._first = np.zeros(num_envs, np.int64)  # [B]
        self._own = np.zeros((0, num_envs), np.uint32)
        self._first_queued, self._queued = 0, np.zeros(0, np.uint32)

    def of(self, lane: np.ndarray, episode_id: np.ndarray) -> np.ndarray:
        """Returns `[B]` uint32, the seeds of the episodes of `n` lanes, zero elsewhere.

        Args:
            lane: `[n]` int.
            episode_id: `[n]` int32, all of the queue, below 0, or all of the lanes'
                own episodes.
        """
        seeds = np.zeros(self._num_envs, np.uint32)
        if episode_id[0] < 0:
            position = -1 - episode_id  # ids of the queue count down from -1
            row = position - self._first_queued
            if not _are_rows(row, self._queued):
                self._first_queued = int(position.min())
                row = position - self._first_queued
                # In the shape of the lanes' own seeds: one program draws both.
                later = np.arange(_AHEAD * self._num_envs).reshape(_AHEAD, -1)
                self._queued = self._draw(-1 - (self._first_queued + later)).ravel()
            seeds[lane] = self._queued[row]
            return seeds
        number = episode_id // self._num_envs  # own ids are `number * B + lane`
        row = number - self._first[lane]
        if not _are_rows(row, self._own):
            self._first[lane], row = number, np.zeros_like(row)  # others keep theirs
            later = self._first + np.arange(_AHEAD)[:, None]
            self._own = self._draw(later * self._num_envs + np.arange(self._num_envs))
        seeds[lane] = self._own[row, lane]
        return seeds

    def _draw(self, episode_id: np.ndarray) -> np.ndarray:
        return np.asarray(_seeds(self._key, episode_id.astype(np.int32)))


def _are_rows(row: np.ndarray, table: np.ndarray) -> bool:
    """Returns whether a table has all of these rows."""
    numbers = row.tolist()  # often a single one, for which NumPy takes longer
    return min(numbers) >= 0 and max(numbers) < len(table)


@jax.jit
def _seeds(key: chex.PRNGKey, episode_id: jax.Array) -> jax.Array:
    """Returns the seeds of the episodes with these ids, `[N, B]`."""
    lanes = episode_keys.all_lanes(episode_id.shape[1])
    of_row = jax.vmap(lambda row: episode_keys.keys_of(key, lanes, row))
    return episode_keys.seeds(of_row(episode_id))
