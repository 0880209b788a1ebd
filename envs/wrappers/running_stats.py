"""Running mean and variance of batches, for the normalising wrappers."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from rollout.envs.types import ArrayTree

_PRIOR_COUNT = 1e-4  # as Gymnasium's RunningMeanStd


class Statistics(struct.PyTreeNode, kw_only=True):
    """Mean and variance of every entry of a value; no lane axis.

    Attributes:
        mean: `[...]` float, in the structure of one lane's value.
        var: `[...]` float, population variance, in the same structure.
        count: `()` float32, values seen. After 2^24 batches it no longer grows, and the
            newest batches weigh a little more than the old ones.
    """

    mean: ArrayTree
    var: ArrayTree
    count: jax.Array  # ()


def names(name: str, value: Any) -> tuple[str, ...] | None:
    """Checks an option that names parts of a tree; None stands for all of it."""
    if value is None:
        return None
    if isinstance(value, str) or not all(isinstance(x, str) for x in value):
        raise ValueError(
            f'`{name}` must be names, such as ("position", "speed"), got {value!r}.'
        )
    return tuple(value)


def numbers(tree: ArrayTree, only: Collection[str] | None) -> ArrayTree:
    """Returns the leaves that have statistics, and None in the place of the others.

    Those are the leaves that `only` names, None for all, except for flags.

    Raises:
        ValueError: if `only` has a name of which there is no leaf.
    """
    unknown = set(only or ())

    def number(path: Any, x: jax.Array) -> jax.Array | None:
        name = jax.tree_util.keystr(path, simple=True, separator="/") + "/"
        names = {x for x in only or () if name.startswith(f"{x}/")}
        unknown.difference_update(names)
        return x if (names or only is None) and x.dtype != bool else None

    found = jax.tree.map_with_path(number, tree)
    if unknown:
        names = [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree.leaves_with_path(tree)
        ]
        raise ValueError(
            f"`only` must name parts of the observation, {', '.join(names)}, got "
            f"{', '.join(sorted(unknown))}."
        )
    return found


def prior(value: ArrayTree, num_axes: int = 1, xp: Any = jnp) -> Statistics:
    """Returns the statistics before the first batch, like `value`, `[B, ...]`.

    The first `num_axes` axes are those of the batch; `xp` is `jnp` or NumPy.
    """

    def full(number: float) -> ArrayTree:
        return jax.tree.map(
            # Half precision is too coarse for statistics.
            lambda x: xp.full(
                x.shape[num_axes:],
                number,
                jnp.promote_types(float_dtype(x), jnp.float32),
            ),
            value,
        )

    return Statistics(mean=full(0.0), var=full(1.0), count=xp.float32(_PRIOR_COUNT))


def updated(
    old: Statistics, value: ArrayTree, num_axes: int = 1, xp: Any = jnp
) -> Statistics:
    """Updates the statistics with the batch `value`, `[B, ...]`.

    The first `num_axes` axes are those of the batch, of which only B counts. An entry
    that is not finite in some lane keeps its mean and variance.
    """
    if not jax.tree.leaves(value):
        return old
    num_new = jax.tree.leaves(value)[0].shape[0]
    count = old.count + num_new
    # Weights stay in [0, 1]; sums would grow with the count.
    kept, new = old.count / count, num_new / count

    def update(
        x: jax.Array, mean: jax.Array, var: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x, axes = x.astype(mean.dtype), tuple(range(num_axes))
        delta = xp.mean(x, axes) - mean
        new_var = kept * var + new * xp.var(x, axes) + xp.square(delta) * kept * new
        new_mean = mean + delta * new
        is_finite = xp.isfinite(new_var)
        return xp.where(is_finite, new_mean, mean), xp.where(is_finite, new_var, var)

    pairs = jax.tree.map(update, value, old.mean, old.var)
    mean, var = jax.tree.transpose(
        jax.tree.structure(value), jax.tree.structure((0, 0)), pairs
    )
    return Statistics(mean=mean, var=var, count=count)


def normalized(
    statistics: Statistics,
    raw: ArrayTree,
    epsilon: float,
    num_axes: int = 1,
    xp: Any = jnp,
) -> ArrayTree:
    """Normalises the leaves that have statistics, and leaves the others as they are."""
    axes = tuple(range(num_axes))

    def normalize(mean: jax.Array, var: jax.Array, x: jax.Array) -> jax.Array:
        if mean is None:
            return x
        centred = x.astype(mean.dtype) - xp.expand_dims(mean, axes)
        scale = xp.expand_dims(xp.sqrt(var + epsilon), axes)
        return (centred / scale).astype(float_dtype(x))

    trees = statistics.mean, statistics.var, raw
    return jax.tree.map(normalize, *trees, is_leaf=lambda x: x is None)


def float_dtype(x: jax.Array) -> jnp.dtype:
    """Returns the dtype of a normalised leaf."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.dtype(jnp.float32)
