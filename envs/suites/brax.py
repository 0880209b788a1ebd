"""`from_brax`: adapts any environment of brax to `Env`."""

from typing import Any

from rollout.envs.optional_import import load
from rollout.envs.suites import physics
from rollout.envs.types import Env
from rollout.envs.wrappers.endings import TimeLimit

_LIMIT = 1000  # the default of `brax.envs.create`


def from_brax(env: Any) -> Env:
    """Makes an `Env` of an environment of brax.

    `done` is a termination, except where a custom environment sets
    `info["truncation"]`. brax's time limit belongs to its wrapper, which is not used:
    `TimeLimit` sets one, which `rollout.envs.make` puts on. Actions lie in
    [-1, 1], as brax's own agents choose them; its environments scale them to their
    actuators. `info` has brax's metrics.

    Args:
        env: the result of `brax.envs.get_environment`, or another `brax.envs.Env`
            without the wrappers of `brax.envs.training`.

    Returns:
        An `Env` whose state is brax's own, and whose leaves are those of `env.sys`, so
        that with `vectorize_each` lanes differ in masses, gravity or gears. Values that
        `env` computed from `sys` when it was made do not change.

    Raises:
        TypeError: if `env` lacks the methods of a `brax.envs.Env`.
        ValueError: if `env` resets itself, counts its steps, or is a batch.
    """
    return physics.adapt(env, model_field="sys", frame_field="pipeline_state")


def ids() -> tuple[str, ...]:
    """Lists the names of brax's environments."""
    return tuple(load("brax.envs")._envs)


def make(name: str, **options: Any) -> Env:
    """Makes the environment of this name; options are arguments of its class."""
    env = from_brax(load("brax.envs").get_environment(name, **options))
    return TimeLimit(env, _LIMIT)
