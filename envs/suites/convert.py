"""Checks the objects of other suites, and converts their arrays."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp


def check_methods(env: Any, suite: str, methods: Sequence[str]) -> None:
    """Checks that an object has the methods, or other attributes, of a suite."""
    missing = [name for name in methods if not hasattr(env, name)]
    if missing:
        raise TypeError(
            f"`env` must have {', '.join(methods)} of {suite}, got "
            f"{type(env).__name__} without {', '.join(missing)}."
        )


def check_no_reset(env: Any) -> None:
    """Raises if a suite's wrapper that resets is among the wrappers of `env`."""
    while env is not None:
        if "AutoReset" in type(env).__name__:
            raise ValueError(
                "`env` must not reset itself, since the last observation would be "
                f"lost, got {type(env).__name__}."
            )
        # Where the wrappers of these suites hold what they wrap.
        env = getattr(env, "_env", None)


def like(new: chex.Array, old: chex.Array) -> jax.Array:
    """Casts `new` to the dtype of `old`."""
    return jnp.asarray(new, jnp.result_type(old))


class Held:
    """Holds an object of a suite as a static part of a pytree, equal to itself only.

    Some objects cannot be hashed, since they hold arrays.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
