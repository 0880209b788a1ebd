"""Converts the spaces and arrays of other suites."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from envs.spaces import Box, Discrete, MultiBinary, MultiDiscrete, TreeSpace
from envs.types import AnySpace, ArrayTree


def to_space(space: Any) -> AnySpace:
    """Turns a space of gymnax, Gymnasium or JaxMARL into one of ours; others stay."""
    shape: Any = getattr(space, "shape", None)
    dtype: Any = getattr(space, "dtype", None)
    start = getattr(space, "start", 0)
    sizes = getattr(space, "nvec", getattr(space, "num_categories", None))
    if isinstance(space, MultiDiscrete | MultiBinary):
        return space
    if sizes is not None or hasattr(space, "n"):
        # Gymnasium counts in int64, which jax has only on demand.
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    if sizes is not None:
        return MultiDiscrete(np.asarray(sizes), dtype, np.asarray(start))
    if hasattr(space, "n") and shape:
        return MultiBinary(tuple(shape), dtype)
    if hasattr(space, "n"):
        return Discrete(int(space.n), dtype, int(start))
    if hasattr(space, "low") and hasattr(space, "high"):
        # JaxMARL's Hanabi has a number for a shape.
        shape = tuple(int(size) for size in np.atleast_1d(shape))
        return Box(space.low, space.high, shape, jnp.dtype(dtype))
    return space


def box_of(x: jax.ShapeDtypeStruct) -> Box:
    """The space of arrays of which nothing is known but the shape and the dtype."""
    if jnp.issubdtype(x.dtype, jnp.bool_):
        low, high = 0, 1
    elif jnp.issubdtype(x.dtype, jnp.integer):
        low, high = np.iinfo(x.dtype).min, np.iinfo(x.dtype).max
    else:
        low, high = -np.inf, np.inf
    return Box(low, high, x.shape, x.dtype)


def space_of(tree: ArrayTree) -> AnySpace:
    """The space of such arrays in a pytree."""
    parts = jax.tree.map(box_of, tree)
    return parts if isinstance(parts, Box) else TreeSpace(parts)


def check_methods(env: Any, suite: str, methods: Sequence[str]) -> None:
    """Checks that an object has the methods, or other attributes, of a suite."""
    missing = [name for name in methods if not hasattr(env, name)]
    if missing:
        raise TypeError(
            f"`env` must have {', '.join(methods)} of {suite}, got "
            f"{type(env).__name__} without {', '.join(missing)}."
        )


def check_no_reset(env: Any) -> None:
    """Raises for a wrapper of a suite that resets, under any number of others."""
    while env is not None:
        if "AutoReset" in type(env).__name__:
            raise ValueError(
                "`env` must not reset itself, since the last observation would be "
                f"lost, got {type(env).__name__}."
            )
        env = getattr(env, "_env", None)


def like(new: chex.Array, old: chex.Array) -> jax.Array:
    """Makes an array of the dtype of `old`."""
    same = jnp.result_type(new) == jnp.result_type(old)
    return jnp.asarray(new) if same else jnp.asarray(new, jnp.result_type(old))


class Held:
    """An object of a suite as a static part of a pytree: equal to itself only.

    Some cannot be hashed, as they hold arrays.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
