"""Builds batches from sampled rows: n-step returns, stacks, goals and sequences."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.buffers import fields, neighbours
from rollout.buffers.types import Batch, RingState, Sequences
from rollout.envs.spaces import is_mask
from rollout.envs.types import ArrayTree

# Maps `(key, experience, future)`, `[S, ...]` each, to the relabeled experience.
RelabelFn = Callable[[chex.PRNGKey, ArrayTree, ArrayTree], ArrayTree]


class SampleOptions(struct.PyTreeNode, kw_only=True):
    """Options that specify how rows are sampled and how a batch is built.

    Attributes:
        length: L of `ReplayBuffer.sample_sequences`; None for transitions. `sample`
            documents `batch_size` and `beta`; `ReplayBuffer` documents all other
            options (`horizon` is its `relabel_horizon`).
    """

    batch_size: int = struct.field(pytree_node=False)
    beta: float | jax.Array | None = None
    length: int | None = struct.field(pytree_node=False, default=None)
    n_step: int | None = struct.field(pytree_node=False, default=None)
    gamma: float | jax.Array | None = None
    stack: int | None = struct.field(pytree_node=False, default=None)
    relabel_fn: RelabelFn | None = struct.field(pytree_node=False, default=None)
    horizon: int = struct.field(pytree_node=False, default=64)

    def check(self) -> None:
        """Validates `batch_size` and `length`."""
        checks.int_between("batch_size", self.batch_size)
        if self.length is not None:
            checks.int_between("length", self.length)


def transitions(
    ring: RingState,
    row: jax.Array,
    weights: jax.Array,
    key: chex.PRNGKey,
    options: SampleOptions,
) -> Batch:
    """Builds a batch from `[S]` rows; rows of weight 0 are masked out."""
    last, discount, changes = row, (), {}
    if options.n_step is not None:
        last, discount, changes = _n_step(ring, row, options.n_step, options.gamma)
    if options.stack is not None:
        changes |= _stacked(ring, row, last, options.stack)
    experience = _complete(ring, row, weights > 0, last)
    experience = fields.replace(experience, **changes)
    if options.relabel_fn is not None:
        # The window has the row and `horizon` later rows. Valid rows come first, so an
        # offset below their number is always valid.
        rows, valid = neighbours.window(ring, row, options.horizon + 1)
        offset_key, relabel_key = jax.random.split(key)
        count = jnp.sum(valid, axis=0, dtype=jnp.int32)
        offset = jax.random.randint(offset_key, count.shape, 0, count)
        future_row = jnp.take_along_axis(rows, offset[None], axis=0)[0]
        future = _complete(ring, future_row, weights > 0, future_row)
        relabeled = options.relabel_fn(relabel_key, experience, future)
        message = "`relabel_fn` must keep structure, shapes and dtypes of its input"
        checks.same(message, experience, relabeled)
        experience = relabeled
    return Batch(experience=experience, indices=row, weights=weights, discount=discount)


def read(ring: RingState, row: jax.Array) -> ArrayTree:
    """Reads rows of any shape, with their successors and a mask.

    The mask is False for row numbers without a stored row or without a successor.
    """
    usable = neighbours.is_stored(ring, row) & neighbours.has_successor(ring, row)
    return _complete(ring, row, usable, row)


def sequences(
    ring: RingState, row: jax.Array, weights: jax.Array, length: int
) -> Sequences:
    """Reads sequences of at most `length` steps that begin at the `[S]` rows."""
    rows, valid = neighbours.window(ring, row, length)
    valid &= (weights > 0)[None]
    return Sequences(
        experience=_complete(ring, rows, valid, rows),
        mask=valid,
        indices=row,
        weights=weights,
    )


def _complete(
    ring: RingState, row: jax.Array, valid: jax.Array, last: jax.Array
) -> ArrayTree:
    """Reads rows, and adds `mask` and the successor of `last` as `next_obs`."""
    missing = {"mask": valid}
    if neighbours.has_next_obs(ring):
        missing["next_obs"] = neighbours.successor(ring, last)
    return fields.replace(neighbours.read(ring.experience, row), **missing)


def _n_step(
    ring: RingState, row: jax.Array, n_step: int, gamma: ArrayTree
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns the last row of each window, its discount, and the n-step fields."""
    # The window has the row and the following rows of the episode, `n_step` in total at
    # most. It is padded with its last valid row, so `rows[-1]` is the row that provides
    # the successor and the flags.
    rows, valid = neighbours.window(ring, row, n_step)
    last, num_steps = rows[-1], jnp.sum(valid, axis=0).astype(jnp.float32)
    reward = neighbours.read_field(ring, "reward", rows)
    terminated = neighbours.read_field(ring, "terminated", last)
    # Step k of a window is discounted by gamma ** k, and padding counts 0. A reward may
    # have more axes, for example one entry per objective.
    gamma = jnp.asarray(gamma, jnp.float32)
    power = gamma ** jnp.arange(n_step, dtype=jnp.float32)
    shape = (n_step, 1, *(1,) * (reward.ndim - 2))
    discounted = jnp.where(
        valid.reshape(*valid.shape, *shape[2:]), power.reshape(shape) * reward, 0
    )
    # Both flags end the window, but only a truncation bootstraps.
    return (
        last,
        gamma**num_steps * (1 - terminated.astype(jnp.float32)),
        {
            "reward": jnp.sum(discounted, axis=0),
            "terminated": terminated,
            "truncated": neighbours.read_field(ring, "truncated", last),
        },
    )


def _stacked(
    ring: RingState, row: jax.Array, last: jax.Array, stack: int
) -> dict[str, ArrayTree]:
    """Stacks the frames up to `row`, and the frames up to the successor of `last`."""

    def frames(rows: jax.Array) -> ArrayTree:
        obs = neighbours.read_field(ring, "obs", rows)
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), obs)

    def without_old_masks(obs: ArrayTree) -> ArrayTree:
        # A mask belongs to the newest frame, as in `rollout.envs.FrameStack`.
        return jax.tree.map_with_path(
            lambda path, x: x[:, -1] if is_mask(path) else x, obs
        )

    obs = frames(neighbours.history(ring, row, stack)[0])
    changes = {"obs": without_old_masks(obs)}
    if neighbours.has_next_obs(ring):
        # Shift by one frame: discard the oldest frame and append the successor.
        recent = frames(neighbours.history(ring, last, stack)[0][1:])
        next_obs = jax.tree.map(
            lambda x, new: jnp.concatenate([x, new[:, None]], axis=1),
            recent,
            neighbours.successor(ring, last),
        )
        changes["next_obs"] = without_old_masks(next_obs)
    return changes
