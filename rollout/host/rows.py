"""Rows of transitions in host memory, written one by one."""

from typing import Any

import chex
import jax
import numpy as np

from rollout.types import Transition


class Rows:
    """Memory for rows of `[B, ...]`; what they are like, the first one says.

    Attributes:
        size: how many shall be written.
        num: how many are whole.
    """

    def __init__(self, size: int, capacity: int | None = None) -> None:
        self.size, self.num = size, 0
        self._capacity = capacity or size
        self._fields: dict[str, tuple[Any, list[np.ndarray]]] = {}

    def write(self, name: str, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Writes a field of the row under way; returns what stands there now."""
        if name not in self._fields:
            self._fields[name] = self._allocate(tree)
        structure, arrays = self._fields[name]
        if structure is None:
            arrays[0][self.num] = tree
            return arrays[0][self.num]
        leaves = structure.flatten_up_to(tree)
        for array, leaf in zip(arrays, leaves, strict=True):
            array[self.num] = leaf
        return structure.unflatten([array[self.num] for array in arrays])

    def mask_out(self, first: int, lane: int) -> None:
        """Voids the rows of a lane from `first` to the newest one: zero everywhere."""
        for _, arrays in self._fields.values():
            for array in arrays:
                array[first : self.num + 1, lane] = 0

    def read(self) -> Transition:
        """All rows, `[capacity, B, ...]`, not copied: zero from number `num` on."""
        return Transition(
            **{
                name: arrays[0] if structure is None else structure.unflatten(arrays)
                for name, (structure, arrays) in self._fields.items()
            }
        )

    def _allocate(self, tree: chex.ArrayTree) -> tuple[Any, list[np.ndarray]]:
        leaves, structure = jax.tree.flatten(tree)
        arrays = [np.zeros((self._capacity, *x.shape), x.dtype) for x in leaves]
        return None if isinstance(tree, np.ndarray) else structure, arrays
