"""Validates objects of environment suites and converts their arrays."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp


def check_methods(env: Any, suite: str, methods: Sequence[str]) -> None:
    """Raises if an object lacks required methods or attributes of a suite."""
    missing = [name for name in methods if not hasattr(env, name)]
    if missing:
        raise TypeError(
            f"`env` must have {', '.join(methods)} of {suite}, got "
            f"{type(env).__name__} without {', '.join(missing)}."
        )


def check_no_reset(env: Any) -> None:
    """Raises if `env` is inside an auto-reset wrapper of a suite."""
    while env is not None:
        if "AutoReset" in type(env).__name__:
            raise ValueError(
                f"`env` must not reset itself, got {type(env).__name__}. Remove this "
                "wrapper: it discards the last observation of every episode."
            )
        # Wrappers of these suites store the wrapped environment in `_env`.
        env = getattr(env, "_env", None)


def like(new: chex.Array, old: chex.Array) -> jax.Array:
    """Casts `new` to the dtype of `old`."""
    return jnp.asarray(new, jnp.result_type(old))


class Held:
    """Holds an object as a static part of a pytree; compares by identity.

    Some environments are not hashable, because they contain arrays.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
