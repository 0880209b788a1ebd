"""Operations on pytrees whose leaves may be typed random keys."""

from typing import Any as ArrayTree

import jax
import jax.numpy as jnp
from jax import lax


def barrier(tree: ArrayTree) -> ArrayTree:
    """`lax.optimization_barrier` for trees that may hold typed keys.

    jax's key-reuse checker counts a key that passes the barrier as used, so the words
    of the keys pass it instead.
    """
    return wrap_keys(lax.optimization_barrier(unwrap_keys(tree)), tree)


def unwrap_keys(tree: ArrayTree) -> ArrayTree:
    """Replaces the typed keys in a tree by their words, uint32 arrays."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def wrap_keys(words: ArrayTree, tree: ArrayTree) -> ArrayTree:
    """Undoes `unwrap_keys`: where `tree` has typed keys, so does the result."""

    def wrap(x: jax.Array, old: jax.Array) -> jax.Array:
        if not _is_key(old):
            return x
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(old))

    return jax.tree.map(wrap, words, tree)


def has_keys(tree: ArrayTree) -> bool:
    """Returns whether a tree holds typed keys."""
    return any(_is_key(x) for x in jax.tree.leaves(tree))


def blank(tree: ArrayTree, axes: tuple[int, ...] = (), *, skip: int = 0) -> ArrayTree:
    """Makes zeros like a tree's leaves, with `axes` instead of the first `skip` axes.

    Leaves may be `jax.ShapeDtypeStruct`s; a key becomes one whose words are zero.
    """
    return jax.tree.map(lambda x: jnp.zeros((*axes, *x.shape[skip:]), x.dtype), tree)


def select(flag: jax.Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """Takes the lanes of `new` where `flag` and those of `old` elsewhere.

    Args:
        flag: `[B]` bool; `()` takes all of `new` or all of `old`.
        new: `[B, ...]`, any pytree; it may hold typed keys.
        old: `[B, ...]`, of the same structure and shapes; it decides the dtypes.

    Returns:
        `[B, ...]`, of the structure of `old`.
    """

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        column = flag.reshape(flag.shape + (1,) * (old.ndim - flag.ndim))
        return jnp.where(column, new, old)

    chosen = jax.tree.map(choose, unwrap_keys(new), unwrap_keys(old))
    return wrap_keys(chosen, old)


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
