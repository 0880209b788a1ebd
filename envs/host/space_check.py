"""`SpaceCheck`: finds observations and actions that are not in their space."""

import jax
import numpy as np

from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree

_SPACES = {"obs": "observation_space", "action": "action_space"}


class SpaceCheck:
    """Finds elements that are not finite, or not in their space.

    Args:
        space: of one environment's element.
        name: of the element in error messages.
        slack: how far a float may be beyond a bound, in parts of that bound.
    """

    def __init__(
        self, space: AnySpace, name: str = "obs", *, slack: float = 0.0
    ) -> None:
        space = as_space(space, f"env.{_SPACES[name]}")
        self._name = name
        self._bounds = [_finite_bounds(leaf, slack) for leaf in space.leaves()]

    def find(self, value: ArrayTree) -> dict[int, ValueError]:
        """Returns the error of each bad element, by its row; empty if all are good.

        Args:
            value: `[K, ...]` leaves, those of `K` environments.
        """
        leaves = [value] if isinstance(value, np.ndarray) else jax.tree.leaves(value)
        causes = {}
        if len(leaves) != len(self._bounds):
            return causes  # a user-defined space without known leaves
        for number, (leaf, bounds) in enumerate(zip(leaves, self._bounds, strict=True)):
            if bounds is None:  # every value of the dtype is inside
                continue
            # Bounds are finite, and a NaN compares as False: one test finds both.
            inside = (leaf >= bounds[0]) & (leaf <= bounds[1])
            if np.count_nonzero(inside) < inside.size:
                path, _ = jax.tree.leaves_with_path(value)[number]
                name = self._name + jax.tree_util.keystr(path)
                for row in np.unique(np.argwhere(~inside)[:, 0]).tolist():
                    cause = _explain(name, leaf[row], inside[row], bounds)
                    causes.setdefault(row, cause)
        return causes


def _explain(
    name: str, obs: np.ndarray, inside: np.ndarray, bounds: tuple[np.ndarray, ...]
) -> ValueError:
    """Makes the error of an observation by its first bad value."""
    index = np.unravel_index(np.argmin(inside), inside.shape)
    where = [int(x) for x in index] if index else ""
    low, high = (np.broadcast_to(x, obs.shape)[index] for x in bounds)
    what = f"in [{low:g}, {high:g}]" if np.isfinite(obs[index]) else "finite"
    return ValueError(f"`{name}{where}` must be {what}, got {obs[index]:g}")


def _finite_bounds(
    space: AnySpace, slack: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the bounds, clipped to the dtype's; None if every value is inside."""
    if space.bounds is None:
        return None
    dtype, (low, high) = np.dtype(space.dtype), map(np.asarray, space.bounds)
    if dtype.kind == "b":
        return None
    if dtype.kind == "f" and slack:
        low, high = low - slack * np.abs(low), high + slack * np.abs(high)
    # An infinite bound becomes the largest finite number: infinity is outside, too.
    most = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    if dtype.kind != "f" and (low <= most.min).all() and (high >= most.max).all():
        return None
    low = np.maximum(low.astype(np.float64), most.min)
    high = np.minimum(high.astype(np.float64), most.max)
    return low.astype(dtype), high.astype(dtype)
