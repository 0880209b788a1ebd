"""Runs loops whose end depends on data, in blocks of steps on a GPU.

A GPU runs a loop of known length by itself. Where the length is unknown, the host reads
the predicate before every round, and the GPU waits for it. So on a GPU such a loop runs
in blocks of `BLOCK` steps, and steps beyond the end change nothing. Elsewhere the
predicate is read at every step.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from envs import keys
from envs.types import ArrayTree

BLOCK = 8  # steps between two reads of the predicate

_State = TypeVar("_State", bound=ArrayTree)


def steps_while(
    goes_on: Callable[[_State], jax.Array],
    step: Callable[[_State, jax.Array], _State],
    state: _State,
) -> _State:
    """Takes steps while `goes_on`; the result is the same on every platform.

    Args:
        goes_on: the state to `()` bool, whether another step is due.
        step: `(state, go)` to the next state. `go` is `()` bool; where it is False the
            step lies beyond the end and must return the state unchanged, with `hold` or
            otherwise.
        state: any pytree; it may hold typed keys.
    """

    # Words, not keys: under `vmap` the loop selects between old and new state, which
    # jax's checker of key reuse counts as a use of a key.
    def is_due(words: ArrayTree) -> jax.Array:
        return goes_on(keys.like(words, state))

    # Jitted, so that both loops trace it once; inlined, since XLA:CPU rounds
    # differently in a separate function.
    @functools.partial(jax.jit, inline=True)
    def take(words: ArrayTree, go: jax.Array) -> ArrayTree:
        return keys.words(step(keys.like(words, state), go))

    def one_by_one(words: ArrayTree) -> ArrayTree:
        every = jnp.ones((), bool)  # a constant, so XLA removes the selects of `hold`
        return lax.while_loop(is_due, lambda words: take(words, every), words)

    def in_blocks(words: ArrayTree) -> ArrayTree:
        def block(words: ArrayTree) -> ArrayTree:
            return lax.fori_loop(
                0, BLOCK, lambda _, words: take(words, is_due(words)), words
            )

        return lax.while_loop(is_due, block, words)

    words = lax.platform_dependent(
        keys.words(state), cuda=in_blocks, rocm=in_blocks, default=one_by_one
    )
    return keys.like(words, state)


def hold(go: jax.Array, new: _State, old: _State) -> _State:
    """Returns `new`, or `old` if the step lies beyond the end; see `steps_while`."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return new if new is old else jnp.where(go, new, old)

    return keys.like(jax.tree.map(choose, keys.words(new), keys.words(old)), old)
