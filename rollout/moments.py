"""Computes moments of values: count, mean, deviation, bounds and a 95 % interval."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from rollout.envs.types import ArrayTree


class Moments(struct.PyTreeNode, kw_only=True):
    """Count, sum, squared deviations and bounds of some values; never NaN.

    The mean and all other statistics are computed on access, as NumPy floats or
    tracers. They are NaN if there are no values.

    Attributes:
        count: `()` int32, number of values.
        total: `()` float32, sum of the values.
        squared_deviations: `()` float32, sum of squared deviations from the mean.
        low: `()` float32, smallest value, infinity if there are no values.
        high: `()` float32, largest value, minus infinity if there are no values.
    """

    count: jax.Array  # ()
    total: jax.Array  # ()
    squared_deviations: jax.Array  # ()
    low: jax.Array  # ()
    high: jax.Array  # ()

    @property
    def mean(self) -> jax.Array:
        """`()` float32, mean."""
        return self._derive(lambda xp, x, n: x.total / n)

    @property
    def std(self) -> jax.Array:
        """`()` float32, standard deviation (population)."""
        return self._derive(lambda xp, x, n: xp.sqrt(x.squared_deviations / n))

    @property
    def min(self) -> jax.Array:
        """`()` float32, smallest value."""
        return self._derive(lambda xp, x, n: x.low)

    @property
    def max(self) -> jax.Array:
        """`()` float32, largest value."""
        return self._derive(lambda xp, x, n: x.high)

    @property
    def ci_low(self) -> jax.Array:
        """`()` float32, lower end of the 95 % confidence interval of the mean.

        Uses Student's t; NaN for fewer than two values.
        """
        return self._derive(lambda xp, x, n: x.total / n - _margin(xp, x, n), least=2)

    @property
    def ci_high(self) -> jax.Array:
        """`()` float32, upper end of the 95 % confidence interval of the mean.

        Uses Student's t; NaN for fewer than two values.
        """
        return self._derive(lambda xp, x, n: x.total / n + _margin(xp, x, n), least=2)

    def __str__(self) -> str:
        """Formats the mean and its 95 % interval, if there are at least two values."""
        if not is_known(self.count):
            return repr(self)
        if self.count < 2:
            return f"{self.mean:.6g}" if self.count else "none"
        return f"{self.mean:.6g} (95 %: {self.ci_low:.6g} to {self.ci_high:.6g})"

    def _derive(self, fn: Callable[..., Any], least: int = 1) -> Any:
        """Computes a statistic; NaN for fewer than `least` values.

        Untraced statistics are computed on the host: a NaN on the device would trip
        `jax_debug_nans`.
        """
        xp = xp_of(self)
        x = self if xp is jnp else jax.device_get(self)
        with np.errstate(all="ignore"):
            value = fn(xp, x, xp.maximum(x.count, 1).astype(np.float32))
            return xp.where(x.count < least, np.float32(np.nan), value)[()]


def moments(
    value: jax.Array, flag: jax.Array, axis: int | None = None, xp: Any = jnp
) -> Moments:
    """Computes the moments of the values with a True flag, in float32.

    Args:
        value: array of numbers.
        flag: bool, True for values that count, of the same shape.
        axis: the axis to reduce; None reduces all axes.
        xp: `jnp`, or NumPy if no array is traced.
    """
    value, zero = value.astype(np.float32), np.float32(0)
    count = xp.sum(flag, axis=axis, dtype=np.int32, keepdims=True)
    total = xp.sum(xp.where(flag, value, zero), axis=axis, keepdims=True)
    # Two passes: the difference of two large sums would lose significant digits.
    mean = total / xp.maximum(count, 1).astype(total.dtype)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        deviation = xp.where(flag, value - mean, zero)
    limit = np.float32(np.inf)
    return Moments(
        count=count.squeeze(axis),
        total=total.squeeze(axis),
        squared_deviations=xp.sum(deviation**2, axis=axis),
        # Infinite without values, so that merging ignores these bounds.
        low=xp.min(xp.where(flag, value, limit), axis=axis, initial=limit),
        high=xp.max(xp.where(flag, value, -limit), axis=axis, initial=-limit),
    )


def moments_by_name(tree: ArrayTree, flag: jax.Array) -> dict[str, Moments]:
    """Computes the moments of each leaf that has the shape of `flag`, by path."""
    return {name: moments(x, flag) for name, x in by_name(tree, flag.shape).items()}


def by_name(tree: ArrayTree, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    """Returns the leaves of this shape by path, joined by "/"."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
        if leaf.shape == shape
    }


def merge(parts: Sequence[Any]) -> Any:
    """Merges statistics of successive batches, on the host in float64.

    Args:
        parts: statistics of at least one batch: any pytree of counts, sums and
            `Moments`, such as a `CollectStats`.

    Returns:
        The statistics of all batches, with Python and NumPy numbers as leaves.
    """

    def combine(*parts: Any) -> Any:
        # Sum counts as Python ints: the counts of a long run exceed 2^31.
        if not isinstance(parts[0], Moments):
            return sum(np.asarray(x).item() for x in parts)
        sums = [(x.count, x.total, x.squared_deviations) for x in parts]
        count, total, squared = np.array(sums, float).T
        # Add deviations within each part and deviations of the means of the parts.
        with np.errstate(invalid="ignore"):  # infinite values
            between = total / np.maximum(count, 1) - total.sum() / max(count.sum(), 1)
            deviations = np.sum(squared + count * between**2)
        return Moments(
            count=count.sum().astype(np.int64),
            total=total.sum(),
            squared_deviations=deviations,
            low=min(x.low for x in parts),
            high=max(x.high for x in parts),
        )

    parts = jax.device_get(list(parts))
    return jax.tree.map(combine, *parts, is_leaf=lambda x: isinstance(x, Moments))


def xp_of(tree: Any) -> Any:
    """Returns `jnp` if an array is traced, else NumPy."""
    # NumPy outside of `jit`: `jnp` would compile a program for each operation.
    return jnp if any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)) else np


def is_known(count: Any) -> bool:
    """Returns whether a count is not traced and belongs to a single run."""
    return xp_of(count) is np and np.ndim(count) == 0


def _margin(xp: Any, x: Moments, n: Any) -> Any:
    """Computes half the width of the 95 % confidence interval of a mean of `n` values.

    Student's t at 97.5 % is from the Cornish-Fisher expansion, "Handbook of
    Mathematical Functions" (Abramowitz and Stegun), 26.7.5: within 3e-4 of the true
    value for at least 5 degrees of freedom.
    """
    freedom = xp.maximum(n - 1, 1)
    z = 1.959964  # quantile of the normal distribution
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    expansion = z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
    table = xp.asarray((12.706205, 4.302653, 3.182446, 2.776445), xp.float32)
    small = table[xp.clip(freedom, 1, len(table)).astype(xp.int32) - 1]
    quantile = xp.where(freedom > len(table), expansion, small)
    # The interval uses the sample's standard deviation, with divisor n - 1.
    return quantile * (xp.sqrt(x.squared_deviations / n) / xp.sqrt(freedom))
