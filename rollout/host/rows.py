"""Rows of transitions in host memory, written one by one."""

import itertools
from typing import Any

import jax
import numpy as np

from envs.types import ArrayTree
from rollout.types import Transition

_TREES = ("obs", "action", "next_obs", "extras", "info")


class Rows:
    """Memory for rows of `[B, ...]`; what they are like, the first one says.

    A row that is written with fewer columns has void ones after them.

    Attributes:
        size: how many shall be written.
        num: how many are whole.
        reward, terminated, truncated, mask, episode_id, episode_return, episode_length:
            `[capacity, B]`, as `Transition` has them.
    """

    def __init__(self, width: int, size: int, capacity: int | None = None) -> None:
        self.size, self.num = size, 0
        self._shape = shape = capacity or size, width
        self.reward = np.zeros(shape, np.float32)
        self.terminated = np.zeros(shape, bool)
        self.truncated = np.zeros(shape, bool)
        self.mask = np.zeros(shape, bool)
        self._episodes = np.zeros((3, *shape), np.int32)
        self.episode_id, self.episode_return, self.episode_length = views_of(
            self._episodes
        )
        self._trees: dict[str, tuple[Any, list[np.ndarray]]] = {}

    def write(self, name: str, tree: ArrayTree) -> ArrayTree:
        """Writes a field of the row under way; returns what stands there now."""
        if name not in self._trees:
            self._trees[name] = self._allocate(tree)
        structure, arrays = self._trees[name]
        if structure is None:
            row = arrays[0][self.num]
            row[: len(tree)] = tree
            return row
        leaves = structure.flatten_up_to(tree)
        for array, leaf in zip(arrays, leaves, strict=True):
            array[self.num, : len(leaf)] = leaf
        return structure.unflatten([array[self.num] for array in arrays])

    def end(
        self,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        mask: np.ndarray,
        episodes: np.ndarray,
    ) -> None:
        """Writes the fields of a row that are known only when it is over.

        All are `[B]` or fewer, `episodes` `[3, B]` or fewer, see `views_of`.
        """
        row, columns = self.num, slice(len(reward))
        self.reward[row, columns] = reward
        self.terminated[row, columns] = terminated
        self.truncated[row, columns] = truncated
        self.mask[row, columns] = mask
        self._episodes[:, row, columns] = episodes

    def void(self, row: Any, column: Any) -> int:
        """Voids what stands there, by any index; tells how much of it was data."""
        count = int(self.mask[row, column].sum())
        self.mask[row, column] = False
        return count

    def read(self) -> Transition:
        """All rows, `[capacity, B, ...]`, not copied.

        Zero is what is void, and everything from number `num` on.
        """
        fields = {name: [x] for name, x in vars(self).items() if name in _FLAT}
        trees = {name: arrays for name, (_, arrays) in self._trees.items()}
        is_void = ~self.mask[: self.num]
        if is_void.any():
            for array in itertools.chain(*(fields | trees).values()):
                array[: self.num][is_void] = 0
        read: dict[str, Any] = {
            name: arrays[0] if structure is None else structure.unflatten(arrays)
            for name, (structure, arrays) in self._trees.items()
        }
        read |= {name: x for name, (x,) in fields.items()}
        return Transition(**read)

    def _allocate(self, tree: ArrayTree) -> tuple[Any, list[np.ndarray]]:
        leaves, structure = jax.tree.flatten(tree)
        arrays = [np.zeros(self._shape + x.shape[1:], x.dtype) for x in leaves]
        return None if isinstance(tree, np.ndarray) else structure, arrays


def views_of(episodes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, returns and lengths in one array, `[3, ...]` int32, so that one copy does.

    Returns are float32 in the same bits.
    """
    episode_id, episode_return, episode_length = episodes
    return episode_id, episode_return.view(np.float32), episode_length


_FLAT = frozenset(Transition.__dataclass_fields__) - {*_TREES, "accumulated"}
