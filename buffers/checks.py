"""Checks of what users hand to a buffer: while tracing, so free at run time."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp


def count(name: str, value: Any) -> None:
    """Refuses a count that is not a Python int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}.")


def without_mask(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Takes the field `mask` out of a dataclass that has one."""
    return tree.replace(mask=()) if _has_mask(tree) else tree


def with_mask(rows: chex.ArrayTree) -> chex.ArrayTree:
    """Puts back what `without_mask` took out: every row, `[S, ...]`, is valid."""
    if not _has_mask(rows):
        return rows
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    return rows.replace(mask=jnp.ones((num_rows,), bool))


def row(tree: chex.ArrayTree, num_envs: int) -> None:
    """Refuses a transition without leaves, or with a leaf that lacks the lane axis."""
    leaves = jax.tree.leaves_with_path(tree)
    if not leaves:
        raise ValueError("`transition` must have at least one array, got none.")
    for path, leaf in leaves:
        if leaf.shape[:1] != (num_envs,):
            raise ValueError(
                f"`transition` must have the leading axis num_envs={num_envs}, got "
                f"shape {leaf.shape}{_at(path)}."
            )


def like_init(rows: chex.ArrayTree, experience: chex.ArrayTree) -> bool:
    """Refuses rows unlike those of `init`; tells whether they are a single step."""
    structures = jax.tree.structure(experience), jax.tree.structure(rows)
    if structures[0] != structures[1]:
        raise ValueError(
            f"`trajectory` must have the structure of `init`, {structures[0]}, got "
            f"{structures[1]}."
        )
    old, new = jax.tree.leaves_with_path(experience), jax.tree.leaves(rows)
    is_step = new[0].ndim == old[0][1].ndim - 1
    length = () if is_step else new[0].shape[:1]
    for (path, ring), leaf in zip(old, new, strict=True):
        want = (*length, *ring.shape[1:])
        if (leaf.shape, leaf.dtype) != (want, ring.dtype):
            raise ValueError(
                f"`trajectory` must be {ring.dtype} of shape {want}{_at(path)}, got "
                f"{leaf.dtype} of shape {leaf.shape}."
            )
    return is_step


def _has_mask(tree: chex.ArrayTree) -> bool:
    return dataclasses.is_dataclass(tree) and hasattr(tree, "mask")


def _at(path: tuple[Any, ...]) -> str:
    return f" at {jax.tree_util.keystr(path)}" if path else ""
