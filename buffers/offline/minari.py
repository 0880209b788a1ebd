"""`from_minari` fills a buffer from a Minari dataset; `to_minari` writes a dataset.

Minari is imported on first use. An episode of Minari has one observation more than
steps: every successor except the last is the observation of the next step.
"""

import warnings
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rollout.buffers import fields, neighbours
from rollout.buffers.offline.data import check_successors, from_data
from rollout.buffers.replay import ReplayBuffer
from rollout.envs.optional_import import load
from rollout.envs.types import ArrayTree

if TYPE_CHECKING:
    from gymnasium.spaces import Space
    from minari import MinariDataset


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
    minari = load("minari")
    opened = minari.load_dataset(dataset) if isinstance(dataset, str) else dataset
    episodes = [_steps(episode) for episode in opened.iterate_episodes()]
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
        dataset_id: new dataset id, "NAMESPACE/NAME-v0".
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
        ValueError: if a field is missing or does not consist of dicts, tuples and
            arrays with NumPy dtypes; if there is no complete episode; or if a successor
            within an episode differs from the observation of the next row.
    """
    minari = load("minari")
    episodes = _whole_episodes(buffer, state)
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


def _whole_episodes(buffer: ReplayBuffer, state: ArrayTree) -> list[dict[str, Any]]:
    """Reads the steps of all complete episodes, lane by lane, oldest first."""
    needed = ("obs", "action", "reward", "terminated", "truncated", "episode_length")
    fields.need(state.ring.experience, needed, "`to_minari`")
    if not neighbours.has_next_obs(state.ring):
        raise ValueError("`to_minari` needs the field `next_obs` in the transition.")
    trajectory, mask = buffer.to_trajectory(state)
    columns = {name: fields.get(trajectory, name) for name in (*needed, "next_obs")}
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
    spaces = load("gymnasium.spaces")
    if isinstance(tree, dict):
        return spaces.Dict({key: _space(name, tree[key]) for key in tree})
    if isinstance(tree, tuple):
        return spaces.Tuple([_space(name, item) for item in tree])
    if not isinstance(tree, np.ndarray) or tree.dtype.kind not in "biuf":
        raise ValueError(
            f"`{name}` must consist of dicts, tuples and arrays with NumPy dtypes for "
            f"Minari, got {getattr(tree, 'dtype', type(tree).__name__)}."
        )
    bounds = {"b": (0, 1), "f": (-np.inf, np.inf)}.get(tree.dtype.kind)
    if bounds is None:
        bounds = np.iinfo(tree.dtype).min, np.iinfo(tree.dtype).max
    return spaces.Box(*bounds, tree.shape[1:], tree.dtype)
