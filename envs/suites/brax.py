"""`from_brax`: adapts brax environments to `Env`."""

from typing import Any

from rollout.base.checks import import_optional
from rollout.envs.suites import physics
from rollout.envs.types import Env
from rollout.envs.wrappers.endings import TimeLimit

_LIMIT = 1000  # the default of `brax.envs.create`


def from_brax(env: Any) -> Env:
    """Adapts a brax environment to `Env`.

    `done` counts as termination, unless a custom environment sets
    `info["truncation"]`. brax implements the time limit in a wrapper that is not used
    here: `rollout.envs.make` adds a `TimeLimit` instead. Actions lie in [-1, 1], the
    range of brax's agents; the environments scale them to the actuators. `info`
    contains brax's metrics.

    Args:
        env: result of `brax.envs.get_environment`, or another `brax.envs.Env` without
            the wrappers of `brax.envs.training`.

    Returns:
        An `Env` with the state of `env`. Its leaves are the leaves of `env.sys`, so
        `vectorize_each` can vary masses, gravity or gears between lanes. Values that
        `env` derived from `sys` at construction do not change.

    Raises:
        TypeError: if `env` lacks the methods of a `brax.envs.Env`.
        ValueError: if `env` resets automatically, counts steps or is batched.
    """
    return physics.adapt(env, model_field="sys", frame_field="pipeline_state")


def ids() -> tuple[str, ...]:
    """Lists the names of brax's environments."""
    return tuple(import_optional("brax.envs")._envs)


def make(name: str, **options: Any) -> Env:
    """Creates an environment by name; `options` are arguments of the class."""
    env = from_brax(import_optional("brax.envs").get_environment(name, **options))
    return TimeLimit(env, _LIMIT)
