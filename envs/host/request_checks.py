"""Checks what environments are and return, where several kinds of them need it."""

import inspect
from typing import Any

import numpy as np


def closed(is_closed: bool) -> None:
    """Raises if environments are used after `close`."""
    if is_closed:
        raise ValueError("`env` must be open, got one after `close`.")


def new_interface(env: Any) -> None:
    """Raises for an environment of gym before 0.26, whose `reset` takes no seed."""
    name = type(env).__name__
    # Asked of the signature: a call of `reset` may take long, or have a side effect.
    try:
        inspect.signature(env.reset).bind(seed=0)
    except TypeError:
        if not hasattr(env, "seed"):
            return  # its first reset says what is wrong
        raise ValueError(
            f"`env` must have the methods of `gymnasium.Env`, got {name} of gym before "
            "0.26, whose `reset` takes no `seed`: put a `gymnasium.Env` around it, in "
            "which `reset(seed=, options=)` calls its `seed` and returns (obs, {}), "
            'and `step` makes two flags of `done` and `info["TimeLimit.truncated"]`.'
        ) from None
    except (AttributeError, ValueError):  # it has none, or one that is compiled
        return


def same_spaces(first: tuple[Any, Any], other: tuple[Any, Any], number: int) -> None:
    """Raises if an environment has other spaces than the first one."""
    for kind, a, b in zip(("observation", "action"), first, other, strict=True):
        if a != b:
            raise ValueError(
                f"`make_fns` must make environments of one {kind} space, got {a}, and "
                f"{b} of environment {number}."
            )


def drawn(env: Any, number: int | None = None) -> np.ndarray:
    """Returns what an environment draws, or one of a vector environment.

    Returns:
        `[H, W, 3]` uint8.

    Raises:
        ValueError: if it draws nothing of this kind.
    """
    what, hint = "`env.render()` must return", ""
    try:
        pixels = env.render() if hasattr(env, "render") else None
    except NotImplementedError:  # of the base class of Gymnasium
        what, pixels = "`env` must have a method `render` that returns", None
    if number is not None and pixels is not None:
        pixels = pixels[number]
    if getattr(env, "render_mode", None) != "rgb_array":
        hint = ': make the environment with `render_mode="rgb_array"`'
    return frame(pixels, what, hint)


def frame(pixels: Any, what: str, hint: str = "") -> np.ndarray:
    """Checks that a frame is `[H, W, 3]` or `[H, W, 4]` uint8; returns its colors."""
    frame = np.asarray(pixels)
    if frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] in (3, 4):
        return frame[..., :3].copy()
    got = "None" if pixels is None else f"{frame.dtype} of shape {frame.shape}"
    raise ValueError(f"{what} [H, W, 3] uint8, got {got}{hint}.")
