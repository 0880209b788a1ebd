"""`from_data`: fills a buffer with recorded steps, assigning episodes to lanes."""

import heapq
from collections.abc import Iterator
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

_CHUNK_BYTES = 2**26  # chunk size of copies to the device


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

    The rows of an episode are consecutive and in time order, and an episode ends at a
    row with a flag. Without a flag, a row whose successor differs from the observation
    of the next row is marked as `truncated`, so that no window of steps joins two
    episodes. If the last row has no flag, its episode is incomplete, and rows
    that are added later do not continue it. A buffer with one lane keeps the order of
    the rows. With more lanes, complete episodes are assigned to lanes, longest episode
    first, each to the lane with the fewest rows. Episodes within a lane keep their
    order.

    Args:
        buffer: any buffer. `num_envs=1` is sufficient if no rows are added later.
        obs: `[K, ...]`, observations of K >= 0 rows, as NumPy or jax arrays.
        action: `[K, ...]`, actions.
        reward: `[K]`, rewards; converted to float32.
        terminated: `[K]` bool, or zeros and ones.
        truncated: `[K]` bool, or zeros and ones.
        next_obs: `[K, ...]`, true successors, with the structure of `obs`.

    Returns:
        The buffer state. Its rows are a `rollout.types.Transition` that also has the
        ids and lengths of the episodes; unrecorded fields are `()`. Without
        `jax_enable_x64`, 64-bit dtypes are converted to 32 bits.

    Raises:
        ValueError: if the shape or dtype of an array is invalid, or if a number does
            not fit its dtype (the message names the leaf); if the buffer is too small;
            or if, with `next_obs="shared"`, a successor within an episode differs from
            the observation of the next row.
    """
    columns: dict[str, Any] = {
        "obs": _tree("obs", obs),
        "action": _tree("action", action),
        "reward": _array("`reward`", reward, np.float32),
        "terminated": _array("`terminated`", terminated, bool),
        "truncated": _array("`truncated`", truncated, bool),
        "next_obs": _tree("next_obs", next_obs),
    }
    rows = _rows_of(columns, marks_ends=buffer.next_obs != "shared")
    done, num_envs = rows.terminated | rows.truncated, buffer.num_envs
    index = _assign_lanes(done, num_envs)
    if len(index) > buffer.num_slots:
        raise ValueError(
            f"`capacity` must be at least {len(index) * num_envs} for {len(done)} rows "
            f"in num_envs={num_envs} lanes, got {buffer.capacity}."
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
            f"`final_obs_capacity` must be at least {num_ends}, the number of episode "
            f"ends, got {final_obs.row.shape[0]}."
        )
    return _add(buffer, state, rows, index)


def check_successors(obs: ArrayTree, next_obs: ArrayTree, done: Any) -> None:
    """Checks that successors equal the observations of the next rows.

    Args:
        obs: `[K, ...]` host arrays, observations.
        next_obs: `[K, ...]` host arrays, successors.
        done: `[K]` bool, True for the last row of an episode, which is not checked.
    """
    for path, is_equal in _compare_successors(obs, next_obs):
        is_equal |= done[:-1]
        if not is_equal.all():
            raise ValueError(
                f"`next_obs{keystr(path)}` must be the `obs` of the next row within an "
                f"episode, got a different value in row {np.argmin(is_equal)}."
            )


def _compare_successors(obs: ArrayTree, next_obs: ArrayTree) -> Iterator[Any]:
    """Yields a path and `[K - 1]` bool per leaf, True if the next row continues it."""
    successors = jax.tree.leaves(next_obs)
    for (path, x), y in zip(jax.tree.leaves_with_path(obs), successors, strict=True):
        got, want = y[:-1], x[1:]
        is_equal = (got == want) | ((got != got) & (want != want))  # NaN equals NaN
        yield path, is_equal.all(axis=tuple(range(1, is_equal.ndim)))


def _rows_of(columns: dict[str, Any], *, marks_ends: bool) -> Transition:
    """Validates the columns, `[K, ...]`, and adds episode ids and lengths."""
    num_rows = len(np.atleast_1d(columns["reward"]))
    for name, value in columns.items():
        checks.leading_axes(f"`{name}` must have rows", value, (num_rows,))
        if name in ("reward", "terminated", "truncated") and value.ndim != 1:
            raise ValueError(
                f"`{name}` must be one number per row, got shape {value.shape}."
            )
    checks.same("`next_obs` must be like `obs`", columns["obs"], columns["next_obs"])
    if marks_ends:
        is_end = np.zeros(num_rows, bool)
        for _, is_equal in _compare_successors(columns["obs"], columns["next_obs"]):
            is_end[: len(is_equal)] |= ~is_equal
        columns["truncated"] = columns["truncated"] | (is_end & ~columns["terminated"])
    # A row begins an episode if the previous row is done. The slice handles empty data.
    done = columns["terminated"] | columns["truncated"]
    first = np.concatenate([np.ones(1, bool), done[:-1]])[: len(done)]
    episode = np.cumsum(first) - 1
    step = np.arange(len(done)) - np.flatnonzero(first)[episode] + 1
    columns |= {
        "episode_id": episode.astype(np.int32),
        "episode_length": step.astype(np.int32),
    }
    names = "episode_return", "extras", "info", "mask"
    unrecorded: dict[str, Any] = dict.fromkeys(names, ())
    return Transition(**columns, **unrecorded)


def _tree(name: str, tree: ArrayTree) -> ArrayTree:
    """Converts the leaves of a tree to arrays."""
    return jax.tree.map_with_path(
        lambda path, x: _array(f"`{name}{keystr(path)}`", x), tree
    )


def _array(name: str, value: Any, dtype: Any = None) -> np.ndarray:
    """Converts numbers to a dtype of jax; raises if a number does not fit."""
    value = np.asarray(value)
    if not any(jnp.issubdtype(value.dtype, t) for t in (np.number, np.bool_)):
        raise ValueError(f"{name} must hold numbers, got {value.dtype}.")
    dtype = jax.dtypes.canonicalize_dtype(dtype or value.dtype)
    if value.dtype == dtype:
        return value
    bad = lost_in_cast(value, dtype)
    if bad.any():
        raise ValueError(f"{name} must fit into {dtype}, got {value[bad].flat[0]}.")
    return value.astype(dtype)


def _assign_lanes(done: Any, num_envs: int) -> np.ndarray:
    """Returns the row of each slot of each lane, `[T, B]`; -1 for empty slots."""
    num_rows = len(done)
    end = np.flatnonzero(done) + 1
    if num_rows and not done[-1]:  # the last episode is incomplete
        end = np.append(end, num_rows)
    length = np.diff(end, prepend=0)
    # Assign the longest episodes first, each to the lane with the fewest rows.
    lanes, heap = np.zeros(len(length), int), [(0, n) for n in range(num_envs)]
    for episode in np.argsort(-length, kind="stable"):
        num_lane_rows, lanes[episode] = heap[0]
        num_lane_rows += int(length[episode])
        heapq.heapreplace(heap, (num_lane_rows, int(lanes[episode])))
    # Sort the rows by lane, keep their order within a lane, and number them from 0.
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
    """Adds the rows of `index`, `[T, B]`, in chunks of equal shape."""
    if not len(index):
        return state
    row_bytes = sum(
        x.dtype.itemsize * int(np.prod(x.shape[1:])) for x in jax.tree.leaves(rows)
    )
    max_length = max(1, _CHUNK_BYTES // (row_bytes * index.shape[1]))
    num_chunks = -(-len(index) // max_length)
    length = -(-len(index) // num_chunks)
    add = jax.jit(buffer.add, donate_argnums=0)
    for first in range(0, len(index), length):
        chunk = index[first : first + length]
        chunk = np.pad(chunk, ((0, length - len(chunk)), (0, 0)), constant_values=-1)
        trajectory = jax.tree.map(lambda x, chunk=chunk: x[chunk], rows)
        state = add(state, trajectory.replace(mask=chunk >= 0))
    return state
