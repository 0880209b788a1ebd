"""Checks what environments are and return, where several kinds of them need it."""

from typing import Any

import numpy as np


def closed(is_closed: bool) -> None:
    """Raises if environments are used after `close`."""
    if is_closed:
        raise ValueError("`env` must be open, got one after `close`.")


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
    if pixels is None and getattr(env, "render_mode", None) != "rgb_array":
        hint = ': make the environment with `render_mode="rgb_array"`'
    return frame(pixels, what, hint)


def frame(pixels: Any, what: str, hint: str = "") -> np.ndarray:
    """Checks that a frame is `[H, W, 3]` or `[H, W, 4]` uint8; returns its colors."""
    frame = np.asarray(pixels)
    if frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] in (3, 4):
        return frame[..., :3].copy()
    got = "None" if pixels is None else f"{frame.dtype} of shape {frame.shape}"
    raise ValueError(f"{what} [H, W, 3] uint8, got {got}{hint}.")
