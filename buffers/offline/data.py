"""`from_data`: fills a buffer with recorded steps, dealing their episodes to lanes."""

import heapq
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from rollout import checks
from rollout.buffers.replay import ReplayBuffer
from rollout.envs.spaces import lost_in_cast
from rollout.envs.types import ArrayTree
from rollout.types import Transition

_CHUNK_BYTES = 2**26  # of rows copied to the device at a time


def from_data(
    buffer: ReplayBuffer,
    *,
    obs: ArrayTree,
    action: ArrayTree,
    reward: chex.Array,
    terminated: chex.Array,
    truncated: chex.Array,
    next_obs: ArrayTree,
) -> ArrayTree:
    """Fills a buffer with recorded steps, on the host.

    The rows are episodes one after another, each in the order of time; it ends where
    a flag is set. After the last row the data breaks off, and rows added later do not
    continue it. One lane keeps the order. With more lanes, whole episodes are dealt
    out, the longest first, each to the lane with the fewest rows; within a lane they
    keep their order.

    Args:
        buffer: any buffer; if nothing is added later, `num_envs=1` is as good as more.
        obs: `[K, ...]`, K rows as NumPy or jax arrays, 0 or more.
        action: `[K, ...]`.
        reward: `[K]`; it becomes float32.
        terminated: `[K]` bool, or zeros and ones.
        truncated: `[K]` bool, or zeros and ones.
        next_obs: `[K, ...]`, the true successors, like `obs`.

    Returns:
        The state. Its rows are a `rollout.types.Transition`, with `()` for what the
        data does not have, and ids and lengths of the episodes, in dtypes that jax
        keeps: without `jax_enable_x64`, 64 bits become 32.

    Raises:
        ValueError: if an array is not as above or a number does not fit its dtype (the
            message names the leaf); if the buffer is too small; or if, with
            `next_obs="shared"`, a successor within an episode is not the observation
            of the next row.
    """
    columns: dict[str, Any] = {
        "obs": _tree("obs", obs),
        "action": _tree("action", action),
        "reward": _array("`reward`", reward, np.float32),
        "terminated": _array("`terminated`", terminated, bool),
        "truncated": _array("`truncated`", truncated, bool),
        "next_obs": _tree("next_obs", next_obs),
    }
    rows = _rows_of(columns)
    done, num_envs = rows.terminated | rows.truncated, buffer.num_envs
    index = _deal(done, num_envs)
    if len(index) > buffer.num_slots:
        raise ValueError(
            f"`capacity` must be at least {len(index) * num_envs} for {len(done)} rows "
            f"dealt to num_envs={num_envs} lanes, got {buffer.capacity}."
        )
    if buffer.next_obs == "shared":
        check_successors(rows.obs, rows.next_obs, done)
    step = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_envs, *x.shape[1:]), x.dtype), rows
    )
    state = buffer.init(step)
    final_obs, num_ends = state.ring.final_obs, np.count_nonzero(done)
    if final_obs and final_obs.row.shape[0] < num_ends:
        raise ValueError(
            f"`final_obs_capacity` must hold the ends of all {num_ends} episodes, got "
            f"{final_obs.row.shape[0]}."
        )
    return _add(buffer, state, rows, index)


def check_successors(obs: ArrayTree, next_obs: ArrayTree, done: Any) -> None:
    """Checks that successors are the observations of the next rows.

    Args:
        obs: `[K, ...]` host arrays.
        next_obs: `[K, ...]` host arrays.
        done: `[K]` bool, True where an episode ended: any successor is right there.
    """
    later = jax.tree.leaves(next_obs)
    for (path, leaf), after in zip(jax.tree.leaves_with_path(obs), later, strict=True):
        here, there = after[:-1], leaf[1:]
        same = (here == there) | ((here != here) & (there != there))  # NaN equals NaN
        same = same.all(axis=tuple(range(1, same.ndim))) | done[:-1]
        if not same.all():
            raise ValueError(
                f"`next_obs{keystr(path)}` must be the `obs` of the next row within an "
                f"episode, got another one in row {np.argmin(same)}."
            )


def _rows_of(columns: dict[str, Any]) -> Transition:
    """Checks that columns match, `[K, ...]`, and marks their episodes."""
    num_rows = len(np.atleast_1d(columns["reward"]))
    for name, value in columns.items():
        checks.leading_axes(f"`{name}` must have rows", value, (num_rows,))
        if name in ("reward", "terminated", "truncated") and value.ndim != 1:
            raise ValueError(
                f"`{name}` must be one number per row, got shape {value.shape}."
            )
    checks.same("`next_obs` must be like `obs`", columns["obs"], columns["next_obs"])
    # A row is the first of its episode if the one before is done; cut for empty data.
    done = columns["terminated"] | columns["truncated"]
    first = np.concatenate([np.ones(1, bool), done[:-1]])[: len(done)]
    episode = np.cumsum(first) - 1
    step = np.arange(len(done)) - np.flatnonzero(first)[episode] + 1
    columns |= {
        "episode_id": episode.astype(np.int32),
        "episode_length": step.astype(np.int32),
    }
    names = "episode_return", "extras", "info", "mask"
    unknown: dict[str, Any] = dict.fromkeys(names, ())
    return Transition(**columns, **unknown)


def _tree(name: str, tree: ArrayTree) -> ArrayTree:
    """Converts a tree to arrays."""
    return jax.tree.map_with_path(
        lambda path, x: _array(f"`{name}{keystr(path)}`", x), tree
    )


def _array(name: str, value: Any, dtype: Any = None) -> np.ndarray:
    """Converts numbers to a dtype that jax keeps; raises if one does not fit."""
    value = np.asarray(value)
    if not any(jnp.issubdtype(value.dtype, kind) for kind in (np.number, np.bool_)):
        raise ValueError(f"{name} must hold numbers, got {value.dtype}.")
    dtype = jax.dtypes.canonicalize_dtype(dtype or value.dtype)
    if value.dtype == dtype:
        return value
    bad = lost_in_cast(value, dtype)
    if bad.any():
        raise ValueError(f"{name} must fit into {dtype}, got {value[bad].flat[0]}.")
    return value.astype(dtype)


def _deal(done: Any, num_envs: int) -> np.ndarray:
    """Returns the row for each slot of each lane, `[T, B]`; -1 for none."""
    num_rows = len(done)
    end = np.flatnonzero(done) + 1
    if num_rows and not done[-1]:  # the data breaks off in an episode
        end = np.append(end, num_rows)
    length = np.diff(end, prepend=0)
    # Each episode's lane: the longest first, each to the emptiest lane.
    lanes, emptiest = np.zeros(len(length), int), [(0, n) for n in range(num_envs)]
    for episode in np.argsort(-length, kind="stable"):
        rows_held, lanes[episode] = emptiest[0]  # the root of a heap
        rows_held += int(length[episode])
        heapq.heapreplace(emptiest, (rows_held, int(lanes[episode])))
    # Rows sorted by lane, in their order within it, numbered from 0 in each lane.
    lane = np.repeat(lanes, length)
    order = np.argsort(lane, kind="stable")
    count = np.bincount(lane, minlength=num_envs)
    slot = np.arange(num_rows) - np.repeat(np.cumsum(count) - count, count)
    index = np.full((count.max(), num_envs), -1)
    index[slot, lane[order]] = order
    return index


def _add(
    buffer: ReplayBuffer, state: ArrayTree, rows: Transition, index: np.ndarray
) -> ArrayTree:
    """Adds the rows of `index`, `[T, B]`, in chunks of one shape."""
    if not len(index):
        return state
    row_bytes = sum(
        x.dtype.itemsize * int(np.prod(x.shape[1:])) for x in jax.tree.leaves(rows)
    )
    most = max(1, _CHUNK_BYTES // (row_bytes * index.shape[1]))
    num_chunks = -(-len(index) // most)
    length = -(-len(index) // num_chunks)
    add = jax.jit(buffer.add, donate_argnums=0)
    for first in range(0, len(index), length):
        chunk = index[first : first + length]
        chunk = np.pad(chunk, ((0, length - len(chunk)), (0, 0)), constant_values=-1)
        trajectory = jax.tree.map(lambda x, chunk=chunk: x[chunk], rows)
        state = add(state, trajectory.replace(mask=chunk >= 0))
    return state
