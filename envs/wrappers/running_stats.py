"""Running mean and variance of batches, for the normalising wrappers."""

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

    def normalize(
        self, raw: ArrayTree, epsilon: float = 1e-8, xp: Any = jnp
    ) -> ArrayTree:
        """Normalises values; leaves without statistics stay as they are.

        Args:
            raw: one value, or a batch with any number of axes before those of the
                statistics.
            epsilon: added to the variance.
            xp: `jnp`, or NumPy for statistics of NumPy.

        Returns:
            `(raw - mean) / sqrt(var + epsilon)`, in the dtypes of `NormalizeObs`.

        Raises:
            ValueError: if the last axes of a leaf are not those of its mean.
        """

        def normalize(mean: jax.Array, var: jax.Array, x: jax.Array) -> jax.Array:
            if mean is None:
                return x
            axes = tuple(range(x.ndim - mean.ndim))
            if x.shape[len(axes) :] != mean.shape:
                raise ValueError(
                    f"`raw` must have the shape {mean.shape} of its mean in the last "
                    f"axes, got {x.shape}."
                )
            centred = x.astype(mean.dtype) - xp.expand_dims(mean, axes)
            scale = xp.expand_dims(xp.sqrt(var + epsilon), axes)
            return (centred / scale).astype(float_dtype(x))

        trees = self.mean, self.var, raw
        return jax.tree.map(normalize, *trees, is_leaf=lambda x: x is None)


def names(name: str, value: Any) -> tuple[str, ...] | None:
    """Checks an option that names parts of a tree; None stands for all of it."""
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
    """Returns the statistics before the first batch, like `value`, `[B, ...]`.

    A leaf without statistics has None in their place. Flags, `Discrete`,
    `MultiDiscrete`, `MultiBinary` and an `action_mask` never have any: they number or
    mark things. Other integers have if they are an image, if `only` names them, or if
    they are all there is.

    Args:
        value: any pytree.
        num_axes: how many of the first axes are those of the batch.
        space: the space of one entry of the batch; None for floats.
        only: names of the parts that have statistics; None for floats and images.
        xp: `jnp`, or NumPy for statistics of NumPy.

    Raises:
        ValueError: if `only` has a name of which no leaf can have statistics.
    """
    leaves, structure = jax.tree.flatten_with_path(value)
    spaces = _spaces(space, len(leaves))
    numbers, chosen = [], []
    for (path, x), part in zip(leaves, spaces, strict=True):
        name, part = (
            jax.tree_util.keystr(path, simple=True, separator="/"),
            one_of(part),
        )
        is_wanted = len(leaves) == 1 or _is_float(x) or _is_image(part)
        if only is not None:
            # A name stands for all below it; the slash tells "speed" from "speeds".
            is_wanted = f"{name}/".startswith(tuple(f"{x}/" for x in only))
        # What numbers or marks something is not measured.
        marks = isinstance(part, Discrete | MultiDiscrete | MultiBinary)
        is_number = x.dtype != bool and not marks and not is_mask(path)
        numbers += [name] if is_number else []
        # Half precision is too coarse for statistics.
        dtype = jnp.promote_types(float_dtype(x), jnp.float32)
        chosen.append((x.shape[num_axes:], dtype) if is_number and is_wanted else None)
    for name in only or ():
        if not any(f"{path}/".startswith(f"{name}/") for path in numbers):
            raise ValueError(
                "`only` must name parts of the observation that are numbers, "
                f"{', '.join(numbers) or 'of which there are none'}, got {name}."
            )
    mean, var = (
        structure.unflatten([kind and xp.full(kind[0], x, kind[1]) for kind in chosen])
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

    The first `num_axes` axes belong to the batch, of which only B counts. An entry that
    is not finite in some lane keeps its mean and variance.

    Args:
        old: statistics so far.
        value: any pytree.
        num_axes: number of axes of the batch.
        xp: `jnp`, or NumPy for statistics of NumPy.
        flag: `[B]` bool, True for the lanes that count; None for all.
    """
    num_new: Any = jax.tree.leaves(value)[0].shape[0]
    if flag is not None:
        num_new = xp.sum(flag, dtype=np.float32)
    count = old.count + num_new
    # Weights stay in [0, 1]; sums would grow with the count.
    kept, new = old.count / count, num_new / count

    def update(mean: Any, var: Any, x: Any) -> tuple[Any, Any]:
        if mean is None:
            return None, None
        x, axes = x.astype(mean.dtype), tuple(range(num_axes))
        if flag is None:
            delta, batch_var = xp.mean(x, axes) - mean, xp.var(x, axes)
        else:
            # Deviations from the old mean, which is close: one pass over the lanes.
            is_counted = flag.reshape(-1, *[1] * (x.ndim - 1))
            x = xp.where(is_counted, x - xp.expand_dims(mean, axes), 0)
            num_values = xp.maximum(num_new, 1) * math.prod(x.shape[1:num_axes])
            delta = xp.sum(x, axes) / num_values
            batch_var = xp.sum(xp.square(x), axes) / num_values - xp.square(delta)
        new_var = kept * var + new * batch_var + xp.square(delta) * kept * new
        new_mean = mean + delta * new
        # One lane that is not finite makes the variance not finite, or NaN.
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
    """Returns the space of normalised observations: leaves without a mean keep theirs.

    Args:
        space: the space of one raw observation.
        mean: `mean` of the `Statistics` of the observations.
        obs: normalised observations, or their shapes and dtypes, `[B, ...]`.
        num_axes: how many of the first axes are those of the batch.
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
    """Returns the space of each leaf; None where it is not known."""
    spaces = [] if space is None else space.leaves()
    # A space of the user's own may not know its leaves.
    return spaces if len(spaces) == num_leaves else [None] * num_leaves


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _is_image(space: AnySpace | None) -> bool:
    if not isinstance(space, Box):
        return False
    return np.dtype(space.dtype) == np.uint8 and len(space.shape) >= 2


def float_dtype(x: jax.Array) -> jnp.dtype:
    """Returns the dtype of a normalised leaf."""
    return x.dtype if _is_float(x) else jnp.dtype(jnp.float32)
