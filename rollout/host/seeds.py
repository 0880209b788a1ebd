"""Derives the seeds of episodes from episode ids, as the kernel derives keys.

Calling jax at every reset would be slow, so seeds are computed in tables.
"""

import functools

import chex
import jax
import numpy as np

from rollout.kernel import keys

_NUM_ROWS = 256  # rows of B seeds per table


class Seeds:
    """The seeds of the episodes of `B` lanes, under one typed root key."""

    def __init__(self, key: chex.PRNGKey, num_envs: int) -> None:
        self._key, self._num_envs = key, num_envs
        # Every lane may need a different table. An evicted table is computed again and
        # has the same seeds.
        self._table = functools.lru_cache(num_envs + 1)(self._compute)

    def lookup(self, lane: np.ndarray, episode_id: np.ndarray) -> np.ndarray:
        """Returns the seeds of the episodes of `n` lanes, `[B]` uint32; 0 elsewhere.

        The ids, `[n]` int32, are ids of per-lane episodes or of queued episodes.
        """
        seeds = np.zeros(self._num_envs, np.uint32)
        for index, number in zip(lane.tolist(), episode_id.tolist(), strict=True):
            # Queued ids count down from -1, so rows may be negative.
            row, column = divmod(number, self._num_envs)
            seeds[index] = self._table(row // _NUM_ROWS)[row % _NUM_ROWS, column]
        return seeds

    def _compute(self, table: int) -> np.ndarray:
        """Computes a table of seeds, `[_NUM_ROWS, B]`."""
        row = table * _NUM_ROWS + np.arange(_NUM_ROWS, dtype=np.int32)
        lane = np.arange(self._num_envs, dtype=np.int32)
        return np.asarray(_seeds(self._key, row[:, None] * self._num_envs + lane))


@jax.jit
def _seeds(key: chex.PRNGKey, episode_id: jax.Array) -> jax.Array:
    """Computes the seeds of the episodes with these ids, `[N, B]`."""
    row_keys = jax.vmap(lambda row: keys.keys_of(key, row))
    return keys.seeds(row_keys(episode_id))
