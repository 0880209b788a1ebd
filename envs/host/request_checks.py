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


def frame(pixels: Any) -> np.ndarray:
    """Returns the frame that an environment drew, `[H, W, 3]` uint8; raises if none."""
    frame = np.asarray(pixels)
    if frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] in (3, 4):
        return frame[..., :3].copy()
    got = "None" if pixels is None else f"{frame.dtype} of shape {frame.shape}"
    raise ValueError(
        "`env.render()` must return [H, W, 3] uint8, got "
        f'{got}: make the environment with `render_mode="rgb_array"`.'
    )
