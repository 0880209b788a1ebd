"""`from_playground`: adapts MuJoCo Playground environments to `Env`."""

import subprocess
from typing import Any

from rollout.checks import import_optional
from rollout.envs.suites import physics
from rollout.envs.types import Env
from rollout.envs.wrappers.endings import TimeLimit


def from_playground(env: Any) -> Env:
    """Adapts a MuJoCo Playground environment to `Env`.

    `done` counts as termination. Playground implements the time limit in a wrapper that
    is not used here: `rollout.envs.make` adds a `TimeLimit` instead. Actions lie in
    [-1, 1], the range of Playground's agents. `info` contains Playground's metrics. The
    key of each step replaces `info["rng"]` in Playground's state.

    Args:
        env: result of `mujoco_playground.registry.load`, or another `MjxEnv` without
            training wrappers, with `impl="jax"`.

    Returns:
        An `Env` with the state of `env`. Its leaves are the leaves of `env.mjx_model`,
        so `vectorize_each` can vary masses, gravity or gears between lanes. Values that
        `env` derived from the model at construction do not change.

    Raises:
        TypeError: if `env` lacks the methods of an `MjxEnv`.
        ValueError: if `env` resets automatically, counts steps or is batched, or if
            `impl` is not "jax".
    """
    impl = getattr(getattr(env, "mjx_model", None), "impl", None)
    # Other implementations share contacts between lanes, so a single lane cannot reset.
    if impl is not None and impl.value != "jax":
        raise ValueError(
            '`env` must be made with `config_overrides={"impl": "jax"}`, got impl='
            f"{impl.value!r}."
        )
    return physics.adapt(env, model_field="_mjx_model", frame_field=None)


def ids() -> tuple[str, ...]:
    """Lists the names of Playground's environments."""
    return tuple(import_optional("mujoco_playground", "playground").registry.ALL_ENVS)


def make(name: str, **options: Any) -> Env:
    """Creates an environment by name.

    `options` are fields of the configuration, for example `sim_dt`, with dots for
    nested fields (`**{"reward_config.scales.termination": -1.0}`). `impl` is "jax" by
    default. Some environments download a robot model, which requires git.
    """
    registry = import_optional("mujoco_playground", "playground").registry
    config = registry.get_default_config(name)
    fields = _fields(config)
    unknown = sorted(set(options) - set(fields))
    if unknown:
        raise TypeError(
            f"the options of playground:{name} are {', '.join(fields)}; got "
            f"{', '.join(unknown)}."
        )
    if "impl" in fields:
        options = {"impl": "jax", **options}
    try:
        env = from_playground(registry.load(name, config_overrides=options))
    except subprocess.CalledProcessError as error:
        raise OSError(f"the robot model needs a download by git: {error}") from error
    return TimeLimit(env, options.get("episode_length", config.episode_length))


def _fields(config: Any, prefix: str = "") -> list[str]:
    """Lists the field names of a configuration, with dots for nested fields."""
    names = []
    for name, value in config.items():
        is_nested = hasattr(value, "items")
        names += _fields(value, f"{prefix}{name}.") if is_nested else [prefix + name]
    return names
