"""Running mean and variance of batches, for the normalizing wrappers."""

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.envs.spaces import (
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    is_mask,
    one_of,
    space_of,
)
from rollout.envs.types import AnySpace, ArrayTree

_PRIOR_COUNT = 1e-4  # as Gymnasium's RunningMeanStd


class Statistics(struct.PyTreeNode, kw_only=True):
    """Mean and variance of every entry of a value, without a lane axis.

    Attributes:
        mean: `[...]` float, mean, in the structure of one lane's value.
        var: `[...]` float, population variance, in the same structure.
        count: `()` float32, number of values. The count saturates after 2^24 batches;
            new batches then have a slightly larger weight than old batches.
    """

    mean: ArrayTree
    var: ArrayTree
    count: jax.Array  # ()

    def normalize(
        self, raw: ArrayTree, epsilon: float = 1e-8, xp: Any = jnp
    ) -> ArrayTree:
        """Normalizes values; leaves without statistics are unchanged.

        Args:
            raw: one value, or a batch with any number of leading axes.
            epsilon: constant added to the variance.
            xp: array module: `jnp`, or NumPy for NumPy statistics.

        Returns:
            `(raw - mean) / sqrt(var + epsilon)`, with the dtypes of `NormalizeObs`.

        Raises:
            ValueError: if the last axes of a leaf differ from the shape of its mean.
        """

        def normalize(mean: jax.Array, var: jax.Array, x: jax.Array) -> jax.Array:
            if mean is None:
                return x
            axes = tuple(range(x.ndim - mean.ndim))
            if x.shape[len(axes) :] != mean.shape:
                raise ValueError(
                    f"`raw` must have the shape {mean.shape} of the mean in the last "
                    f"axes, got {x.shape}."
                )
            centered = x.astype(mean.dtype) - xp.expand_dims(mean, axes)
            scale = xp.expand_dims(xp.sqrt(var + epsilon), axes)
            return (centered / scale).astype(float_dtype(x))

        trees = self.mean, self.var, raw
        return jax.tree.map(normalize, *trees, is_leaf=lambda x: x is None)


def names(name: str, value: Any) -> tuple[str, ...] | None:
    """Validates an option with names of parts of a tree; None stands for all parts."""
    if value is None:
        return None
    if isinstance(value, str) or not all(isinstance(x, str) for x in value):
        raise ValueError(
            f'`{name}` must be names, such as ("position", "speed"), got {value!r}.'
        )
    return tuple(value)


def prior(
    value: ArrayTree,
    num_axes: int = 1,
    *,
    space: AnySpace | None = None,
    only: Collection[str] | None = None,
    xp: Any = jnp,
) -> Statistics:
    """Returns the initial statistics for values like `value`, `[B, ...]`.

    Leaves without normalization have statistics None. Bools, `Discrete`,
    `MultiDiscrete`, `MultiBinary` and an `action_mask` never have statistics, because
    they are labels rather than quantities. Other integers have statistics if they are
    an image, if `only` names them, or if the value has a single leaf.

    Args:
        value: any pytree of batches.
        num_axes: number of leading batch axes.
        space: space of one entry of the batch; None for floats.
        only: names of the parts that have statistics; None for floats and images.
        xp: array module: `jnp`, or NumPy for NumPy statistics.

    Raises:
        ValueError: if `only` contains a name for which no leaf can have statistics.
    """
    leaves, structure = jax.tree.flatten_with_path(value)
    spaces = _spaces(space, len(leaves))
    numeric, shapes = [], []
    for (path, x), part in zip(leaves, spaces, strict=True):
        name, part = (
            jax.tree_util.keystr(path, simple=True, separator="/"),
            one_of(part),
        )
        is_wanted = len(leaves) == 1 or _is_float(x) or _is_image(part)
        if only is not None:
            # A name selects its whole subtree; "speed/" does not match "speeds/".
            is_wanted = f"{name}/".startswith(tuple(f"{x}/" for x in only))
        # Labels and flags are not quantities, so they are not normalized.
        is_label = isinstance(part, Discrete | MultiDiscrete | MultiBinary)
        is_number = x.dtype != bool and not is_label and not is_mask(path)
        numeric += [name] if is_number else []
        # Half precision is not precise enough for statistics.
        dtype = jnp.promote_types(float_dtype(x), jnp.float32)
        shapes.append((x.shape[num_axes:], dtype) if is_number and is_wanted else None)
    for name in only or ():
        if not any(f"{path}/".startswith(f"{name}/") for path in numeric):
            raise ValueError(
                "`only` must name numeric parts of the observation "
                f"({', '.join(numeric) or 'none'}), got {name}."
            )
    mean, var = (
        structure.unflatten([leaf and xp.full(leaf[0], x, leaf[1]) for leaf in shapes])
        for x in (0.0, 1.0)
    )
    return Statistics(mean=mean, var=var, count=xp.float32(_PRIOR_COUNT))


def updated(
    old: Statistics,
    value: ArrayTree,
    num_axes: int = 1,
    xp: Any = jnp,
    *,
    flag: Any = None,
) -> Statistics:
    """Updates the statistics with the batch `value`, `[B, ...]`.

    The count grows by the number of rows B, also if the batch has more axes. The mean
    and variance of an entry are unchanged if a value of the batch is not finite.

    Args:
        old: current statistics.
        value: any pytree of batches.
        num_axes: number of leading batch axes.
        xp: array module: `jnp`, or NumPy for NumPy statistics.
        flag: `[B]` bool, True for the lanes to include; None for all lanes.
    """
    num_new: Any = jax.tree.leaves(value)[0].shape[0]
    if flag is not None:
        num_new = xp.sum(flag, dtype=np.float32)
    count = old.count + num_new
    # Use weights in [0, 1], since sums would grow with the count.
    w_old, w_new = old.count / count, num_new / count

    def update(mean: Any, var: Any, x: Any) -> tuple[Any, Any]:
        if mean is None:
            return None, None
        x, axes = x.astype(mean.dtype), tuple(range(num_axes))
        if flag is None:
            delta, batch_var = xp.mean(x, axes) - mean, xp.var(x, axes)
        else:
            # Deviations from the old mean, which is close, need one pass over lanes.
            is_counted = flag.reshape(-1, *[1] * (x.ndim - 1))
            x = xp.where(is_counted, x - xp.expand_dims(mean, axes), 0)
            num_values = xp.maximum(num_new, 1) * math.prod(x.shape[1:num_axes])
            delta = xp.sum(x, axes) / num_values
            batch_var = xp.sum(xp.square(x), axes) / num_values - xp.square(delta)
        new_var = w_old * var + w_new * batch_var + xp.square(delta) * w_old * w_new
        new_mean = mean + delta * w_new
        # A single non-finite value makes the variance NaN or infinite.
        is_finite = xp.isfinite(new_var)
        return xp.where(is_finite, new_mean, mean), xp.where(is_finite, new_var, var)

    means, structure = jax.tree.flatten(old.mean, is_leaf=lambda x: x is None)
    trees = structure.flatten_up_to(old.var), structure.flatten_up_to(value)
    pairs = [update(*x) for x in zip(means, *trees, strict=True)]
    mean, var = (structure.unflatten(x) for x in zip(*pairs, strict=True))
    return Statistics(mean=mean, var=var, count=count)


def normalized_space(
    space: AnySpace, mean: ArrayTree, obs: ArrayTree, num_axes: int = 1
) -> AnySpace:
    """Returns the space of normalized observations.

    The space of a leaf without a mean is unchanged.

    Args:
        space: space of one raw observation.
        mean: `mean` of the `Statistics` of the observations.
        obs: `[B, ...]`, normalized observations, or their shapes and dtypes.
        num_axes: number of leading batch axes.
    """
    leaves, structure = jax.tree.flatten(obs)
    means = structure.flatten_up_to(mean)
    parts = [
        jax.ShapeDtypeStruct(x.shape[num_axes:], x.dtype)
        if mean is not None or part is None
        else part
        for x, mean, part in zip(
            leaves, means, _spaces(space, len(leaves)), strict=True
        )
    ]
    return space_of(structure.unflatten(parts))


def _spaces(space: AnySpace | None, num_leaves: int) -> list[AnySpace | None]:
    """Returns the space of each leaf; None if the space is unknown."""
    spaces = [] if space is None else space.leaves()
    # A custom space may not define `leaves`.
    return spaces if len(spaces) == num_leaves else [None] * num_leaves


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _is_image(space: AnySpace | None) -> bool:
    if not isinstance(space, Box):
        return False
    return np.dtype(space.dtype) == np.uint8 and len(space.shape) >= 2


def float_dtype(x: jax.Array) -> jnp.dtype:
    """Returns the dtype of a normalized leaf."""
    return x.dtype if _is_float(x) else jnp.dtype(jnp.float32)
