"""Checks of requests to host environments."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from envs import checks


def closed(is_closed: bool) -> None:
    """Raises for a request to environments after `close`."""
    if is_closed:
        raise ValueError("`env` must be open, got one after `close`.")


def idle(which: Collection[int], under_way: Collection[int]) -> None:
    """Checks that none of these environments is under way."""
    busy = sorted(set(which) & set(under_way))
    if busy:
        raise ValueError(
            f"`env_id` and `mask` must leave out what is under way, got {busy[0]}: "
            "`receive` it first."
        )


def all_idle(name: str, under_way: Collection[int]) -> None:
    """Raises for a request to every environment while some are under way."""
    if under_way:
        raise ValueError(
            f"`{name}` must be called with no environment under way, got "
            f"{len(under_way)}: `receive` them first."
        )


def env_ids(env_id: Any, num_envs: int) -> list[int]:
    """Checks that numbers are of environments, each at most once."""
    ids = np.asarray(env_id)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"`env_id` must be [R] integers, got {ids.dtype} of shape {ids.shape}."
        )
    ids = ids.tolist()
    if len(set(ids)) < len(ids) or (ids and not 0 <= min(ids) <= max(ids) < num_envs):
        raise ValueError(
            f"`env_id` must be different numbers from 0 to {num_envs - 1}, got {ids}."
        )
    return ids


def num_ready(value: Any, under_way: int) -> None:
    """Raises if more environments are awaited than can answer."""
    checks.count("num_ready", value)
    if value > under_way:
        raise ValueError(
            f"`num_ready` must be at most as many as are under way, {under_way}, got "
            f"{value}."
        )


def length(name: str, values: Sequence[Any], num_envs: int) -> None:
    """Checks the number of rows."""
    if len(values) != num_envs:
        raise ValueError(
            f"`{name}` must have one row for each of {num_envs} environments, got "
            f"{len(values)}."
        )


def reset(seeds: Any, mask: Any, num_envs: int) -> list[int]:
    """Checks seeds and a mask; returns the environments to reset."""
    length("seeds", seeds, num_envs)
    return masked(mask, num_envs)


def masked(mask: Any, num_envs: int) -> list[int]:
    """Checks a mask of at least one environment; returns their numbers."""
    mask = np.asarray(mask)
    which = mask.nonzero()[0].tolist() if mask.shape == (num_envs,) else []
    if not which or mask.dtype != bool:
        raise ValueError(
            f"`mask` must be [{num_envs}] bool with at least one True, got {mask!r}."
        )
    return which


def same_spaces(first: tuple[Any, Any], other: tuple[Any, Any], number: int) -> None:
    """Checks that an environment has the spaces of the first."""
    for kind, a, b in zip(("observation", "action"), first, other, strict=True):
        if a != b:
            raise ValueError(
                f"`make_fns` must make environments of one {kind} space, got {a} of "
                f"environment 0 and {b} of environment {number}."
            )
