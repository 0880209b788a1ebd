"""`from_playground`: adapts any environment of MuJoCo Playground to `Env`."""

import subprocess
from typing import Any

from rollout.envs.optional_import import load
from rollout.envs.suites import physics
from rollout.envs.types import Env
from rollout.envs.wrappers.endings import TimeLimit


def from_playground(env: Any) -> Env:
    """Makes an `Env` of an environment of MuJoCo Playground.

    `done` is a termination. Playground's time limit belongs to its wrapper, which is
    not used: `TimeLimit` sets one, which `rollout.envs.make` puts on. Actions lie in
    [-1, 1], as the agents that Playground trains choose them. `info` has Playground's
    metrics. A step draws from its own key, which replaces `info["rng"]` in
    Playground's state.

    Args:
        env: the result of `mujoco_playground.registry.load`, or another `MjxEnv`
            without the wrappers of its training, with `impl="jax"`.

    Returns:
        An `Env` whose state is Playground's own, and whose leaves are those of
        `env.mjx_model`, so that with `vectorize_each` lanes differ in masses, gravity
        or gears. Values that `env` computed from its model when it was made do not
        change.

    Raises:
        TypeError: if `env` lacks the methods of an `MjxEnv`.
        ValueError: if `env` resets itself, counts its steps, or is a batch, or if its
            `impl` is not "jax".
    """
    impl = getattr(getattr(env, "mjx_model", None), "impl", None)
    # With other `impl`s the lanes share contacts, so no lane can be reset alone.
    if impl is not None and impl.value != "jax":
        raise ValueError(
            '`env` must be made with `config_overrides={"impl": "jax"}`, got impl='
            f"{impl.value!r}."
        )
    return physics.adapt(env, model_field="_mjx_model", frame_field=None)


def ids() -> tuple[str, ...]:
    """Lists the names of Playground's environments."""
    return tuple(load("mujoco_playground", "playground").registry.ALL_ENVS)


def make(name: str, **options: Any) -> Env:
    """Makes the environment of this name.

    Options are fields of its configuration, such as `sim_dt`, with dots for nested
    fields (`**{"reward_config.scales.termination": -1.0}`). `impl` is "jax" by default.
    Some environments download the model of their robot, which needs git.
    """
    registry = load("mujoco_playground", "playground").registry
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
        raise OSError(f"its robot must be downloaded with git: {error}") from error
    return TimeLimit(env, options.get("episode_length", config.episode_length))


def _fields(config: Any, prefix: str = "") -> list[str]:
    """Lists the names of a configuration's fields, with dots for nested ones."""
    names = []
    for name, value in config.items():
        inside = hasattr(value, "items")
        names += _fields(value, f"{prefix}{name}.") if inside else [prefix + name]
    return names
