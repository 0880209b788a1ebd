"""What the spaces and arrays of a suite become here."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from envs import spaces
from envs.types import AnySpace


def to_space(space: Any) -> AnySpace:
    """Turns a space of gymnax, Gymnasium or JaxMARL into one of ours; others stay."""
    shape: Any = getattr(space, "shape", None)
    dtype: Any = getattr(space, "dtype", None)
    start = getattr(space, "start", 0)
    sizes = getattr(space, "nvec", getattr(space, "num_categories", None))
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        return space
    if sizes is not None or hasattr(space, "n"):
        # Gymnasium counts in int64, which jax has only on demand.
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    if sizes is not None:
        return spaces.MultiDiscrete(np.asarray(sizes), dtype, np.asarray(start))
    if hasattr(space, "n") and shape:
        return spaces.MultiBinary(tuple(shape), dtype)
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n), dtype, int(start))
    if hasattr(space, "low") and hasattr(space, "high"):
        # JaxMARL's Hanabi has a number for a shape.
        shape = tuple(int(size) for size in np.atleast_1d(shape))
        return spaces.Box(space.low, space.high, shape, jnp.dtype(dtype))
    return space


def like(new: chex.Array, old: chex.Array) -> jax.Array:
    """Makes an array of the dtype of `old`."""
    same = jnp.result_type(new) == jnp.result_type(old)
    return jnp.asarray(new) if same else jnp.asarray(new, jnp.result_type(old))
