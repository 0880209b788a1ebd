"""Fills buffers with recorded data, from arrays or from Minari datasets.

Minari is imported on first use. An episode of Minari has one observation more than
steps: every successor except the last is the observation of the next step.
"""

import heapq
import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from rollout.base import checks
from rollout.base.checks import import_optional
from rollout.buffers import neighbours
from rollout.buffers.replay import ReplayBuffer
from rollout.envs.spaces import lost_in_cast
from rollout.envs.types import ArrayTree
from rollout.types import Transition

if TYPE_CHECKING:
    from gymnasium.spaces import Space
    from minari import MinariDataset

_DATASET_ID = re.compile(r"([\w-][\w/-]*[\w-]/)?[\w-]+-v\d+")
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
    episodes. If the last row has no flag, its episode is incomplete, and rows that are
    added later do not continue it. A buffer with one lane keeps the order of the rows.
    With more lanes, complete episodes are assigned to lanes, longest episode first,
    each to the lane with the fewest rows. Episodes within a lane keep their order.

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
    """Yields each leaf's path and `[K - 1]` bool, True if the next row continues it."""
    successors = jax.tree.leaves(next_obs)
    for (path, x), y in zip(jax.tree.leaves_with_path(obs), successors, strict=True):
        successor, row = y[:-1], x[1:]
        both_nan = (successor != successor) & (row != row)
        is_equal = (successor == row) | both_nan
        yield path, is_equal.all(axis=tuple(range(1, is_equal.ndim)))


def _rows_of(columns: dict[str, Any], *, marks_ends: bool) -> Transition:
    """Validates the columns, `[K, ...]`, and adds episode ids and lengths."""
    num_rows = len(np.atleast_1d(columns["reward"]))
    for name, value in columns.items():
        checks.check_leading_axes(f"`{name}` must have rows", value, (num_rows,))
        if name in ("reward", "terminated", "truncated") and value.ndim != 1:
            raise ValueError(
                f"`{name}` must be one number per row, got shape {value.shape}."
            )
    checks.check_same_types(
        "`next_obs` must be like `obs`", columns["obs"], columns["next_obs"]
    )
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
    is_lost = lost_in_cast(value, dtype)
    if is_lost.any():
        raise ValueError(f"{name} must fit into {dtype}, got {value[is_lost].flat[0]}.")
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


def from_minari(buffer: ReplayBuffer, dataset: "MinariDataset | str") -> ArrayTree:
    """Fills a buffer with a Minari dataset.

    If the last step of an episode has no flag set, the recording stopped there, and the
    step is marked as truncated. A flag before the last step also ends an episode. Infos
    are not read.

    Args:
        buffer: any buffer.
        dataset: Minari dataset, or id of a local dataset. Dict and tuple observations
            and actions become pytrees.

    Returns:
        The buffer state, as in `from_data`.

    Raises:
        ModuleNotFoundError: if Minari is not installed.
        ValueError: if the dataset has no step, if an episode does not have one
            observation more than steps, or as in `from_data`.
    """
    minari = import_optional("minari")
    source = minari.load_dataset(dataset) if isinstance(dataset, str) else dataset
    episodes = [_steps(episode) for episode in source.iterate_episodes()]
    if not sum(len(episode["reward"]) for episode in episodes):
        raise ValueError("`dataset` must have at least one step, got none.")
    data = jax.tree.map(lambda *leaves: np.concatenate(leaves), *episodes)
    return from_data(buffer, **data)


def to_minari(
    buffer: ReplayBuffer,
    state: ArrayTree,
    dataset_id: str,
    *,
    observation_space: "Space | None" = None,
    action_space: "Space | None" = None,
    **metadata: Any,
) -> "MinariDataset":
    """Writes the complete episodes of a buffer as a Minari dataset.

    Every episode that has ended and whose rows are all stored is written, lane by lane,
    oldest episode first. The remaining `buffer.size(state) - dataset.total_steps`
    transitions are omitted. Images are stored without JPEG compression.

    Args:
        buffer: buffer that created `state`.
        state: buffer state whose rows have `obs`, `action`, `reward`, `terminated`,
            `truncated`, `next_obs` and `episode_length`.
        dataset_id: new dataset id, "NAMESPACE/NAME-v0" or "NAME-v0". Both names consist
            of letters, digits, "-" and "_", and a namespace has at least two of them.
        observation_space: Gymnasium space, by default boxes without bounds. If the
            metadata has an `env`, its spaces are the defaults.
        action_space: Gymnasium space, by default boxes without bounds.
        metadata: additional arguments of `minari.create_dataset_from_buffers`:
            `author`, `author_email`, `code_permalink`, `algorithm_name`, `description`,
            `env`.

    Returns:
        A `MinariDataset`.

    Raises:
        ModuleNotFoundError: if Minari is not installed.
        ValueError: if `dataset_id` has another form or exists; if a field is missing or
            does not consist of dicts, tuples and arrays with NumPy dtypes; if there is
            no complete episode; or if a successor within an episode differs from the
            observation of the next row.
    """
    minari = import_optional("minari")
    # Check the id first: Minari reads it only after all episodes.
    if not _DATASET_ID.fullmatch(dataset_id):
        raise ValueError(
            '`dataset_id` must have the form "NAMESPACE/NAME-v0" or "NAME-v0", with '
            'letters, digits, "-" and "_" and at least two of them in the namespace, '
            f"got {dataset_id!r}."
        )
    if dataset_id in minari.list_local_datasets():
        raise ValueError(
            f"`dataset_id` must be new, got {dataset_id!r}, which exists. Increase the "
            "version, or call `minari.delete_dataset` first."
        )
    episodes = _complete_episodes(buffer, state)
    spaces = [_space(name, episodes[0][name]) for name in ("obs", "action")]
    if metadata.get("env") is None:
        observation_space = (
            spaces[0] if observation_space is None else observation_space
        )
        action_space = spaces[1] if action_space is None else action_space
    episode_type = minari.data_collector.EpisodeBuffer
    episode_buffers = [
        episode_type(
            observations=jax.tree.map(
                lambda x, successor: np.concatenate([x, successor[-1:]]),
                steps["obs"],
                steps["next_obs"],
            ),
            actions=steps["action"],
            rewards=steps["reward"],
            terminations=steps["terminated"],
            truncations=steps["truncated"],
        )
        for steps in episodes
    ]
    with warnings.catch_warnings():
        # Minari warns about environments that are not from Gymnasium.
        for message in ("`eval_env` is set to None", "env_spec is None"):
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        return minari.create_dataset_from_buffers(
            dataset_id,
            episode_buffers,
            observation_space=observation_space,
            action_space=action_space,
            **{"jpeg_encoding": False, **metadata},
        )


def _steps(episode: Any) -> dict[str, ArrayTree]:
    """Converts a Minari episode to the arguments of `from_data`."""
    num_steps = len(episode.rewards)
    for path, leaf in jax.tree.leaves_with_path(episode.observations):
        if np.shape(leaf)[:1] != (num_steps + 1,):
            raise ValueError(
                f"`dataset` must have {num_steps + 1} observations in episode "
                f"{episode.id}, one more than steps, got shape {np.shape(leaf)} at "
                f"observations{jax.tree_util.keystr(path)}."
            )
    terminated = np.asarray(episode.terminations, bool)
    truncated = np.array(episode.truncations, bool)
    truncated[-1:] |= ~terminated[-1:]  # the recording stopped without a flag
    return {
        "obs": jax.tree.map(lambda x: x[:-1], episode.observations),
        "action": episode.actions,
        "reward": episode.rewards,
        "terminated": terminated,
        "truncated": truncated,
        "next_obs": jax.tree.map(lambda x: x[1:], episode.observations),
    }


def _complete_episodes(buffer: ReplayBuffer, state: ArrayTree) -> list[dict[str, Any]]:
    """Reads the steps of all complete episodes, lane by lane, oldest first."""
    names = ("obs", "action", "reward", "terminated", "truncated", "episode_length")
    neighbours.require_fields(state.ring.experience, names, "`to_minari`")
    if not neighbours.has_next_obs(state.ring):
        raise ValueError("`to_minari` needs the field `next_obs` in the transition.")
    trajectory, mask = buffer.to_trajectory(state)
    columns = {
        name: neighbours.get_field(trajectory, name) for name in (*names, "next_obs")
    }
    rows, mask = jax.device_get((columns, mask))
    done, length = rows["terminated"] | rows["truncated"], rows["episode_length"]
    episodes = []
    for lane, last in np.argwhere((done & mask).T):
        first = last + 1 - length[last, lane]
        index = slice(first, last + 1), lane
        number = np.arange(1, length[last, lane] + 1)
        # An episode is complete if all of its rows are stored, numbered from 1.
        if first >= 0 and mask[index].all() and np.array_equal(length[index], number):
            steps = jax.tree.map(lambda x: x[index], rows)  # noqa: B023
            check_successors(steps["obs"], steps["next_obs"], done[index])
            episodes.append(steps)
    if not episodes:
        raise ValueError("`state` must hold at least one complete episode, got none.")
    return episodes


def _space(name: str, tree: ArrayTree) -> "Space":
    """Returns a Gymnasium space without bounds for arrays `[K, ...]`."""
    spaces = import_optional("gymnasium.spaces")
    if isinstance(tree, dict):
        return spaces.Dict({key: _space(name, tree[key]) for key in tree})
    if isinstance(tree, tuple):
        return spaces.Tuple([_space(name, item) for item in tree])
    if not isinstance(tree, np.ndarray) or tree.dtype.kind not in "biuf":
        raise ValueError(
            f"`{name}` must consist of dicts, tuples and arrays with NumPy dtypes for "
            f"Minari, got {checks.describe(tree)}."
        )
    bounds = {"b": (0, 1), "f": (-np.inf, np.inf)}.get(tree.dtype.kind)
    if bounds is None:
        bounds = np.iinfo(tree.dtype).min, np.iinfo(tree.dtype).max
    return spaces.Box(*bounds, tree.shape[1:], tree.dtype)
