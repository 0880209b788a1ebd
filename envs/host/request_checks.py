"""Checks the arguments of `reset`, `step`, `send` and the other requests."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np


def closed(is_closed: bool) -> None:
    """Raises if environments are used after `close`."""
    if is_closed:
        raise ValueError("`env` must be open, got one after `close`.")


def all_idle(name: str, in_flight: Collection[int]) -> None:
    """Raises if an environment is in flight when all are needed."""
    if in_flight:
        raise ValueError(
            f"`{name}` must be called with no environment in flight, got "
            f"{len(in_flight)}: `receive` them first."
        )


def env_ids(env_id: Any, num_envs: int, in_flight: Collection[int]) -> list[int]:
    """Returns the numbers of environments to step; raises if some cannot."""
    ids = np.asarray(env_id)
    kind, ids = ids.dtype.kind, ids.tolist()
    idle = set(range(num_envs)).difference(in_flight)
    if kind not in "iu" or len(set(ids)) < len(ids) or not idle.issuperset(ids):
        raise ValueError(
            "`env_id` must be different environments of these that are not in "
            f"flight, {sorted(idle)}, got {env_id!r}."
        )
    return ids


def length(name: str, values: Sequence[Any], num_envs: int) -> None:
    """Raises unless there is one value for each environment."""
    if len(values) != num_envs:
        raise ValueError(
            f"`{name}` must have one entry for each of {num_envs} environments, got "
            f"{len(values)}."
        )


def reset(seeds: Any, mask: Any, num_envs: int) -> list[int]:
    """Checks seeds and a mask; returns the numbers of the environments to reset."""
    length("seeds", seeds, num_envs)
    return masked(mask, num_envs)


def masked(mask: Any, num_envs: int) -> list[int]:
    """Checks a mask; returns the numbers of its environments, at least one."""
    mask = np.asarray(mask)
    which = mask.nonzero()[0].tolist() if mask.shape == (num_envs,) else []
    if not which or mask.dtype != bool:
        raise ValueError(
            f"`mask` must be [{num_envs}] bool with at least one True, got {mask!r}."
        )
    return which


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
