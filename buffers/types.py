"""Containers of the package: buffer states, batches and sequences."""

from typing import Any, Generic

import jax
from flax import struct
from typing_extensions import TypeVar

from rollout.envs.types import ArrayTree

ExperienceT = TypeVar("ExperienceT", default=Any)


class FinalObs(struct.PyTreeNode, kw_only=True):
    """Side ring of final observations, used if rows do not store their successors.

    Attributes:
        obs: `[F, ...]`, ring of final observations.
        row: `[F]` int32, number of the row that ended with this observation; -1 for an
            empty entry.
        place: `[N, B]` int32, index in `obs` of the final observation of each row; -1
            if no episode ended at the row. The observation was evicted if `row[place]`
            is a different row.
        head: `()` int32, index in `obs` of the next write.
    """

    obs: ArrayTree  # [F, ...]
    row: jax.Array  # [F]
    place: jax.Array  # [N, B]
    head: jax.Array  # ()


class RingState(struct.PyTreeNode, kw_only=True):
    """A ring of rows per lane. Slot n of lane i is row number `n * B + i`.

    Attributes:
        experience: `[N, B, ...]`, any pytree, in the dtypes of `init`. `mask` is not
            stored, and `next_obs` is not stored with `next_obs="shared"`.
        head: `[B]` int32, slot of the next write in each lane.
        size: `[B]` int32, number of rows in each lane, at most N.
        final_obs: side ring of final observations with `next_obs="shared"`, else `()`.
        lost: `[B]` bool in an `EpisodeBuffer`, True if rows of an unfinished episode
            have overwritten the oldest rows of the lane; else `()`.
    """

    experience: ArrayTree  # [N, B, ...]
    head: jax.Array  # [B]
    size: jax.Array  # [B]
    final_obs: Any = ()  # FinalObs or ()
    lost: ArrayTree = ()  # [B] or ()

    @property
    def ring(self) -> "RingState":
        """The state itself: every buffer state has its ring in `ring`."""
        return self

    @property
    def num_slots(self) -> int:
        """N, capacity of a lane in rows."""
        return jax.tree.leaves(self.experience)[0].shape[0]

    @property
    def num_envs(self) -> int:
        """B, number of lanes."""
        return self.head.shape[0]


class PrioritizedState(struct.PyTreeNode, kw_only=True):
    """A ring of rows with priorities.

    Attributes:
        ring: ring of stored rows.
        priorities: sum tree of `priority ** alpha`: `[P]` leaves, one per row plus
            padding, then levels with the sums of each eight entries of the level below.
        max_priority: `()` float32, largest priority so far; new rows get it.
        num_rejected: `()` int32, number of rejected priorities: negative, not finite or
            too large.
    """

    ring: RingState
    priorities: tuple[jax.Array, ...]  # [P], [P / 8], ...
    max_priority: jax.Array  # ()
    num_rejected: jax.Array  # ()


class EpisodicState(struct.PyTreeNode, kw_only=True):
    """A ring of complete episodes, followed by rows of unfinished episodes.

    Attributes:
        ring: ring of visible rows.
        pending: `[B]` int32, number of rows of the unfinished episode, which are
            written after the head but not visible.
        skipping: `[B]` bool, True if the current episode is skipped as too long.
        last: `[B]` each, `episode_id` and `episode_length` of the last row of each
            lane, by name, if recorded.
        num_too_long: `()` int32, number of episodes longer than `max_length`.
        num_abandoned: `()` int32, number of episodes interrupted without a flag.
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
        experience: `[S, ...]`, sampled transitions. With `n_step`, `reward` is the
            n-step return, and `terminated`, `truncated` and `next_obs` belong to the
            last step of that return. With `stack`, `obs` and `next_obs` are
            `[S, K, ...]`, oldest first.
        indices: `[S]` int32, row numbers: slot n of lane i is `n * B + i`.
        weights: `[S]` float32, importance weights; ones for uniform sampling, zeros if
            the buffer has no usable row (`can_sample` is False).
        discount: `[S]` float32 with `n_step`, factor of the value of `next_obs`:
            `gamma ** steps * (1 - terminated)`. Else `()`.
    """

    experience: ExperienceT  # [S, ...]
    indices: jax.Array  # [S]
    weights: jax.Array  # [S]
    discount: ArrayTree = ()  # [S] or ()


class Sequences(struct.PyTreeNode, Generic[ExperienceT], kw_only=True):
    """A sample of `S` sequences of at most `L` consecutive steps of one episode.

    Attributes:
        experience: `[L, S, ...]`, time-major, padded with the last row of a sequence.
        mask: `[L, S]` bool, False for padding.
        indices: `[S]` int32, row numbers of the first steps.
        weights: `[S]` float32, as in `Batch`.
    """

    experience: ExperienceT  # [L, S, ...]
    mask: jax.Array  # [L, S]
    indices: jax.Array  # [S]
    weights: jax.Array  # [S]
