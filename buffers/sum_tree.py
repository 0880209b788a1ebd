"""A tree of sums, for draws in proportion to a number per leaf.

A tree is a tuple of levels: the leaves, then the sums of every `WIDTH` entries of the
level below, up to a level of at most `WIDTH` entries. Sums are always computed from the
level below, never adjusted by a difference, so rounding does not build up and zero
stays exactly zero.

Source: "Prioritized Experience Replay", appendix B.2.1; arXiv:1511.05952.
"""

import chex
import jax
import jax.numpy as jnp

WIDTH = 8  # wider trees are slower to update, and much wider ones to draw from

Tree = tuple[jax.Array, ...]


def build(leaf: jax.Array) -> Tree:
    """Makes a tree of the leaves `leaf`, `[P]` float32."""
    levels = [_pad(leaf)]
    while levels[-1].shape[0] > WIDTH:
        levels.append(_pad(jnp.sum(levels[-1].reshape(-1, WIDTH), axis=1)))
    return tuple(levels)


def set_leaves(tree: Tree, leaf: jax.Array, value: jax.Array) -> Tree:
    """Sets the leaves `leaf`, `[K]` int32, to `value`, `[K]` float32.

    If a leaf appears twice, its last value counts; a number beyond the leaves is
    skipped.
    """
    # Nothing defines which of several writes to one leaf wins. So the leaf first gets
    # the number of its last writer, negative and thus below any value: `min` does not
    # depend on an order. Then only that writer sets it.
    writer = -1.0 - jnp.arange(leaf.shape[0], dtype=jnp.float32)
    level = tree[0].at[leaf].min(writer, mode="drop")
    is_last = level.at[leaf].get(mode="clip") == writer
    beyond = jnp.int32(level.shape[0])
    level = level.at[jnp.where(is_last, leaf, beyond)].set(value, mode="drop")
    return _sum_up(tree, level, leaf)


def set_distinct_leaves(tree: Tree, leaf: jax.Array, value: jax.Array) -> Tree:
    """Sets the leaves `leaf`, `[K]` int32, no two alike, to `value`, `()` float32.

    Numbers beyond the leaves are skipped; these may be alike.
    """
    return _sum_up(tree, tree[0].at[leaf].set(value, mode="drop"), leaf)


def _sum_up(tree: Tree, level: jax.Array, leaf: jax.Array) -> Tree:
    """Replaces the leaves by `level`, and the sums above the written leaves `leaf`."""
    levels, node = [level], leaf
    for above in tree[1:]:
        node = node // WIDTH
        # With as many writes as nodes, it is cheaper to add up the whole level.
        if above.shape[0] <= node.shape[0]:
            level = _pad(jnp.sum(level.reshape(-1, WIDTH), axis=1))
        else:
            children = level.reshape(-1, WIDTH).at[node].get(mode="clip")
            level = above.at[node].set(jnp.sum(children, axis=1), mode="drop")
        levels.append(level)
    return tuple(levels)


def draw(tree: Tree, key: chex.PRNGKey, num_draws: int) -> jax.Array:
    """Draws `[S]` int32 leaves in proportion, one from each of S equal shares.

    A leaf of zero is never drawn, unless all are zero.
    """
    share = jnp.sum(tree[-1]) / num_draws
    fine = jax.random.uniform(key, (num_draws,)) * share
    return _find(tree, jnp.arange(num_draws, dtype=jnp.float32) * share, fine)


def draw_apart(tree: Tree, key: chex.PRNGKey, num_draws: int) -> jax.Array:
    """Draws `[S]` int32 leaves in proportion, each from all leaves."""
    # One word for the share and one for the place in it: the 24 bits of one number are
    # too coarse for a million leaves.
    coarse_key, fine_key = jax.random.split(key)
    num_shares = 1 << 12
    share = jnp.sum(tree[-1]) / num_shares
    coarse = jax.random.randint(coarse_key, (num_draws,), 0, num_shares)
    fine = jax.random.uniform(fine_key, (num_draws,)) * share
    return _find(tree, coarse.astype(jnp.float32) * share, fine)


def _find(tree: Tree, coarse: jax.Array, fine: jax.Array) -> jax.Array:
    """Finds the leaves in which the points `coarse + fine` of the total sum lie.

    The two parts stay apart: the sums subtracted on the way down are large beside
    `fine`, and would swallow its digits.
    """
    node = jnp.zeros(coarse.shape, jnp.int32)
    # From the top down: the child that a point lies in is the last one whose earlier
    # siblings sum up to no more than the point.
    for level in reversed(tree):
        width = min(WIDTH, level.shape[0])
        children = level.reshape(-1, width)[node]
        number = jnp.arange(width, dtype=jnp.int32)
        # Sums of earlier siblings as one product; accelerators round to fewer bits by
        # default.
        is_before = (number[:, None] < number[None]).astype(jnp.float32)
        before = jnp.dot(children, is_before, precision="highest")
        reached = (coarse[:, None] - before) + fine[:, None] >= 0
        # The first child that is not zero is always reached, whatever the rounding.
        reached = (children > 0) & (reached | (before == 0))
        child = jnp.max(jnp.where(reached, number[None], 0), axis=1)
        coarse = coarse - jnp.take_along_axis(before, child[:, None], axis=1)[:, 0]
        node = node * width + child
    return node


def _pad(level: jax.Array) -> jax.Array:
    """Pads with zeros to a multiple of the width, if there is a level above."""
    num_nodes = level.shape[0]
    return jnp.pad(level, (0, -num_nodes % WIDTH if num_nodes > WIDTH else 0))
