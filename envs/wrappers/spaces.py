"""The spaces that wrappers make: unbounded, stacked, and for a tanh."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from envs.spaces import Box, TreeSpace, is_space
from envs.types import AnySpace, ArrayTree


class TanhSpace(struct.PyTreeNode):
    """The reals, for actions that are squashed by tanh: it has no bounds.

    Attributes:
        shape: shape of one element.
        dtype: floating dtype of an element.
    """

    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(pytree_node=False)

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Draws an element whose tanh is uniform in (-1, 1); it is always finite."""
        largest = 1.0 - float(jnp.finfo(self.dtype).epsneg)
        uniform = jax.random.uniform(key, self.shape, self.dtype, -1.0, 1.0)
        return jnp.arctanh(jnp.clip(uniform, -largest, largest))

    def contains(self, x: jax.Array) -> jax.Array:
        """Tells whether every entry is finite, `()` bool."""
        return jnp.all(jnp.isfinite(x))


class StackedSpace(struct.PyTreeNode):
    """`num` elements of one space on a new leading axis.

    Attributes:
        space: the space of each.
        num: how many.
    """

    space: AnySpace
    num: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one element, `(num, ...)`."""
        return (self.num, *self.space.shape)

    @property
    def dtype(self) -> jax.typing.DTypeLike:
        """Dtype of one element."""
        return self.space.dtype

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Draws `num` elements independently."""
        return jax.vmap(self.space.sample)(jax.random.split(key, self.num))

    def contains(self, x: jax.Array) -> jax.Array:
        """Tells whether every row is in the space, `()` bool."""
        return jnp.all(jax.vmap(self.space.contains)(x))


def stacked(space: AnySpace, num: int) -> AnySpace:
    """The space of `num` elements of `space` on a new leading axis.

    Returns:
        A `Box` for a box, a `TreeSpace` for a tree, a `StackedSpace` for any other.
    """
    if isinstance(space, TreeSpace):
        parts = jax.tree.map(
            lambda part: stacked(part, num), space.parts, is_leaf=is_space
        )
        return TreeSpace(parts)
    if not (hasattr(space, "low") and hasattr(space, "high")):
        return StackedSpace(space, num)
    shape = (num, *space.shape)
    low, high = (jnp.broadcast_to(bound, shape) for bound in (space.low, space.high))
    return Box(low, high, shape, space.dtype)


def unbounded(shapes: ArrayTree) -> AnySpace:
    """The space of every array, or tree of arrays, of these shapes and dtypes.

    Args:
        shapes: a `jax.ShapeDtypeStruct`, or a pytree of them.

    Returns:
        A `Box` from -inf to inf, or a `TreeSpace` of such boxes.
    """
    boxes = jax.tree.map(
        lambda x: Box(-jnp.inf, jnp.inf, x.shape, jnp.dtype(x.dtype)), shapes
    )
    return boxes if isinstance(boxes, Box) else TreeSpace(boxes)


def check_box(space: AnySpace) -> None:
    """Checks that an action space is a bounded box of floats."""
    if not (hasattr(space, "low") and hasattr(space, "high")):
        kind = type(space).__name__
        raise ValueError(
            f"`env.action_space` must be a box with `low` and `high`, got {kind}."
        )
    if not jnp.issubdtype(space.dtype, jnp.floating):
        dtype = jnp.dtype(space.dtype).name
        raise ValueError(f"`env.action_space` must be of floats, got {dtype}.")
    largest = float(jnp.finfo(space.dtype).max)
    bounds = [np.asarray(bound, np.float64) for bound in (space.low, space.high)]
    if not all(np.all(np.abs(bound) <= largest) for bound in bounds):
        raise ValueError(
            "`env.action_space` must have finite bounds, got "
            f"low={space.low}, high={space.high}."
        )
