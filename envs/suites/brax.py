"""Any environment of brax, seen through the `Env` contract."""

import functools
from collections.abc import Hashable
from typing import Any

from envs.suites import physics
from envs.types import Env


def from_brax(env: Any) -> Env:
    """Makes an `Env` of an environment of brax.

    `done` is a termination. The time limit of an episode is that of brax's wrapper,
    which is not used: `TimeLimit` sets one. Actions lie in [-1, 1], as brax's own
    agents choose them; its environments scale them to their actuators. `info` has
    brax's metrics.

    Args:
        env: what `brax.envs.get_environment` returns, or another `brax.envs.Env`
            without the wrappers of `brax.envs.training`.

    Returns:
        An `Env` whose state is brax's own, and whose leaves are those of `env.sys`, so
        that with `vectorize_each` lanes differ in masses, gravity or gears. What `env`
        computed from `sys` when it was made stays as it is.

    Raises:
        TypeError: if `env` lacks the methods of a `brax.envs.Env`.
        ValueError: if `env` resets itself, counts its steps, or is a batch.
    """
    return physics.adapt(env, model_field="sys", frame_field="pipeline_state")


def ids() -> tuple[str, ...]:
    """Lists the names of brax's environments."""
    from brax import envs

    return tuple(envs._envs)


def build(name: str, **options: Any) -> Env:
    """Makes the environment `name`.

    Args:
        name: one of `ids()`.
        **options: arguments of its class, such as `backend`, by name.

    Returns:
        The environment, adapted.

    Raises:
        ValueError: if brax cannot make it so.
    """
    cached = all(isinstance(value, Hashable) for value in options.values())
    try:
        return (_build_once if cached else _build)(name, **options)
    except TypeError as error:
        raise ValueError(f"brax:{name} cannot be made here: {error}") from error


def _build(name: str, **options: Any) -> Env:
    from brax import envs

    return from_brax(envs.get_environment(name, **options))


_build_once = functools.cache(_build)  # the same object: it is static in every trace
