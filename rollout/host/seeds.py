"""Draws the seeds of episodes by their ids, as the kernel draws keys.

A call of jax for each reset would be slow, so tables of the next seeds are drawn ahead.
"""

import functools

import chex
import jax
import numpy as np

from rollout.kernel import episode_keys

_AHEAD = 256  # rows of B seeds that are drawn at once


class Seeds:
    """The seeds of the episodes of `B` lanes, under one typed root key."""

    def __init__(self, key: chex.PRNGKey, num_envs: int) -> None:
        self._key, self._num_envs = key, num_envs
        # Each lane may be in an episode of another table.
        # One that was dropped is drawn again, with the same numbers.
        self._table = functools.lru_cache(num_envs + 1)(self._draw)

    def of(self, lane: np.ndarray, episode_id: np.ndarray) -> np.ndarray:
        """Returns `[B]` uint32, the seeds of the episodes of `n` lanes, zero elsewhere.

        The ids, `[n]` int32, are of the lanes' own episodes or of the queue's.
        """
        seeds = np.zeros(self._num_envs, np.uint32)
        for at, number in zip(lane.tolist(), episode_id.tolist(), strict=True):
            # Ids count up from 0, and those of the queue down from -1: rows may be
            # below 0, too.
            row, column = divmod(number, self._num_envs)
            seeds[at] = self._table(row // _AHEAD)[row % _AHEAD, column]
        return seeds

    def _draw(self, table: int) -> np.ndarray:
        """Draws a table of seeds, `[_AHEAD, B]`."""
        row = table * _AHEAD + np.arange(_AHEAD, dtype=np.int32)
        lane = np.arange(self._num_envs, dtype=np.int32)
        return np.asarray(_seeds(self._key, row[:, None] * self._num_envs + lane))


@jax.jit
def _seeds(key: chex.PRNGKey, episode_id: jax.Array) -> jax.Array:
    """Returns the seeds of the episodes with these ids, `[N, B]`."""
    of_row = jax.vmap(lambda row: episode_keys.keys_of(key, row))
    return episode_keys.seeds(of_row(episode_id))
