"""Operations on pytrees whose leaves may be typed random keys."""

import jax
import jax.numpy as jnp
from jax import lax

from rollout.base.types import ArrayTree


def barrier(tree: ArrayTree) -> ArrayTree:
    """Applies `lax.optimization_barrier` to a tree that may contain typed keys.

    The key words pass the barrier instead of the keys: jax's key-reuse checker treats a
    key that passes the barrier as consumed.
    """
    return wrap_keys(lax.optimization_barrier(unwrap_keys(tree)), tree)


def unwrap_keys(tree: ArrayTree) -> ArrayTree:
    """Replaces the typed keys in a tree with their words, uint32 arrays."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def wrap_keys(words: ArrayTree, tree: ArrayTree) -> ArrayTree:
    """Inverts `unwrap_keys`: converts words to keys if the leaf of `tree` is a key."""

    def wrap(x: jax.Array, old: jax.Array) -> jax.Array:
        if not _is_key(old):
            return x
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(old))

    return jax.tree.map(wrap, words, tree)


def has_keys(tree: ArrayTree) -> bool:
    """Returns whether a tree contains typed keys."""
    return any(_is_key(x) for x in jax.tree.leaves(tree))


def blank(tree: ArrayTree, axes: tuple[int, ...] = (), *, skip: int = 0) -> ArrayTree:
    """Returns a tree of zeros, with `axes` instead of the first `skip` axes of leaves.

    Leaves may be `jax.ShapeDtypeStruct`s. A key becomes a key whose words are zero.
    """
    return jax.tree.map(lambda x: jnp.zeros((*axes, *x.shape[skip:]), x.dtype), tree)


def select(flag: jax.Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """Selects lanes from `new` if their flag is set, and otherwise from `old`.

    Args:
        flag: `[B]` bool; a scalar `()` selects all of `new` or all of `old`.
        new: `[B, ...]`, any pytree; may contain typed keys.
        old: `[B, ...]`, a pytree with the same structure and shapes; it determines the
            dtypes.

    Returns:
        `[B, ...]`, a pytree with the structure of `old`.
    """

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        column = flag.reshape(flag.shape + (1,) * (old.ndim - flag.ndim))
        return jnp.where(column, new, old)

    words = jax.tree.map(choose, unwrap_keys(new), unwrap_keys(old))
    return wrap_keys(words, old)


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
