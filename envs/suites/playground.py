"""`from_playground`: adapts MuJoCo Playground environments to `Env`."""

import subprocess
from typing import Any

from rollout.base.checks import import_optional
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
            training wrappers, with `impl="jax"` or `impl="warp"`. Playground's default
            since 0.2.0 is "warp", MuJoCo Warp.

    Returns:
        An `Env` with the state of `env`. Its leaves are the leaves of `env.mjx_model`,
        so `vectorize_each` can vary masses, gravity or gears between lanes. Values that
        `env` derived from the model at construction do not change.

        MuJoCo Warp stores the contacts of all lanes in arrays without a lane axis,
        which it computes again in every step. The state contains None in place of
        these arrays, so that lanes reset independently.

    Raises:
        TypeError: if `env` lacks the methods of an `MjxEnv`.
        ValueError: if `env` resets automatically, counts steps or is batched, or if
            `impl` is neither "jax" nor "warp", or if bodies sleep in MuJoCo Warp.
    """
    model: Any = getattr(env, "mjx_model", None)
    # Custom environments may have no physical model.
    impl = model.impl.value if hasattr(model, "impl") else "jax"
    if impl not in ("jax", "warp"):
        raise ValueError(
            '`env` must be made with `config_overrides={"impl": "jax"}` or "warp", got '
            f"impl={impl!r}."
        )
    is_warp = impl == "warp"
    if is_warp and model.opt.enableflags & _sleep_flag():
        # Sleeping bodies need arrays without a lane axis from the previous step.
        raise ValueError(
            "`env` must not have sleeping bodies if impl='warp', got a model with "
            "mjENBL_SLEEP. Clear this flag in `mj_model.opt.enableflags`."
        )
    return physics.adapt(
        env,
        model_field="_mjx_model",
        frame_field=None,
        has_shared_arrays=is_warp,
    )


def ids() -> tuple[str, ...]:
    """Lists the names of Playground's environments."""
    return tuple(import_optional("mujoco_playground", "playground").registry.ALL_ENVS)


def make(name: str, **options: Any) -> Env:
    """Creates an environment by name.

    `options` are fields of the configuration, for example `sim_dt`, with dots for
    nested fields (`**{"reward_config.scales.termination": -1.0}`). `impl` is "jax" by
    default, which runs on every platform, although Playground's default is "warp".
    Some environments download a robot model, which requires git.
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


def _sleep_flag() -> int:
    return int(import_optional("mujoco").mjtEnableBit.mjENBL_SLEEP)


def _fields(config: Any, prefix: str = "") -> list[str]:
    """Lists the field names of a configuration, with dots for nested fields."""
    names = []
    for name, value in config.items():
        is_nested = hasattr(value, "items")
        names += _fields(value, f"{prefix}{name}.") if is_nested else [prefix + name]
    return names
