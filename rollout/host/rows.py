"""Stores rows of host transitions, and computes their returns in one jitted call.

A row has a column for each of the `B` lanes. Rows of an `AsyncCollector` have
`num_ready` columns instead, and `info.env_id` has their lanes.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout.envs import prng
from rollout.envs.types import ArrayTree
from rollout.kernel.step import (
    accumulate,
    accumulate_nothing,
    apply_record_fn,
    mask_out,
)
from rollout.types import Accumulators, Episode, Transition

Acc = TypeVar("Acc")

_COLUMNS = ("reward", "terminated", "truncated", "mask", "episode_id")
_TREES = ("obs", "action", "next_obs", "extras", "info")


class RowBlock:
    """Memory for rows of `[B, ...]`; the first row that is written fixes the shapes.

    Columns that a row does not write are masked out.

    Attributes:
        size: number of rows to write.
        num: number of rows that are complete.
        reward, terminated, truncated, mask, episode_id: `[capacity, B]`, as
            `Transition` has them.
        cut: `[capacity, B]` bool, True where `max_steps` alone ended an episode.
        stopped: `[capacity, B]` bool, True where the end of a batch cut an episode.
    """

    def __init__(self, width: int, size: int, capacity: int | None = None) -> None:
        self.size, self.num = size, 0
        self._shape = shape = capacity or size, width
        self.reward = np.zeros(shape, np.float32)
        self.terminated = np.zeros(shape, bool)
        self.truncated = np.zeros(shape, bool)
        self.cut, self.stopped = np.zeros(shape, bool), np.zeros(shape, bool)
        self.mask = np.zeros(shape, bool)
        self.episode_id = np.zeros(shape, np.int32)
        # By field: the tree's structure, None for a single array, and its leaves.
        self._trees: dict[str, tuple[Any, list[np.ndarray]]] = {}

    def write(self, name: str, tree: ArrayTree) -> None:
        """Writes a field of the current row, whose number is `num`."""
        if name not in self._trees:
            leaves, structure = jax.tree.flatten(tree)
            arrays = [np.zeros(self._shape + x.shape[1:], x.dtype) for x in leaves]
            is_leaf = isinstance(tree, np.ndarray)
            self._trees[name] = None if is_leaf else structure, arrays
        structure, arrays = self._trees[name]
        if structure is None:  # a single array: the usual case, kept fast
            arrays[0][self.num, : len(tree)] = tree
            return
        leaves = structure.flatten_up_to(tree)
        for array, leaf in zip(arrays, leaves, strict=True):
            array[self.num, : len(leaf)] = leaf

    def written(self, name: str) -> ArrayTree:
        """Returns a field of the current row, `[B, ...]`, as views."""
        structure, arrays = self._trees[name]
        if structure is None:
            return arrays[0][self.num]
        return structure.unflatten([array[self.num] for array in arrays])

    def mask_out(self, episode_id: int) -> int:
        """Masks out the rows of an episode; returns how many there were."""
        rows = self.mask & (self.episode_id == episode_id)
        rows[self.num :] = False  # an interrupt may have left part of a row there
        self.mask[rows] = False
        return int(rows.sum())

    def read(self) -> Transition:
        """Returns all rows, `[capacity, B, ...]`, not copied; masked-out ones zero."""
        self.mask[self.num :] = False  # part of a row, which does not count
        is_out = ~self.mask[: self.num]
        if is_out.any():
            trees = [x for _, arrays in self._trees.values() for x in arrays]
            for array in (*trees, self.reward, self.terminated, self.truncated):
                array[: self.num][is_out] = 0
        fields: dict[str, Any] = {
            name: arrays[0] if structure is None else structure.unflatten(arrays)
            for name, (structure, arrays) in self._trees.items()
        }
        fields |= {name: getattr(self, name) for name in _COLUMNS}
        nothing: Any = ()  # a `Bookkeeper` computes it
        return Transition(**fields, episode_return=nothing, episode_length=nothing)


class Bookkeeper:
    """Computes returns, lengths, accumulated values and records from raw rows.

    Args:
        accumulators: values that are accumulated per episode.
        record_fn: maps a transition to its recorded fields; None for all of it.
        num_envs: B.
    """

    def __init__(
        self,
        accumulators: Accumulators,
        record_fn: Callable[[Transition], Transition] | None,
        num_envs: int,
    ) -> None:
        self._accumulators, self._record_fn = accumulators, record_fn
        self._num_envs = num_envs
        self._scan = jax.jit(self._scan_rows)

    def start(self, episode_id: np.ndarray) -> Episode:
        """Returns episodes with these ids, `[B]` int32, before their first step."""
        nothing: dict[str, Any] = {
            "key": (),  # host episodes have a seed instead
            "episode_return": np.zeros(episode_id.shape, np.float32),
            "episode_length": np.zeros(episode_id.shape, np.int32),
            "episode_id": episode_id,
        }
        accumulated = accumulate_nothing(self._accumulators, len(episode_id))
        return Episode(**nothing, accumulated=accumulated)

    def count(self, episode: Episode, block: RowBlock) -> tuple[Episode, Transition]:
        """Computes the episodes after a block, and its finished transitions.

        Args:
            episode: the episodes before its first row, of all `B` lanes.
            block: the rows.

        Returns:
            The episodes after its last row; and the transitions,
            `[capacity, B, ...]`, on the device, masked-out ones zero.
        """
        rows = block.read()
        if self._record_fn is not None or self._accumulators:
            return self._scan(episode, rows)
        # Nothing reads the large fields, so they go to the device without passing
        # through the program, except for the lanes of an `AsyncCollector`.
        bare = rows.replace(**dict.fromkeys(_TREES, ()))
        if hasattr(rows.info, "env_id"):
            bare = bare.replace(info=rows.info.replace(info=()))
        episode, counted = self._scan(episode, bare)
        trees = {name: getattr(rows, name) for name in _TREES}
        return episode, counted.replace(**jax.device_put(trees))

    def at(self, episode: Episode, episode_id: np.ndarray) -> Episode:
        """Returns the episodes with these ids: unfinished ones, or new ones."""
        goes_on = np.asarray(episode.episode_id) == episode_id
        start = self.start(episode_id)
        return start.replace(
            episode_return=np.where(goes_on, episode.episode_return, np.float32(0)),
            episode_length=np.where(goes_on, episode.episode_length, np.int32(0)),
            accumulated=prng.select(goes_on, episode.accumulated, start.accumulated)
            if self._accumulators
            else (),
        )

    def _scan_rows(self, episode: Episode, rows: Transition) -> tuple:
        lane = getattr(rows.info, "env_id", None)
        nothing = self.start(np.zeros(rows.mask.shape[1], np.int32))

        def count_row(episode: Episode, step: tuple) -> tuple[Episode, Transition]:
            row, lane = step
            old = episode if lane is None else jax.tree.map(lambda x: x[lane], episode)
            # A new id starts from zero, however the lane's last episode has ended.
            old = prng.select(old.episode_id == row.episode_id, old, nothing)
            row = row.replace(
                episode_return=old.episode_return + row.reward,
                episode_length=old.episode_length + 1,
            )
            if self._accumulators:
                row = row.replace(
                    accumulated=accumulate(self._accumulators, old.accumulated, row)
                )
            new = old.replace(
                episode_return=row.episode_return,
                episode_length=row.episode_length,
                episode_id=row.episode_id,
                accumulated=row.accumulated,
            )
            if lane is None:
                episode = prng.select(row.mask, new, episode)
            else:  # masked-out rows get a lane beyond the last, and are dropped
                place = jnp.where(row.mask, lane, self._num_envs)
                episode = jax.tree.map(
                    lambda x, rows: x.at[place].set(rows, mode="drop"), episode, new
                )
            return episode, mask_out(apply_record_fn(self._record_fn, row))

        return lax.scan(count_row, episode, (rows, lane))


def lanes_of(rows: Transition) -> ArrayTree:
    """Returns the lane of each column, `[B]`, or of each row and column, `[T, B]`."""
    if hasattr(rows.info, "env_id"):
        return rows.info.env_id
    return np.arange(rows.mask.shape[-1], dtype=np.int32)


def fold(
    fn: Callable[[Acc, Transition], Acc], acc: Acc, trajectory: Transition, num: int
) -> Acc:
    """Folds the first `num` rows of a trajectory into `acc`."""
    try:
        hash(fn)  # as a static argument of `jit` must be
    except TypeError:
        return _fold(fn, acc, trajectory, num)
    return _fold_jitted(fn, acc, trajectory, num)


def _fold(
    fn: Callable[[Acc, Transition], Acc], acc: Acc, trajectory: Transition, num: Any
) -> Acc:
    def step(row: jax.Array, acc: Acc) -> Acc:
        return fn(acc, jax.tree.map(lambda x: x[row], trajectory))

    return lax.fori_loop(0, num, step, acc)


_fold_jitted = jax.jit(_fold, static_argnums=0)
