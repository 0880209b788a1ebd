"""The containers: states of buffers, recorded steps, batches and sequences."""

from typing import Any, Generic

import jax
from flax import struct
from typing_extensions import TypeVar

from rollout.envs.types import ArrayTree

ExperienceT = TypeVar("ExperienceT", default=Any)


class FinalObs(struct.PyTreeNode, kw_only=True):
    """The last observations of episodes, for rows that do not keep their successor.

    Attributes:
        obs: `[F, ...]`, a ring of final observations.
        row: `[F]` int32, the row that each is the successor of; -1 if none was written.
        place: `[N, B]` int32, the index in `obs` of each row's final observation; -1 if
            no episode ended at the row. It was evicted unless `row[place]` is the row.
        head: `()` int32, the index in `obs` that is written next.
    """

    obs: ArrayTree  # [F, ...]
    row: jax.Array  # [F]
    place: jax.Array  # [N, B]
    head: jax.Array  # ()


class RingState(struct.PyTreeNode, kw_only=True):
    """A ring of rows per lane. Slot n of lane i is row number `n * B + i`.

    Attributes:
        experience: `[N, B, ...]`, any pytree, in the dtypes it came in. The field
            `mask` is not kept, nor `next_obs` with `next_obs="shared"`.
        head: `[B]` int32, the slot that each lane writes next.
        size: `[B]` int32, rows that each lane holds, at most N.
        final_obs: final observations with `next_obs="shared"`, else `()`.
        lost: `[B]` bool of an `EpisodeBuffer`, True where rows of an unfinished episode
            have replaced the oldest ones, else `()`.
    """

    experience: ArrayTree  # [N, B, ...]
    head: jax.Array  # [B]
    size: jax.Array  # [B]
    final_obs: Any = ()  # FinalObs or ()
    lost: ArrayTree = ()  # [B] or ()

    @property
    def ring(self) -> "RingState":
        """This ring: every state of a buffer has one under this name."""
        return self

    @property
    def num_slots(self) -> int:
        """N, rows that a lane can hold."""
        return jax.tree.leaves(self.experience)[0].shape[0]

    @property
    def num_envs(self) -> int:
        """B, lanes."""
        return self.head.shape[0]


class PrioritizedState(struct.PyTreeNode, kw_only=True):
    """A ring whose rows have priorities.

    Attributes:
        ring: the rows.
        priorities: sums of `priority ** alpha`, level by level: `[P]`, one number per
            row and padding, then the sums of every eight entries of the level below.
        max_priority: `()` float32, the largest priority seen, which new rows get.
        num_rejected: `()` int32, priorities that were rejected because they were
            negative, not finite or too large.
    """

    ring: RingState
    priorities: tuple[jax.Array, ...]  # [P], [P / 8], ...
    max_priority: jax.Array  # ()
    num_rejected: jax.Array  # ()


class EpisodicState(struct.PyTreeNode, kw_only=True):
    """A ring of whole episodes, and after its head the rows of unfinished ones.

    Attributes:
        ring: the visible rows.
        pending: `[B]` int32, rows of the unfinished episode, written but not visible.
        skipping: `[B]` bool, True where the current episode is skipped as too long.
        last: `[B]`, the recorded ones of `episode_id` and `episode_length` of each
            lane's last row, by name.
        num_too_long: `()` int32, episodes that were longer than `max_length`.
        num_abandoned: `()` int32, episodes that broke off without an ending.
    """

    ring: RingState
    pending: jax.Array  # [B]
    skipping: jax.Array  # [B]
    last: dict[str, jax.Array]  # [B]
    num_too_long: jax.Array  # ()
    num_abandoned: jax.Array  # ()


class Batch(struct.PyTreeNode, Generic[ExperienceT], kw_only=True):
    """A sample of `S` rows.

    Attributes:
        experience: `[S, ...]`, the rows. With `n_step`, `reward` is the n-step return,
            and `terminated`, `truncated` and `next_obs` are those of the last step in
            it. With `stack`, `obs` and `next_obs` are `[S, K, ...]`, oldest first.
        indices: `[S]` int32, row numbers: slot n of lane i is `n * B + i`.
        weights: `[S]` float32, importance weights; ones where rows are drawn evenly,
            zeros where the buffer had no usable row (`can_sample` was False).
        discount: `[S]` float32 with `n_step`, the factor of the value of `next_obs`:
            `gamma ** steps * (1 - terminated)`. Else `()`.
    """

    experience: ExperienceT  # [S, ...]
    indices: jax.Array  # [S]
    weights: jax.Array  # [S]
    discount: ArrayTree = ()  # [S] or ()


class Sequences(struct.PyTreeNode, Generic[ExperienceT], kw_only=True):
    """A sample of `S` contiguous pieces of at most `L` steps, each of one episode.

    Attributes:
        experience: `[L, S, ...]`, time-major; the last row again where `mask` is False.
        mask: `[L, S]` bool, False after the end of a piece.
        indices: `[S]` int32, the numbers of the first rows.
        weights: `[S]` float32, as in `Batch`.
    """

    experience: ExperienceT  # [L, S, ...]
    mask: jax.Array  # [L, S]
    indices: jax.Array  # [S]
    weights: jax.Array  # [S]
