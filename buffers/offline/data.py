"""Recorded data into a buffer: which lane gets which episode, in large chunks."""

import heapq
from typing import Any

import chex
import jax
import numpy as np

from buffers.base import RingBuffer
from buffers.offline import recorded
from buffers.types import ArrayTree, Experience

_CHUNK_BYTES = 2**26  # of rows that go to the device at a time


def from_data(
    buffer: RingBuffer,
    *,
    obs: ArrayTree,
    action: ArrayTree,
    reward: chex.Array,
    terminated: chex.Array,
    truncated: chex.Array,
    next_obs: ArrayTree,
) -> ArrayTree:
    """Fills a buffer with recorded steps, on the host.

    The rows are episodes one after another, each in order of time; one ends where
    a flag says so. After the last row the data breaks off, and rows added later do not
    continue it. With one lane the order is kept. With more, whole episodes are dealt
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
        The state. Its rows are an `Experience`, in dtypes that jax keeps: without
        `jax_enable_x64`, 64 bits become 32.

    Raises:
        ValueError: if an array is not as above or a number does not fit its dtype; it
            names the leaf. If the buffer is too small. If, with `successor="shared"`,
            the successor within an episode is not the observation of the next row.
    """
    rows = recorded.read(
        obs=obs,
        action=action,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        next_obs=next_obs,
    )
    done, num_envs = rows.terminated | rows.truncated, buffer.num_envs
    index = _deal(done, num_envs)
    if len(index) > buffer.num_slots:
        raise ValueError(
            f"`capacity` must be at least {len(index) * num_envs} for {len(done)} rows "
            f"dealt to num_envs={num_envs} lanes, got {buffer.capacity}."
        )
    if buffer.successor == "shared":
        recorded.check_successors(rows.obs, rows.next_obs, done)
    step = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_envs, *x.shape[1:]), x.dtype), rows
    )
    state = buffer.init(step)
    _check_finals(state, int(np.sum(done)))
    return _add(buffer, state, rows, index)


def _deal(done: Any, num_envs: int) -> np.ndarray:
    """The row that each slot of each lane gets, `[T, B]`; -1 for none."""
    num_rows = len(done)
    end = np.flatnonzero(done) + 1
    if num_rows and not done[-1]:
        end = np.append(end, num_rows)
    length = np.diff(end, prepend=0)
    lane = np.repeat(_lanes(length, num_envs), length)
    order = np.argsort(lane, kind="stable")
    count = np.bincount(lane, minlength=num_envs)
    slot = np.arange(num_rows) - np.repeat(np.cumsum(count) - count, count)
    index = np.full((count.max(), num_envs), -1)
    index[slot, lane[order]] = order
    return index


def _lanes(length: np.ndarray, num_envs: int) -> np.ndarray:
    """The lane of each episode, `[E]`: the longest first, to the emptiest lane."""
    lanes = np.zeros(len(length), int)
    if num_envs == 1:
        return lanes
    emptiest = [(0, lane) for lane in range(num_envs)]
    for episode in np.argsort(-length, kind="stable"):
        num_rows, lane = emptiest[0]
        lanes[episode] = lane
        heapq.heapreplace(emptiest, (num_rows + int(length[episode]), lane))
    return lanes


def _check_finals(state: ArrayTree, num_ends: int) -> None:
    """Raises for a side ring that would lose the ends of episodes."""
    finals = state.ring.finals
    if finals and finals.row.shape[0] < num_ends:
        raise ValueError(
            f"`final_capacity` must hold the ends of all {num_ends} episodes, got "
            f"{finals.row.shape[0]}."
        )


def _add(
    buffer: RingBuffer, state: ArrayTree, rows: Experience, index: np.ndarray
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
