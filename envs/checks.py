"""Checks options; messages name the condition and the value."""

import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

INT32_MAX = 2**31 - 1  # steps, lanes and episodes are counted in int32
_REAL: Any = numbers.Real  # a type checker knows no order of it


def int_between(
    name: str, value: Any, *, least: int = 1, most: int | None = INT32_MAX
) -> int:
    """Checks an integer from `least` to `most`; returns it as a Python int."""
    if not _is_integer(value) or operator.index(value) < least:
        raise ValueError(f"`{name}` must be an int of at least {least}, got {value!r}.")
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be at most {most}, got {value!r}.")
    return operator.index(value)


def seconds(name: str, value: Any) -> float | None:
    """Checks a finite number of seconds above 0; None stands for any time."""
    if value is None:
        return None
    is_real = isinstance(value, _REAL) and not isinstance(value, bool)
    if not (is_real and 0 < value < float("inf")):
        raise ValueError(
            f"`{name}` must be a finite number of seconds above 0, or None for any "
            f"time, got {value!r}."
        )
    return float(value)


def kind_of_env(env: Any, *, is_host: bool) -> None:
    """Raises if a JAX environment is given where a host one belongs, or vice versa."""
    missing = [x for x in ("num_envs", "step", "close") if not hasattr(env, x)]
    if is_host and (hasattr(env, "reset_done") or missing):
        raise ValueError(
            "`env` must be a `HostVectorEnv`, such as `rollout.envs.from_gymnasium` "
            f"makes, got {type(env).__name__}: environments in JAX go into a "
            "`Collector`."
        )
    if not is_host and hasattr(env, "num_envs") and not hasattr(env, "reset_done"):
        raise ValueError(
            "`env` must be a `VectorEnv` in JAX, such as `rollout.envs.vectorize` "
            f"makes, got {type(env).__name__}: environments that step in NumPy go into "
            "a `HostCollector`."
        )


def single(env: Any) -> None:
    """Checks that `env` is one environment, and a pytree."""
    if hasattr(env, "num_envs"):
        raise ValueError(
            "`env` must be one environment, got many side by side: wrap it before "
            "`vectorize`."
        )
    missing = [name for name in ("reset", "step") if not hasattr(env, name)]
    if missing:
        raise ValueError(
            "`env` must have the methods `reset` and `step` of `rollout.envs.Env`, got "
            f"{type(env).__name__} without {missing[0]}: `from_gymnax` adapts others."
        )
    if jax.tree_util.all_leaves([env]):
        raise ValueError(
            "`env` must be a pytree, such as a `flax.struct.dataclass`, got a plain "
            f"{type(env).__name__}."
        )


def flag(name: str, value: Any) -> jax.Array:
    """Checks that a flag of a step is a bool or an integer; returns it as a bool."""
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.inexact):
        raise ValueError(
            f"`env.step` must return `{name}` as bool, got {value.dtype}: compare it, "
            "as in `done > 0.5`."
        )
    return value.astype(bool)


def integer(name: str, value: Any) -> int:
    """Checks an integer of Python or NumPy; returns it as a Python int."""
    if not _is_integer(value):
        raise ValueError(f"`{name}` must be an int, got {value!r}.")
    return operator.index(value)


def function(name: str, value: Any) -> None:
    """Checks that an option can be called."""
    if not callable(value):
        raise ValueError(f"`{name}` must be a function, got {value!r}.")


def boolean(name: str, value: Any) -> None:
    """Checks that an option is a bool."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"`{name}` must be a bool, got {value!r}.")


def fraction(name: str, value: Any) -> None:
    """Checks a number in [0, 1], or a scalar array, whose value may not be known."""
    if isinstance(value, _REAL) and not isinstance(value, bool):
        is_wrong = not 0 <= value <= 1
    else:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", bool)
        is_wrong = shape != () or not jnp.issubdtype(dtype, jnp.number)
    if is_wrong:
        raise ValueError(f"`{name}` must be a number in [0, 1], got {value!r}.")


def holds(dtype: Any, low: int, high: int) -> None:
    """Checks that `dtype` is an integer dtype that holds `low` to `high`."""
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"`dtype` must be an integer dtype, got {dtype}.")
    limits = jnp.iinfo(dtype)
    if not limits.min <= low <= high <= limits.max:
        raise ValueError(
            f"`dtype` must hold the integers from {low} to {high}, got {dtype}, which "
            f"holds those from {limits.min} to {limits.max}."
        )


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool | jax.Array) and hasattr(value, "__index__")


def is_known(tree: Any) -> bool:
    """Returns whether every leaf is a number or an array with values.

    jax also builds pytrees of tracers, and of placeholders of any kind.
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    kinds = (numbers.Number, np.ndarray, np.generic, jax.Array)
    return all(
        isinstance(leaf, kinds) and not isinstance(leaf, Tracer) for leaf in leaves
    )


def describe(value: Any) -> str:
    """Describes a value for a message: dtype and shape, or its type."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} of shape {value.shape}"
    return f"{len(value)} values" if type(value) is tuple else type(value).__name__
