"""Builds batches from drawn rows: n-step targets, stacks, later goals, sequences."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from rollout.buffers import fields, neighbours
from rollout.buffers.types import ArrayTree, Batch, RingState, Sequences

# `(key, rows, later rows of their episodes)`, `[S, ...]`, to the changed rows.
RelabelFn = Callable[[chex.PRNGKey, ArrayTree, ArrayTree], ArrayTree]


def get(ring: RingState, row: jax.Array) -> ArrayTree:
    """Reads rows of any shape, like those added, with successor and mask.

    The mask is False where there is no such row, or its successor is missing.
    """
    usable = neighbours.is_stored(ring, row) & neighbours.has_successor(ring, row)
    return fields.replace(neighbours.read(ring, row), **_missing(ring, row, usable))


def transitions(
    ring: RingState,
    row: jax.Array,
    weights: jax.Array,
    *,
    n_step: int | None,
    gamma: ArrayTree | None,
    stack: int | None,
) -> Batch:
    """Reads `[S]` rows; masked out where `weights` is 0."""
    last, discount, changes = row, (), {}
    if n_step is not None:
        last, discount, changes = _n_step(ring, row, n_step, gamma)
    changes |= _missing(ring, last, weights > 0)
    if stack is not None:
        changes |= _stacked(ring, row, last, stack)
    return Batch(
        experience=fields.replace(neighbours.read(ring, row), **changes),
        indices=row,
        weights=weights,
        discount=discount,
    )


def relabelled(
    ring: RingState,
    batch: Batch,
    key: chex.PRNGKey,
    relabel_fn: RelabelFn,
    horizon: int,
) -> Batch:
    """Draws for each row of a batch a later one of its episode, and relabels it."""
    # The row itself and `horizon` rows ahead; valid ones come first, so their number
    # bounds the draw.
    rows, valid = neighbours.window(ring, batch.indices, horizon + 1)
    ahead_key, relabel_key = jax.random.split(key)
    count = jnp.sum(valid, axis=0)
    ahead = jax.random.randint(ahead_key, count.shape, 0, count)
    later = jnp.take_along_axis(rows, ahead[None], axis=0)[0]
    future = fields.replace(
        neighbours.read(ring, later), **_missing(ring, later, batch.weights > 0)
    )
    changed = relabel_fn(relabel_key, batch.experience, future)
    old, new = (
        jax.tree.map(lambda x: f"{jnp.result_type(x)}{jnp.shape(x)}", tree)
        for tree in (batch.experience, changed)
    )
    if old != new:
        raise ValueError(
            "`relabel_fn` must return the experience in the structure, shapes and "
            f"dtypes it came in, {old}, got {new}."
        )
    return batch.replace(experience=changed)


def sequences(
    ring: RingState, row: jax.Array, weights: jax.Array, length: int
) -> Sequences:
    """Reads pieces of at most `length` steps that begin at the `[S]` rows."""
    rows, valid = neighbours.window(ring, row, length)
    valid &= (weights > 0)[None]
    state = fields.get(fields.get(ring.experience, "extras"), "policy_state")
    return Sequences(
        experience=fields.replace(
            neighbours.read(ring, rows), **_missing(ring, rows, valid)
        ),
        mask=valid,
        policy_state=() if state is None else neighbours.read_leaves(state, row),
        indices=row,
        weights=weights,
    )


def _missing(ring: RingState, row: jax.Array, valid: jax.Array) -> dict[str, ArrayTree]:
    """Returns the fields that are not stored: `mask`, and the successor of `row`."""
    if not neighbours.has_next_obs(ring):
        return {"mask": valid}
    return {"mask": valid, "next_obs": neighbours.successor(ring, row)}


def _n_step(
    ring: RingState, row: jax.Array, n_step: int, gamma: ArrayTree
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns the last rows of the windows, the discounts, and changed fields."""
    # After its end a window repeats its last row, so `rows[-1]` is the last valid one.
    rows, valid = neighbours.window(ring, row, n_step)
    last, num_steps = rows[-1], jnp.sum(valid, axis=0).astype(jnp.float32)
    reward = neighbours.read_field(ring, "reward", rows)
    terminated = neighbours.read_field(ring, "terminated", last)
    gamma = jnp.asarray(gamma, jnp.float32)
    power = gamma ** jnp.arange(n_step, dtype=jnp.float32)
    column = (n_step, 1, *(1,) * (reward.ndim - 2))
    counted = jnp.where(
        valid.reshape(*valid.shape, *column[2:]), power.reshape(column) * reward, 0
    )
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
