"""Two ways to start new episodes in the lanes that are done, equal bit for bit.

`reset_select` resets all `B` lanes and keeps the result where a lane is done: the
reference, without a loop. `reset_compact` resets only done lanes, `K` at a time, in a
`while_loop` that does not run at all when no lane is done. It is exact for any number
of done lanes. Keep it outside every `vmap`, where a loop runs until the slowest ends.

Both take `start_fn`, which returns fresh `Lanes` for the lane numbers it is given.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from envs import keys
from envs.types import ArrayTree, Env, Lanes

_StartFn = Callable[[Env, jax.Array], Lanes]

_WORD = 32  # bits of a word of lane flags


def reset_select(env: Env, start_fn: _StartFn, done: jax.Array, lanes: Lanes) -> Lanes:
    """Resets every lane and keeps the result where `done`."""
    fresh = start_fn(env, jnp.arange(done.shape[0], dtype=jnp.int32))
    return keys.select(done, fresh, lanes)


def reset_compact(env: Env, start_fn: _StartFn, done: jax.Array, lanes: Lanes) -> Lanes:
    """Resets the done lanes only, `K` at a time, in lane order.

    A `while_loop` has no reverse-mode derivative. Derivatives pass through the lanes
    that are not done; only `reset_select` differentiates a reset with respect to `env`.
    """
    words = keys.words(lanes)
    fixed = lax.stop_gradient((env, words))
    fresh = _reset_some_at_a_time(fixed[0], start_fn, done, fixed[1])
    return keys.like(_attach(fresh, words, done), lanes)


@jax.custom_jvp
def _attach(fresh: ArrayTree, lanes: ArrayTree, done: jax.Array) -> ArrayTree:
    """Returns `fresh`, with its derivative as a function of `lanes`."""
    del lanes, done  # unused: the value is there already
    return fresh


@_attach.defjvp
def _attach_jvp(primals: tuple, tangents: tuple) -> tuple:
    fresh, _, done = primals

    def through(x: jax.Array, tangent: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return tangent  # an integer has an empty one
        return keys.select(done, jnp.zeros_like(x), tangent)

    return fresh, jax.tree.map(through, fresh, tangents[1])


def _reset_some_at_a_time(
    env: Env, start_fn: _StartFn, done: jax.Array, lanes: Lanes
) -> Lanes:
    """Resets the done lanes of `lanes`, in which words stand for the keys."""
    num_envs = done.shape[0]
    # Large enough that one round is nearly always enough, small enough to cost little.
    # With one slot there is no scatter, and XLA:CPU compiles the loop to one kernel.
    num_slots = max(1, num_envs // 16)

    def reset_some(state: tuple[jax.Array, Lanes]) -> tuple[jax.Array, Lanes]:
        done, lanes = state
        lane, found = _first_true(done, num_slots)
        fresh = keys.words(start_fn(env, lane))
        # Slots that are left over write to rows that do not exist.
        row = jnp.where(found, lane, num_envs + jnp.arange(num_slots))
        lanes = jax.tree.map(lambda old, new: _write(old, row, new), lanes, fresh)
        return _write(done, row, jnp.zeros((num_slots,), bool)), lanes

    return lax.while_loop(lambda state: jnp.any(state[0]), reset_some, (done, lanes))[1]


def _write(old: jax.Array, row: jax.Array, new: jax.Array) -> jax.Array:
    """Writes `new[k]` to `old[row[k]]`; a row that does not exist is dropped."""
    rows = old.at[row]
    return rows.set(new, mode="drop", unique_indices=True, indices_are_sorted=True)


def _first_true(flag: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Finds the first `size` positions where `flag` is True.

    `jnp.nonzero` costs a cumulative sum and a scatter over all lanes. Packing the flags
    into words costs one small reduction; then each rank looks up its word and finds its
    bit in five halvings. Measured: 1.3x on the whole CartPole loop.

    Returns:
        `[size]` int32 positions, ascending and in range, and `[size]` bool, False where
        no True was left.
    """
    num_words = -(-flag.shape[0] // _WORD)
    padding = num_words * _WORD - flag.shape[0]
    bits = jnp.pad(flag, (0, padding)).reshape(num_words, _WORD).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(_WORD, dtype=jnp.uint32)[None], axis=1)
    count = lax.population_count(words).astype(jnp.int32)
    number = jnp.arange(num_words)
    earlier = number[None, :] < number[:, None]
    before = jnp.sum(jnp.where(earlier, count[None, :], 0), axis=1)

    rank = jnp.arange(size, dtype=jnp.int32)
    word_index = jnp.sum(before[None, :] <= rank[:, None], axis=1) - 1
    position = word_index * _WORD + _select_bit(
        words[word_index], rank - before[word_index]
    )
    position = jnp.minimum(position, flag.shape[0] - 1).astype(jnp.int32)
    return position, rank < jnp.sum(count)


def _select_bit(word: jax.Array, rank: jax.Array) -> jax.Array:
    """Finds the position of the rank-th set bit (from 0) of each word."""
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << half) - 1)
        num_low = lax.population_count(low).astype(jnp.int32)
        upper = rank >= num_low
        rank = jnp.where(upper, rank - num_low, rank)
        position = jnp.where(upper, position + half, position)
        word = jnp.where(upper, word >> jnp.uint32(half), low)
    return position
