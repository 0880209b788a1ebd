"""Assigns exactly N episodes to lanes, and collects their results.

The episodes, their order and their ids are those of `rollout.kernel.episodes`: the
order in which they start decides which ones count. One that is lost to a fault is not
played again, since the mean would then favour the episodes that do not fail.
"""

from collections.abc import Collection
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from rollout.envs.types import ArrayTree
from rollout.types import Episodes, Transition


class EpisodePlan(NamedTuple):
    """Assigns `N` episodes to lanes; `queue` and `per_env` make it."""

    num_episodes: int  # N
    is_queue: bool  # True: a free lane takes the next in the queue; False: its own next
    first_id: np.ndarray  # [B] int32, of the queue, or of the lane's first episode
    after: np.ndarray  # [B] int32, the own episodes that lanes begin afterwards
    min_steps: int | None  # no episode starts after so many steps
    index: np.ndarray  # [B], the episodes that the lanes play; idle from N on
    num_started: int
    num_wanted: int
    num_over: int = 0
    num_steps: int = 0

    @property
    def is_over(self) -> bool:
        """True if all episodes are over."""
        return self.num_over >= self.num_wanted

    @property
    def mask(self) -> np.ndarray:
        """`[B]` bool, the lanes that play one of the episodes."""
        return self.index < self.num_episodes

    @property
    def episode_id(self) -> np.ndarray:
        """`[B]` int32, the ids of the episodes that the lanes play."""
        if self.is_queue:  # ids of the queue count down from -1
            return self.first_id - self.index
        return self.first_id + self.index - np.arange(len(self.index), dtype=np.int32)

    def index_of(self, episode_id: np.ndarray) -> np.ndarray:
        """Returns the indices among the `N` of episodes with these ids."""
        if self.is_queue:
            return self.first_id[0] - episode_id
        lane = episode_id % len(self.first_id)  # own ids are `n * B + lane`
        return episode_id - self.first_id[lane] + lane

    def advance(self, over: np.ndarray, num_steps: int) -> Self:
        """Assigns the next episodes, in order, to the lanes where `over`.

        Args:
            over: `[B]` bool, lanes whose episode ended or was lost.
            num_steps: steps that were taken in lanes that are not idle.
        """
        num_steps += self.num_steps
        if not np.count_nonzero(over):
            return self._replace(num_steps=num_steps)
        count, index = int(over.sum()), self.index.copy()
        if self.is_queue:
            index[over] = self.num_started + np.arange(count, dtype=np.int32)
        else:
            index[over] += len(index)
        num_wanted = self.num_wanted
        # Enough steps: these lanes become idle, and only started episodes are awaited.
        if self.min_steps is not None and num_steps >= self.min_steps:
            index[over] = self.num_episodes
            num_wanted = min(num_wanted, self.num_started)
        return self._replace(
            index=index,
            num_started=self.num_started + count,
            num_wanted=num_wanted,
            num_over=self.num_over + int((over & self.mask).sum()),
            num_steps=num_steps,
        )


def queue(
    next_own: np.ndarray, next_episode: int, num_episodes: int, min_steps: int | None
) -> EpisodePlan:
    """Assigns episodes from one queue: a free lane takes the next one.

    Args:
        next_own: `[B]` int32, the ids of the lanes' own next episodes.
        next_episode: the position of the first one in the queue.
        num_episodes: N.
        min_steps: no episode starts after so many steps; None for all N.
    """
    lane = np.arange(len(next_own), dtype=np.int32)
    return EpisodePlan(
        num_episodes=num_episodes,
        is_queue=True,
        first_id=np.full_like(lane, -1 - next_episode),
        after=next_own,
        min_steps=min_steps,
        index=lane,
        num_started=len(lane),
        num_wanted=num_episodes,
    )


def per_env(next_own: np.ndarray, episodes_per_env: int) -> EpisodePlan:
    """Assigns to every lane its own next `episodes_per_env` episodes."""
    lane = np.arange(len(next_own), dtype=np.int32)
    num_episodes = episodes_per_env * len(lane)
    return EpisodePlan(
        num_episodes=num_episodes,
        is_queue=False,
        first_id=next_own,
        after=next_own + np.int32(num_episodes),
        min_steps=None,
        index=lane,
        num_started=len(lane),
        num_wanted=num_episodes,
    )


class Results:
    """Collects the results of `N` episodes, block by block."""

    def __init__(self, plan: EpisodePlan) -> None:
        self._plan, num = plan, plan.num_episodes
        self._table: dict[str, Any] = {
            "episode_return": np.zeros(num, np.float32),
            "episode_length": np.zeros(num, np.int32),
            "terminated": np.zeros(num, bool),
            "truncated": np.zeros(num, bool),
            "finished": np.zeros(num, bool),
            "lane": np.zeros(num, np.int32),
        }
        self._accumulated: ArrayTree = None  # [N, ...], after the first block

    def note(self, trajectory: Transition, lane: ArrayTree, cut: np.ndarray) -> None:
        """Records the episodes that end in a block; `B` is the number of its columns.

        Args:
            trajectory: `[T, B, ...]`, its rows.
            lane: `[B]` or `[T, B]` int32, their lanes.
            cut: `[T, B]` bool, where `max_steps` alone ended an episode.
        """
        nothing: Any = ()
        large = dict.fromkeys(("obs", "action", "next_obs", "extras", "info"), nothing)
        rows, lane = jax.device_get((trajectory.replace(**large), lane))
        here = rows.done & rows.mask
        index = self._plan.index_of(rows.episode_id[here])
        truncated = rows.truncated & ~cut
        fields = {
            "episode_return": rows.episode_return,
            "episode_length": rows.episode_length,
            "terminated": rows.terminated,
            "truncated": truncated,
            "finished": rows.terminated | truncated,
            "lane": np.broadcast_to(lane, here.shape),
        }
        for name, values in fields.items():
            self._table[name][index] = values[here]
        if self._accumulated is None:
            num = (self._plan.num_episodes,)
            self._accumulated = jax.tree.map(
                lambda x: np.zeros(num + x.shape[2:], x.dtype), rows.accumulated
            )
        jax.tree.map(
            lambda table, x: table.__setitem__(index, x[here]),
            self._accumulated,
            rows.accumulated,
        )

    def read(self, lost: Collection[int]) -> tuple[Episodes, int]:
        """Returns the episodes, zero with `mask` False where they do not count.

        Args:
            lost: the ids of those that were lost to a fault.

        Returns:
            The episodes, NumPy; and how many came from the queue, lost ones included.
        """
        length, min_steps = self._table["episode_length"], self._plan.min_steps
        counts = np.ones(length.shape, bool)
        # An episode counts if those that started before it have fewer than `min_steps`
        # together, so the lanes do not decide which ones count.
        if min_steps is not None:
            counts = np.cumsum(length) - length < min_steps
        mask = counts & ~self.is_lost(lost)
        for table in (*self._table.values(), *jax.tree.leaves(self._accumulated)):
            table[~mask] = 0
        num_steps: Any = np.int32(min(length.sum(dtype=np.int64), 2**31 - 1))
        episodes = Episodes(
            **self._table, num_steps=num_steps, mask=mask, accumulated=self._accumulated
        )
        return episodes, int(counts.sum()) if self._plan.is_queue else 0

    def is_lost(self, lost: Collection[int]) -> np.ndarray:
        """Returns `[N]` bool, True for the episodes with these ids."""
        flags = np.zeros(self._plan.num_episodes, bool)
        index = self._plan.index_of(np.array(list(lost), np.int32))
        flags[index[index < len(flags)]] = True
        return flags
