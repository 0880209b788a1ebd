"""Parts of trajectories: selected fields, and pieces of episodes as padded columns."""

from collections.abc import Collection
from typing import NamedTuple

import jax
import numpy as np

from rollout.base import trees
from rollout.types import Transition, check_trajectory


class Pieces(NamedTuple):
    """The `N` pieces of episodes in a trajectory, each of at most `L` steps.

    Pieces are ordered by lane, then by time.

    Attributes:
        trajectory: `[L, N, ...]`, all zero after the end of a piece.
        mask: `[L, N]` bool, False after the end of a piece.
        episode_id: `[N]` int32, shared by the pieces of an episode in several batches.
        lane: `[N]` int32, the lane.
    """

    trajectory: Transition  # [L, N, ...]
    mask: np.ndarray  # [L, N]
    episode_id: np.ndarray  # [N]
    lane: np.ndarray  # [N]


def select_fields(trajectory: Transition, names: Collection[str]) -> Transition:
    """Selects fields of a trajectory. Use it to store only some of them in a buffer.

        experience = select_fields(trajectory, ("obs", "action", "reward", "mask"))
        buffer_state = buffer.add(buffer_state, experience)

    Args:
        trajectory: `[T, B, ...]`, or a single transition `[B, ...]`.
        names: names of the fields to keep.

    Returns:
        The trajectory with `()` in place of all other fields, which then need no
        memory.
    """
    dropped = (name for name in vars(trajectory) if name not in names)
    return trajectory.replace(**dict.fromkeys(dropped, ()))


def split_trajectories(trajectory: Transition) -> Pieces:
    """Splits a trajectory at episode boundaries. Call it on the host, outside of `jit`.

    The number of pieces depends on the data, so this function cannot be jitted. A piece
    begins at the start of an episode or of the trajectory. Its first row is `first` if
    the episode began in this trajectory, and its last row is `done` if the episode
    ended.

    Args:
        trajectory: `[T, B, ...]`; masked-out rows belong to no piece.

    Returns:
        The pieces, as NumPy arrays; typed keys stay keys.

    Raises:
        ValueError: if `trajectory` is not a trajectory.
    """
    check_trajectory(trajectory)
    lane, step = np.nonzero(np.asarray(trajectory.mask).T)  # lane by lane
    ids = np.asarray(trajectory.episode_id)[step, lane]
    # Entries are sorted by lane, so a piece ends when the lane or the id changes.
    is_new = np.ones(ids.shape, bool)
    is_new[1:] = (lane[1:] != lane[:-1]) | (ids[1:] != ids[:-1])
    piece = np.cumsum(is_new) - 1
    start = np.flatnonzero(is_new)
    row = np.arange(ids.size) - start[piece] if ids.size else piece  # within the piece
    shape = int(row.max(initial=-1)) + 1, start.size

    def gather(x: jax.Array) -> np.ndarray:
        host = np.asarray(x)
        pieces = np.zeros((*shape, *host.shape[2:]), host.dtype)
        pieces[row, piece] = host[step, lane]
        return pieces

    words = trees.unwrap_keys(trajectory)
    pieces = trees.wrap_keys(jax.tree.map(gather, words), trajectory)
    return Pieces(pieces, np.asarray(pieces.mask), ids[start], lane[start].astype("i4"))
