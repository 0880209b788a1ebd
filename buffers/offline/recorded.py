"""Recorded data as host arrays: checked, cast, and marked as episodes."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from buffers import checks
from buffers.types import ArrayTree, Experience


def read(
    *,
    obs: ArrayTree,
    action: ArrayTree,
    reward: chex.Array,
    terminated: chex.Array,
    truncated: chex.Array,
    next_obs: ArrayTree,
) -> Experience:
    """Returns the data, `[K, ...]`, in dtypes that jax keeps, with episodes marked."""
    reward = _array("reward", (), reward, np.float32)
    terminated, truncated = (
        _flag("terminated", terminated),
        _flag("truncated", truncated),
    )
    shape = reward.shape[:1]
    columns: dict[str, Any] = {
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
    }
    for name, value in columns.items():
        if value.shape != shape:
            raise ValueError(
                f"`{name}` must have shape {shape}, one number per row, got "
                f"{value.shape}."
            )
    obs, next_obs = _tree("obs", obs, *shape), _tree("next_obs", next_obs, *shape)
    _check_alike(obs, next_obs)
    episode_id, episode_length = _marks(terminated | truncated)
    return Experience(
        obs=obs,
        action=_tree("action", action, *shape),
        next_obs=next_obs,
        episode_id=episode_id,
        episode_length=episode_length,
        **columns,
    )


def check_successors(obs: ArrayTree, next_obs: ArrayTree, done: Any) -> None:
    """Checks that successors are the observations of the next rows.

    Args:
        obs: `[K, ...]` host arrays.
        next_obs: `[K, ...]` host arrays.
        done: `[K]` bool, where an episode ended: there any successor will do.
    """
    later = jax.tree.leaves(next_obs)
    for (path, leaf), after in zip(jax.tree.leaves_with_path(obs), later, strict=True):
        here, there = after[:-1], leaf[1:]
        same = (here == there) | ((here != here) & (there != there))  # NaN is NaN
        same = same.all(axis=tuple(range(1, same.ndim))) | done[:-1]
        if not same.all():
            raise ValueError(
                "`next_obs` must be the `obs` of the next row within an episode, got "
                f"another one in row {np.argmin(same)}{checks.at(path)}."
            )


def _marks(done: np.ndarray) -> tuple[Any, Any]:
    """Number and step of the episode that each row belongs to, `[K]` int32 each."""
    first = np.concatenate([np.ones(1, bool), done[:-1]])[: len(done)]
    episode = np.cumsum(first) - 1
    step = np.arange(len(done)) - np.flatnonzero(first)[episode] + 1
    return episode.astype(np.int32), step.astype(np.int32)


def _flag(name: str, value: Any) -> np.ndarray:
    """A flag as bool."""
    value = np.asarray(value)
    if value.dtype == bool:
        return value
    odd = [x for x in np.unique(value).tolist() if x not in (0, 1)]
    if odd:
        raise ValueError(f"`{name}` must hold 0 and 1 only, got {odd[0]!r}.")
    return value.astype(bool)


def _tree(name: str, tree: ArrayTree, num_rows: int) -> ArrayTree:
    """A tree of arrays, each with `num_rows` rows."""

    def read_leaf(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        leaf = _array(name, path, leaf)
        if leaf.shape[:1] != (num_rows,):
            raise ValueError(
                f"`{name}` must have {num_rows} rows, as `reward`, got shape "
                f"{leaf.shape}{checks.at(path)}."
            )
        return leaf

    return jax.tree_util.tree_map_with_path(read_leaf, tree)


def _array(
    name: str, path: tuple[Any, ...], value: Any, dtype: Any = None
) -> np.ndarray:
    """An array of numbers in a dtype that jax keeps."""
    value = np.asarray(value)
    if not any(jnp.issubdtype(value.dtype, kind) for kind in (np.number, np.bool_)):
        raise ValueError(
            f"`{name}` must hold numbers, got {value.dtype}{checks.at(path)}."
        )
    dtype = jax.dtypes.canonicalize_dtype(dtype or value.dtype)
    if value.dtype == dtype:
        return value
    with np.errstate(over="ignore"):
        cast = value.astype(dtype)
    is_exact = jnp.issubdtype(dtype, np.integer)
    lost = cast != value if is_exact else np.isinf(cast) & ~np.isinf(value)
    if lost.any():
        got = value[lost].flat[0]
        raise ValueError(f"`{name}` must fit into {dtype}, got {got}{checks.at(path)}.")
    return cast


def _check_alike(obs: ArrayTree, next_obs: ArrayTree) -> None:
    """Checks that successors have the kind of observations."""
    structures = jax.tree.structure(obs), jax.tree.structure(next_obs)
    if structures[0] != structures[1]:
        raise ValueError(
            f"`next_obs` must have the structure of `obs`, {structures[0]}, got "
            f"{structures[1]}."
        )
    later = jax.tree.leaves(next_obs)
    for (path, leaf), after in zip(jax.tree.leaves_with_path(obs), later, strict=True):
        if (leaf.dtype, leaf.shape) != (after.dtype, after.shape):
            raise ValueError(
                f"`next_obs` must be {leaf.dtype} of shape {leaf.shape}, as `obs`, got "
                f"{after.dtype} of shape {after.shape}{checks.at(path)}."
            )
