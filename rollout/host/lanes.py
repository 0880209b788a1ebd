"""The episodes that the lanes are in, as a loop in Python counts them."""

import chex
import jax
import numpy as np

from rollout.kernel import episode_keys
from rollout.types import Episode

_AHEAD = 256  # seeds that are drawn at once


class Lanes:
    """What is known of the episode that each of `E` lanes is in.

    Attributes:
        episode_id: `[E]` int32, as `Episode` has it.
        episode_return: `[E]` float32, so far.
        episode_length: `[E]` int32, so far.
        over: `[E]` bool, lanes whose policy has not seen their episode yet.
        first_row: `[E]` int, the row of the call in which their episode begins.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.episode_id = np.arange(num_envs, dtype=np.int32)
        self.own_id = self.episode_id.copy()  # of the last episode of the lane's own
        self.episode_return = np.zeros(num_envs, np.float32)
        self.episode_length = np.zeros(num_envs, np.int32)
        self.over = np.ones(num_envs, bool)
        self.first_row = np.zeros(num_envs, np.int64)

    def begin(self, mask: np.ndarray, episode_id: np.ndarray, row: int) -> None:
        """Begins the episodes of these ids where `mask`; their first row is `row`."""
        np.copyto(self.episode_id, episode_id, where=mask)
        np.copyto(self.own_id, episode_id, where=mask & (episode_id >= 0))
        np.copyto(self.episode_return, 0.0, where=mask)
        np.copyto(self.episode_length, 0, where=mask)
        np.copyto(self.first_row, row, where=mask)
        self.over |= mask

    def put_back(self, episode: Episode) -> None:
        """Takes what `snapshot` gave."""
        self.episode_id = np.array(episode.episode_id)
        self.own_id = self.episode_id.copy()
        self.episode_return = np.array(episode.episode_return)
        self.episode_length = np.array(episode.episode_length)

    def next_own(self) -> np.ndarray:
        """`[E]` int32, the ids of the lanes' next own episodes."""
        return self.own_id + np.int32(self.num_envs)

    def snapshot(self, accumulated: chex.ArrayTree) -> Episode:
        """The episodes, as a carry has them; their keys follow from their ids."""
        return Episode(
            key=(),
            episode_return=self.episode_return.copy(),
            episode_length=self.episode_length.copy(),
            episode_id=self.episode_id.copy(),
            accumulated=accumulated,
        )


class Seeds:
    """The seeds of episodes, by their ids: counters, as the keys of the kernel are."""

    def __init__(self, key: chex.PRNGKey, num_envs: int) -> None:
        self._key, self._num_envs = key, num_envs
        self._lane = np.arange(num_envs)
        self._own: tuple[np.ndarray, np.ndarray] | None = None
        self._queue: tuple[int, np.ndarray] | None = None

    def of(self, episode_id: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """`[E]` uint32, the seeds of these episodes where `mask`."""
        if episode_id[mask.argmax()] < 0:
            return self._of_queue(-1 - episode_id, mask)
        number = episode_id // self._num_envs
        column = number - self._own[0] if self._own else number
        if self._own is None or not _all_within(column[mask], _AHEAD):
            later = episode_id + self._num_envs * np.arange(_AHEAD)[:, None]
            self._own = number, self._draw(later)
            column = np.zeros_like(number)
        return self._own[1][np.where(mask, column, 0), self._lane]

    def _of_queue(self, position: np.ndarray, mask: np.ndarray) -> np.ndarray:
        first = int(position[mask].min())
        column = position - self._queue[0] if self._queue else position
        size = _AHEAD * self._num_envs
        if self._queue is None or not _all_within(column[mask], size):
            # In the shape of those of the lanes' own: one program draws both.
            later = first + np.arange(size)
            drawn = self._draw(-1 - later.reshape(_AHEAD, self._num_envs))
            self._queue = first, drawn.reshape(-1)
            column = position - first
        return self._queue[1][np.where(mask, column, 0)]

    def _draw(self, episode_id: np.ndarray) -> np.ndarray:
        return np.asarray(_seeds(self._key, episode_id.astype(np.int32)))


def _all_within(column: np.ndarray, size: int) -> bool:
    return bool((column >= 0).all() and (column < size).all())


@jax.jit
def _seeds(key: chex.PRNGKey, episode_id: jax.Array) -> jax.Array:
    """`[N, E]` seeds of the episodes of these ids."""
    lanes = episode_keys.all_lanes(episode_id.shape[1])
    of_row = jax.vmap(lambda row: episode_keys.keys_of(key, lanes, row))
    return episode_keys.seeds(of_row(episode_id))
