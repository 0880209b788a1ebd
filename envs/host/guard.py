"""`Guard`: finds observations that are not finite, or not in their space."""

import jax
import numpy as np

from envs.spaces import as_space
from envs.types import AnySpace, ArrayTree


class Guard:
    """Finds observations that are not finite, or not in their space."""

    def __init__(self, space: AnySpace) -> None:
        space = as_space(space, "env.observation_space")
        self._bounds = [_finite_bounds(leaf) for leaf in space.leaves()]

    def find(self, obs: ArrayTree) -> np.ndarray | None:
        """Returns `[E]` bool, True where an observation is bad; None if none is."""
        leaves = [obs] if isinstance(obs, np.ndarray) else jax.tree.leaves(obs)
        bad = None
        if len(leaves) != len(self._bounds):
            return None  # a user-defined space without known leaves
        for leaf, bounds in zip(leaves, self._bounds, strict=True):
            if bounds is None:
                continue
            # Bounds are finite: a value that is not finite lies outside them.
            inside = (leaf >= bounds[0]) & (leaf <= bounds[1])
            if np.count_nonzero(inside) < inside.size:
                here = ~inside.reshape(len(leaf), -1).all(axis=1)
                bad = here if bad is None else bad | here
        return bad


def _finite_bounds(space: AnySpace) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the bounds, clipped to the dtype's; None if every value is inside."""
    if space.bounds is None:
        return None
    dtype, (low, high) = np.dtype(space.dtype), map(np.asarray, space.bounds)
    if dtype.kind == "b":
        return None
    most = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    if dtype.kind != "f" and (low <= most.min).all() and (high >= most.max).all():
        return None
    low = np.maximum(low.astype(np.float64), most.min)
    high = np.minimum(high.astype(np.float64), most.max)
    return low.astype(dtype), high.astype(dtype)
