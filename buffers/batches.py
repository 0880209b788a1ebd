"""Builds batches from drawn rows: n-step targets, stacks, later goals, sequences."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.buffers import fields, neighbours
from rollout.buffers.types import Batch, RingState, Sequences
from rollout.envs.types import ArrayTree

# `(key, rows, later rows of their episodes)`, `[S, ...]`, to the changed rows.
RelabelFn = Callable[[chex.PRNGKey, ArrayTree, ArrayTree], ArrayTree]


class SampleOptions(struct.PyTreeNode, kw_only=True):
    """How rows are drawn, and read into a sample.

    Attributes:
        length: L of `ReplayBuffer.sample_sequences`; None for transitions. The other
            attributes are those of the buffer, and arguments of its `sample`.
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
        """Checks the numbers of rows."""
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
    """Reads `[S]` rows; masked out where `weights` is 0."""
    last, discount, changes = row, (), {}
    if options.n_step is not None:
        last, discount, changes = _n_step(ring, row, options.n_step, options.gamma)
    if options.stack is not None:
        changes |= _stacked(ring, row, last, options.stack)
    experience = _complete(ring, row, weights > 0, last)
    experience = fields.replace(experience, **changes)
    if options.relabel_fn is not None:
        # The row itself and `horizon` rows ahead; valid ones come first, so their
        # number bounds the draw.
        rows, valid = neighbours.window(ring, row, options.horizon + 1)
        ahead_key, relabel_key = jax.random.split(key)
        count = jnp.sum(valid, axis=0, dtype=jnp.int32)
        ahead = jax.random.randint(ahead_key, count.shape, 0, count)
        later = jnp.take_along_axis(rows, ahead[None], axis=0)[0]
        future = _complete(ring, later, weights > 0, later)
        changed = options.relabel_fn(relabel_key, experience, future)
        what = "`relabel_fn` must return the experience as it came in"
        checks.same(what, experience, changed)
        experience = changed
    return Batch(experience=experience, indices=row, weights=weights, discount=discount)


def read(ring: RingState, row: jax.Array) -> ArrayTree:
    """Reads rows of any shape, like those added, with successor and mask.

    The mask is False where there is no such row, or its successor is missing.
    """
    usable = neighbours.is_stored(ring, row) & neighbours.has_successor(ring, row)
    return _complete(ring, row, usable, row)


def sequences(
    ring: RingState, row: jax.Array, weights: jax.Array, length: int
) -> Sequences:
    """Reads pieces of at most `length` steps that begin at the `[S]` rows."""
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
    """Reads rows with what is not stored: `mask`, and the successor of `last`."""
    missing = {"mask": valid}
    if neighbours.has_next_obs(ring):
        missing["next_obs"] = neighbours.successor(ring, last)
    return fields.replace(neighbours.read(ring.experience, row), **missing)


def _n_step(
    ring: RingState, row: jax.Array, n_step: int, gamma: ArrayTree
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns the last rows of the windows, the discounts, and changed fields."""
    # The window of a row is the row and those that follow in its episode, at most
    # `n_step`. After its end it repeats its last row, so `rows[-1]` is the last valid
    # one, whose successor and endings count.
    rows, valid = neighbours.window(ring, row, n_step)
    last, num_steps = rows[-1], jnp.sum(valid, axis=0).astype(jnp.float32)
    reward = neighbours.read_field(ring, "reward", rows)
    terminated = neighbours.read_field(ring, "terminated", last)
    # Step k of a window counts by gamma ** k, and rows after its end by nothing. A
    # reward may have further axes, such as one entry for each objective.
    gamma = jnp.asarray(gamma, jnp.float32)
    power = gamma ** jnp.arange(n_step, dtype=jnp.float32)
    column = (n_step, 1, *(1,) * (reward.ndim - 2))
    counted = jnp.where(
        valid.reshape(*valid.shape, *column[2:]), power.reshape(column) * reward, 0
    )
    # A truncation bootstraps, a termination does not; both end the window.
    return (
        last,
        gamma**num_steps * (1 - terminated.astype(jnp.float32)),
        {
            "reward": jnp.sum(counted, axis=0),
            "terminated": terminated,
            "truncated": neighbours.read_field(ring, "truncated", last),
        },
    )


def _stacked(
    ring: RingState, row: jax.Array, last: jax.Array, stack: int
) -> dict[str, ArrayTree]:
    """Stacks the observations up to `row`, and up to the successor of `last`."""

    def frames(rows: jax.Array) -> ArrayTree:
        obs = neighbours.read_field(ring, "obs", rows)
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), obs)

    changes = {"obs": frames(neighbours.history(ring, row, stack)[0])}
    if neighbours.has_next_obs(ring):
        # One frame later: without the oldest frame, and with the successor.
        earlier = frames(neighbours.history(ring, last, stack)[0][1:])
        changes["next_obs"] = jax.tree.map(
            lambda x, new: jnp.concatenate([x, new[:, None]], axis=1),
            earlier,
            neighbours.successor(ring, last),
        )
    return changes
