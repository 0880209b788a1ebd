"""Validates environments and calls; shared by several host environments."""

import inspect
from typing import Any

import numpy as np


def closed(is_closed: bool) -> None:
    """Raises if an environment is used after `close`."""
    if is_closed:
        raise ValueError("`env` must be open, got a closed environment.")


def new_interface(env: Any) -> None:
    """Raises for an environment of gym before 0.26, whose `reset` takes no seed."""
    name = type(env).__name__
    # Inspect the signature: a call of `reset` may be slow or have side effects.
    try:
        inspect.signature(env.reset).bind(seed=0)
    except TypeError:
        if not hasattr(env, "seed"):
            return  # the first reset raises a specific error
        raise ValueError(
            f"`env` must have the methods of `gymnasium.Env`, got {name} of gym before "
            "0.26, whose `reset` takes no `seed`. Wrap it in a `gymnasium.Env` whose "
            "`reset(seed=, options=)` calls the old `seed` and returns (obs, {}), and "
            'whose `step` makes two flags of `done` and `info["TimeLimit.truncated"]`.'
        ) from None
    except (AttributeError, ValueError):  # no `reset`, or a compiled one
        return


def find_method(env: Any, name: str) -> Any:
    """Returns a method of an environment inside wrappers, or None if there is none."""
    while env is not None:
        if hasattr(env, name):
            return getattr(env, name)
        env = getattr(env, "env", None)
    return None


def same_spaces(first: tuple[Any, Any], spaces: tuple[Any, Any], number: int) -> None:
    """Raises if the spaces of an environment differ from the first environment."""
    for name, a, b in zip(("observation", "action"), first, spaces, strict=True):
        if a != b:
            raise ValueError(
                f"`make_fns` must make environments with the same {name} space, got "
                f"{a} and, for environment {number}, {b}."
            )


def drawn(env: Any, number: int | None = None) -> np.ndarray:
    """Renders an environment, or one environment of a vector environment.

    Returns:
        `[H, W, 3]` uint8 frame.

    Raises:
        ValueError: if `env.render` does not return RGB frames.
    """
    requirement, hint = "`env.render()` must return", ""
    try:
        pixels = env.render() if hasattr(env, "render") else None
    except NotImplementedError:  # raised by the base class `gymnasium.Env`
        requirement, pixels = "`env` must have a method `render` that returns", None
    if number is not None and pixels is not None:
        pixels = pixels[number]
    if getattr(env, "render_mode", None) != "rgb_array":
        hint = '. Create the environment with `render_mode="rgb_array"`'
    return frame(pixels, requirement, hint)


def frame(pixels: Any, requirement: str, hint: str = "") -> np.ndarray:
    """Validates a frame, `[H, W, 3]` or `[H, W, 4]` uint8; returns `[H, W, 3]`."""
    frame = np.asarray(pixels)
    if frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] in (3, 4):
        return frame[..., :3].copy()
    got = "None" if pixels is None else f"{frame.dtype} of shape {frame.shape}"
    raise ValueError(f"{requirement} [H, W, 3] uint8, got {got}{hint}.")
