"""`SpaceCheck`: finds observations and actions outside their space."""

import jax
import numpy as np

from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree

_SPACES = {"obs": "observation_space", "action": "action_space"}


class SpaceCheck:
    """Finds observations or actions that are not finite or outside their space.

    Args:
        space: space of a single environment.
        name: "obs" or "action", for error messages.
        slack: tolerance for floats beyond a bound, relative to the bound.
    """

    def __init__(
        self, space: AnySpace, name: str = "obs", *, slack: float = 0.0
    ) -> None:
        space = as_space(space, f"env.{_SPACES[name]}")
        self._name = name
        self._bounds = [_finite_bounds(leaf, slack) for leaf in space.leaves()]

    def find(self, value: ArrayTree) -> dict[int, ValueError]:
        """Returns an error for each invalid row, by row index; empty if all are valid.

        Args:
            value: `[K, ...]` leaves, observations or actions of `K` environments.
        """
        leaves = [value] if isinstance(value, np.ndarray) else jax.tree.leaves(value)
        causes = {}
        if len(leaves) != len(self._bounds):
            return causes  # a user-defined space with unknown leaves
        for number, (leaf, bounds) in enumerate(zip(leaves, self._bounds, strict=True)):
            if bounds is None:  # every value of the dtype is inside
                continue
            # One test finds both errors: bounds are finite, and NaN compares as False.
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
    """Returns an error that names the first invalid value of a row."""
    index = np.unravel_index(np.argmin(inside), inside.shape)
    position = [int(x) for x in index] if index else ""
    low, high = (np.broadcast_to(x, obs.shape)[index] for x in bounds)
    rule = f"in [{low:g}, {high:g}]" if np.isfinite(obs[index]) else "finite"
    return ValueError(f"`{name}{position}` must be {rule}, got {obs[index]:g}")


def _finite_bounds(
    space: AnySpace, slack: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the bounds clipped to the dtype, or None if every value is inside."""
    if space.bounds is None:
        return None
    dtype, (low, high) = np.dtype(space.dtype), map(np.asarray, space.bounds)
    if dtype.kind == "b":
        return None
    if dtype.kind == "f" and slack:
        low, high = low - slack * np.abs(low), high + slack * np.abs(high)
    # Replace infinite bounds by the largest finite number, so that infinity is outside.
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    if dtype.kind != "f" and (low <= limits.min).all() and (high >= limits.max).all():
        return None
    low = np.maximum(low.astype(np.float64), limits.min)
    high = np.minimum(high.astype(np.float64), limits.max)
    return low.astype(dtype), high.astype(dtype)
