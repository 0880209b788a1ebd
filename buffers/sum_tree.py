"""A sum tree, for sampling leaves in proportion to their values.

A tree is a tuple of levels: the leaves, then the sums of each `WIDTH` entries of the
level below, up to a level of at most `WIDTH` entries. Every sum is recomputed from the
level below instead of being adjusted by a difference. Rounding errors therefore do not
accumulate, and a sum of zeros is exactly zero.

Source: "Prioritized Experience Replay", appendix B.2.1; arXiv:1511.05952.
"""

import chex
import jax
import jax.numpy as jnp

WIDTH = 8  # a wider tree is slower to update, a much wider tree also to sample

Tree = tuple[jax.Array, ...]


def build(leaf: jax.Array) -> Tree:
    """Builds a tree from the leaves `leaf`, `[P]` float32."""
    levels = [_pad(leaf)]
    while levels[-1].shape[0] > WIDTH:
        levels.append(_pad(jnp.sum(levels[-1].reshape(-1, WIDTH), axis=1)))
    return tuple(levels)


def set_leaves(tree: Tree, leaf: jax.Array, value: jax.Array) -> Tree:
    """Sets the leaves `leaf`, `[K]` int32, to `value`, `[K]` float32.

    If a leaf appears twice, its last value is used. Indices out of range are
    skipped.
    """
    # The order of duplicate writes in a scatter is undefined. `min` does not depend on
    # the order: it marks each leaf with its last writer, as a negative number below any
    # value. Then only the last writer sets the leaf.
    writer = -1.0 - jnp.arange(leaf.shape[0], dtype=jnp.float32)
    level = tree[0].at[leaf].min(writer, mode="drop")
    is_last = level.at[leaf].get(mode="clip") == writer
    out_of_range = jnp.int32(level.shape[0])
    level = level.at[jnp.where(is_last, leaf, out_of_range)].set(value, mode="drop")
    return _sum_up(tree, level, leaf)


def set_distinct_leaves(tree: Tree, leaf: jax.Array, value: jax.Array) -> Tree:
    """Sets distinct leaves `leaf`, `[K]` int32, to one value, `()` float32.

    Indices out of range are skipped, and may repeat.
    """
    return _sum_up(tree, tree[0].at[leaf].set(value, mode="drop"), leaf)


def _sum_up(tree: Tree, level: jax.Array, leaf: jax.Array) -> Tree:
    """Replaces the leaves by `level`, and updates the sums above the leaves `leaf`."""
    levels, node = [level], leaf
    for parents in tree[1:]:
        node = node // WIDTH
        # If there are at least as many writes as nodes, sum the complete level.
        if parents.shape[0] <= node.shape[0]:
            level = _pad(jnp.sum(level.reshape(-1, WIDTH), axis=1))
        else:
            children = level.reshape(-1, WIDTH).at[node].get(mode="clip")
            level = parents.at[node].set(jnp.sum(children, axis=1), mode="drop")
        levels.append(level)
    return tuple(levels)


def sample_stratified(tree: Tree, key: chex.PRNGKey, num_samples: int) -> jax.Array:
    """Samples `[S]` int32 leaves in proportion, one from each of S equal segments.

    A leaf of value zero is never sampled, unless all leaves are zero.
    """
    share = jnp.sum(tree[-1]) / num_samples
    fine = jax.random.uniform(key, (num_samples,)) * share
    return _find(tree, jnp.arange(num_samples, dtype=jnp.float32) * share, fine)


def sample_iid(tree: Tree, key: chex.PRNGKey, num_samples: int) -> jax.Array:
    """Samples `[S]` int32 leaves in proportion, independently of each other."""
    # One random word selects a segment and another the point in the segment: the 24
    # bits of a single float32 are too coarse for a million leaves.
    coarse_key, fine_key = jax.random.split(key)
    num_shares = 1 << 12
    share = jnp.sum(tree[-1]) / num_shares
    coarse = jax.random.randint(coarse_key, (num_samples,), 0, num_shares)
    fine = jax.random.uniform(fine_key, (num_samples,)) * share
    return _find(tree, coarse.astype(jnp.float32) * share, fine)


def _find(tree: Tree, coarse: jax.Array, fine: jax.Array) -> jax.Array:
    """Returns the leaves that contain the points `coarse + fine` of the total sum.

    The two parts are never added: sums subtracted during the descent are large compared
    with `fine`, so adding the parts early would round `fine` away.
    """
    node = jnp.zeros(coarse.shape, jnp.int32)
    # Descend from the top level. The child that contains a point is the last child
    # whose earlier siblings sum to at most the point.
    for level in reversed(tree):
        width = min(WIDTH, level.shape[0])
        children = level.reshape(-1, width)[node]
        number = jnp.arange(width, dtype=jnp.int32)
        # One matrix product sums the earlier siblings. By default, accelerators would
        # round it to fewer bits.
        is_earlier = (number[:, None] < number[None]).astype(jnp.float32)
        prefix = jnp.dot(children, is_earlier, precision="highest")
        reached = (coarse[:, None] - prefix) + fine[:, None] >= 0
        # Always reach the first nonzero child, independent of rounding.
        reached = (children > 0) & (reached | (prefix == 0))
        child = jnp.max(jnp.where(reached, number[None], 0), axis=1)
        coarse = coarse - jnp.take_along_axis(prefix, child[:, None], axis=1)[:, 0]
        node = node * width + child
    return node


def _pad(level: jax.Array) -> jax.Array:
    """Pads with zeros to a multiple of `WIDTH`, unless this is the top level."""
    num_nodes = level.shape[0]
    return jnp.pad(level, (0, -num_nodes % WIDTH if num_nodes > WIDTH else 0))
