"""Rows of transitions in host memory, written one by one."""

from typing import Any

import chex
import jax
import numpy as np

from rollout.types import Transition


class Rows:
    """Memory for rows of `[B, ...]`; what they are like, the first one says.

    A row that is written with fewer columns has void ones after them.

    Attributes:
        size: how many shall be written.
        num: how many are whole.
    """

    def __init__(self, width: int, size: int, capacity: int | None = None) -> None:
        self.size, self.num, self._width = size, 0, width
        self._capacity = capacity or size
        self._fields: dict[str, tuple[Any, list[np.ndarray]]] = {}

    def write(self, name: str, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Writes a field of the row under way; returns what stands there now."""
        if name not in self._fields:
            self._fields[name] = self._allocate(tree)
        structure, arrays = self._fields[name]
        if structure is None:
            arrays[0][self.num, : len(tree)] = tree
            return arrays[0][self.num]
        leaves = structure.flatten_up_to(tree)
        for array, leaf in zip(arrays, leaves, strict=True):
            array[self.num, : len(leaf)] = leaf
        return structure.unflatten([array[self.num] for array in arrays])

    def void(self, row: Any, column: Any) -> int:
        """Voids what stands there, by any index; tells how much of it was data."""
        mask = self._fields["mask"][1][0]
        count = int(mask[row, column].sum())
        mask[row, column] = False
        return count

    def read(self) -> Transition:
        """All rows, `[capacity, B, ...]`, not copied; zero from number `num` on.

        Zero, too, is what is void.
        """
        is_void = ~self._fields["mask"][1][0][: self.num]
        if is_void.any():
            for _, arrays in self._fields.values():
                for array in arrays:
                    array[: self.num][is_void] = 0
        return Transition(
            **{
                name: arrays[0] if structure is None else structure.unflatten(arrays)
                for name, (structure, arrays) in self._fields.items()
            }
        )

    def _allocate(self, tree: chex.ArrayTree) -> tuple[Any, list[np.ndarray]]:
        leaves, structure = jax.tree.flatten(tree)
        shape = self._capacity, self._width
        arrays = [np.zeros(shape + x.shape[1:], x.dtype) for x in leaves]
        return None if isinstance(tree, np.ndarray) else structure, arrays
