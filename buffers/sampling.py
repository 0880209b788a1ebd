"""Samples usable rows, and builds batches: n-step returns, stacks, goals and sequences.

Rows are sampled uniformly or in proportion to a weight. A row is unusable if its
successor or a part of its history is missing. Unusable rows are few and scattered, so
rejection sampling is exact and costs O(sample), not O(capacity). If usable rows are
still missing after many rounds, one pass over all rows samples them.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from rollout.base import checks, platform, prng
from rollout.buffers import neighbours, sum_tree
from rollout.buffers.types import Batch, RingState, Sequences
from rollout.envs.spaces import is_mask
from rollout.envs.types import ArrayTree

RowFn = Callable[[jax.Array], jax.Array]  # maps rows of any shape to flags or weights
_Round = tuple[jax.Array, jax.Array, jax.Array]  # round number, rows, usable flags

_CHUNK = 256  # rows that `has_usable` reads per iteration
_ROUNDS = 16  # if half of the rows are usable, 1 of 65,536 samples fails all rounds
# Maps `(key, experience, future)`, `[S, ...]` each, to the relabeled experience.
RelabelFn = Callable[[chex.PRNGKey, ArrayTree, ArrayTree], ArrayTree]


def sample_rows(ring: RingState, key: chex.PRNGKey, num_samples: int) -> jax.Array:
    """Samples `[S]` int32 rows uniformly from the stored rows, with replacement."""
    # One number enumerates the stored rows of all lanes, so rows are equally likely. If
    # all lanes have the same size, it enumerates the lanes for each age, which needs no
    # search. The number is the high word of (random word * number of rows): unlike
    # `jax.random.randint`, this uses one random word and no division. The bias is the
    # same, below (number of rows) / 2**32.
    word = jax.random.bits(key, (num_samples,), jnp.uint32)
    number = prng.product(word, jnp.sum(ring.size, dtype=jnp.uint32))[0]
    number = number.astype(jnp.int32)
    lane, age = lax.cond(
        jnp.all(ring.size == ring.size[0]),
        lambda: (number % ring.num_envs, number // ring.num_envs),
        lambda: _find(ring.size, number),
    )
    slot = (ring.head[lane] - 1 - age) % ring.num_slots
    return slot * ring.num_envs + lane


def resample_invalid(
    first: jax.Array,
    sample_fn: Callable[[chex.PRNGKey], jax.Array],
    usable_fn: RowFn,
    sample_usable_fn: Callable[[chex.PRNGKey], jax.Array],
    key: chex.PRNGKey,
) -> tuple[jax.Array, jax.Array]:
    """Replaces unusable rows by rejection sampling.

    Args:
        first: `[S]` int32, initial sample.
        sample_fn: function that samples `[S]` rows from all rows.
        usable_fn: function that returns a bool for each row.
        sample_usable_fn: function that samples `[S]` usable rows, in O(capacity).
        key: one typed key.

    Returns:
        `[S]` int32 rows, and `[S]` bool, False if the buffer has no usable row.
    """

    def resample_in_rounds(key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
        """Resamples until all rows are usable; usually no round is needed."""

        def resample(carry: _Round) -> _Round:
            # After `_ROUNDS` rounds, a last round makes a pass over all rows.
            number, row, usable = carry
            round_key = jax.random.fold_in(key, number)
            sampled = lax.cond(number < _ROUNDS, sample_fn, sample_usable_fn, round_key)
            row = jnp.where(usable, row, sampled)
            return number + 1, row, usable_fn(row)

        start = jnp.int32(0), first, usable_fn(first)
        return lax.while_loop(
            lambda carry: ~jnp.all(carry[2]) & (carry[0] <= _ROUNDS), resample, start
        )[1:]

    def resample_at_once(key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
        """Samples all rounds in parallel, and takes the first usable row."""
        # The keys and the selected rows are the same as in `resample_in_rounds`.
        number = jnp.arange(_ROUNDS, dtype=jnp.int32)
        round_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, number)
        rows = jnp.concatenate([first[None], jax.vmap(sample_fn)(round_keys)])
        usable = usable_fn(rows)
        row = jnp.take_along_axis(rows, jnp.argmax(usable, axis=0)[None], axis=0)[0]
        valid = usable.any(axis=0)

        def use_all_rows(key: chex.PRNGKey) -> tuple[jax.Array, jax.Array]:
            sampled = jnp.where(valid, row, sample_usable_fn(key))
            return sampled, usable_fn(sampled)

        last_key = jax.random.fold_in(key, _ROUNDS)
        return lax.cond(valid.all(), lambda _: (row, valid), use_all_rows, last_key)

    return platform.choose(resample_in_rounds, resample_at_once, key)


def weighted(
    weight_fn: RowFn, ring: RingState, key: chex.PRNGKey, num_samples: int
) -> jax.Array:
    """Samples `[S]` int32 rows in proportion to `weight_fn(row)`, in O(capacity)."""
    row = neighbours.all_rows(ring)
    weight = weight_fn(row).astype(jnp.float32)
    weight = jnp.where(neighbours.is_stored(ring, row), weight, 0.0)
    return sum_tree.sample_iid(sum_tree.build(weight), key, num_samples)


def has_usable(
    ring: RingState, usable_fn: RowFn, number: jax.typing.ArrayLike
) -> jax.Array:
    """Returns whether at least `number` rows are usable, `()` bool.

    Nearly all rows are usable, so the search starts at the newest rows and stops early.
    """
    num_ages = min(ring.num_slots, -(-_CHUNK // ring.num_envs) + 1)
    lane = jnp.arange(ring.num_envs, dtype=jnp.int32)[None]
    row_age = jnp.arange(num_ages, dtype=jnp.int32)[:, None]

    def count_back(ring: RingState) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first, count = carry
            age = first + row_age
            slot = (ring.head[None] - 1 - age) % ring.num_slots
            is_stored = age < ring.size[None]
            usable = is_stored & usable_fn(slot * ring.num_envs + lane)
            return first + num_ages, count + jnp.sum(usable, dtype=jnp.int32)

        longest = jnp.max(ring.size)
        return lax.while_loop(
            lambda carry: (carry[1] < number) & (carry[0] < longest),
            step,
            (jnp.int32(0), jnp.int32(0)),
        )[1]

    def count_all(ring: RingState) -> jax.Array:
        return neighbours.count(ring, usable_fn)

    return platform.choose(count_back, count_all, ring) >= number


def _find(size: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the lanes and ages of rows, numbered lane after lane."""
    end = jnp.cumsum(size, dtype=jnp.int32)
    lane = jnp.searchsorted(end, number, side="right", method="scan_unrolled")
    # In an empty ring the search returns an index past the last lane.
    lane = jnp.minimum(lane, end.shape[0] - 1).astype(jnp.int32)
    return lane, end[lane] - 1 - number


def transitions(
    ring: RingState,
    row: jax.Array,
    weights: jax.Array,
    *,
    n_step: int | None,
    gamma: Any,
    stack: int | None,
) -> Batch:
    """Builds a batch from `[S]` rows; rows of weight 0 are masked out."""
    last, discount, changes = row, (), {}
    if n_step is not None:
        last, discount, changes = _n_step(ring, row, n_step, gamma)
    if stack is not None:
        changes |= _stacked(ring, row, last, stack)
    experience = _complete(ring, row, weights > 0, last)
    experience = neighbours.replace_fields(experience, **changes)
    return Batch(experience=experience, indices=row, weights=weights, discount=discount)


def relabel(
    ring: RingState, batch: Batch, key: chex.PRNGKey, fn: RelabelFn, horizon: int
) -> Batch:
    """Applies `fn` to a batch and a later row of each episode, at most `horizon` on."""
    # The window has the row and `horizon` later rows. Valid rows come first, so an
    # offset below their number is always valid.
    rows, valid = neighbours.window(ring, batch.indices, horizon + 1)
    offset_key, relabel_key = jax.random.split(key)
    count = jnp.sum(valid, axis=0, dtype=jnp.int32)
    offset = jax.random.randint(offset_key, count.shape, 0, count)
    future_row = jnp.take_along_axis(rows, offset[None], axis=0)[0]
    future = _complete(ring, future_row, batch.weights > 0, future_row)
    relabeled = fn(relabel_key, batch.experience, future)
    message = "`relabel_fn` must keep structure, shapes and dtypes of its input"
    checks.check_same_types(message, batch.experience, relabeled)
    return batch.replace(experience=relabeled)


def read_rows(ring: RingState, row: jax.Array) -> ArrayTree:
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
    fields = {"mask": valid}
    if neighbours.has_next_obs(ring):
        fields["next_obs"] = neighbours.successor(ring, last)
    return neighbours.replace_fields(neighbours.read(ring.experience, row), **fields)


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
