"""The spaces most environments need, and those that are made of others."""

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from envs import checks, keys
from envs.types import AnySpace, ArrayTree


class Discrete(struct.PyTreeNode):
    """The integers `start`, ..., `start + n - 1`.

    Attributes:
        n: number of elements, an int of at least 1.
        dtype: integer dtype of an element.
        start: the smallest element, an int.

    Raises:
        ValueError: if `n` is not an int of at least 1, `start` not an int, or `dtype`
            not one of integers that holds every element.
    """

    n: int = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(
        pytree_node=False, default=jnp.dtype(jnp.int32)
    )
    start: int = struct.field(pytree_node=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.count("n", self.n))
        object.__setattr__(self, "start", checks.integer("start", self.start))
        checks.holds(self.dtype, self.start, self.start + self.n - 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one element, `()`."""
        return ()

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Draws one element uniformly."""
        return keys.draw(key, self.start, self.start + self.n - 1, (), self.dtype)

    def contains(self, x: jax.Array) -> jax.Array:
        """Tells whether `x` is one of the integers, `()` bool."""
        return (x >= self.start) & (x < self.start + self.n)


class _Bounded:
    """Shared part of spaces with a lowest and a highest value of every entry."""

    low: Any
    high: Any
    shape: Any
    dtype: Any

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Draws one element uniformly; the bounds must be finite."""
        return keys.draw(key, self.low, self.high, self.shape, self.dtype)

    def contains(self, x: jax.Array) -> jax.Array:
        """Tells whether every entry lies within its bounds, `()` bool."""
        return jnp.all((x >= self.low) & (x <= self.high))


class Box(_Bounded, struct.PyTreeNode):
    """Arrays with every entry between `low` and `high`, both included.

    Attributes:
        low: lower bounds, broadcast to `shape`.
        high: upper bounds, broadcast to `shape`.
        shape: shape of one element.
        dtype: dtype of an element: floats, integers of at most 32 bits, or bool.

    Raises:
        ValueError: if a bound is NaN, does not broadcast to `shape`, or `low` is above
            `high`; of arrays whose values are known.
    """

    low: jax.typing.ArrayLike
    high: jax.typing.ArrayLike
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(
        pytree_node=False, default=jnp.dtype(jnp.float32)
    )

    def __post_init__(self) -> None:
        bounds = self.low, self.high
        if not all(isinstance(x, _NUMBERS) for x in bounds):
            return  # placeholders, with which jax builds pytrees
        if any(isinstance(x, Tracer) for x in bounds):
            return
        # Rows of spaces, as `vmap` over environments makes them, have an axis more.
        if not np.all(np.asarray(self.low) <= np.asarray(self.high)):
            raise ValueError(
                f"`low` must be at most `high`, got low={self.low}, high={self.high}."
            )

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Draws one element, as Gymnasium does.

        Uniformly between two finite bounds; where one of them is infinite, from the
        exponential distribution beyond the other; where both are, from the normal one.
        """
        bounds = self.low, self.high
        if not checks.is_known(bounds) or all(np.isfinite(x).all() for x in bounds):
            return super().sample(key)
        low, high = (np.broadcast_to(x, self.shape) for x in bounds)
        has_low, has_high = np.isfinite(low), np.isfinite(high)
        uniform_key, tail_key, normal_key = jax.random.split(key, 3)
        first, last = (np.where(has_low & has_high, x, 0) for x in (low, high))
        tail = jax.random.exponential(tail_key, self.shape, self.dtype)
        return jnp.select(
            [has_low & has_high, has_low, has_high],
            [
                keys.draw(uniform_key, first, last, self.shape, self.dtype),
                jnp.asarray(np.where(has_low, low, 0), self.dtype) + tail,
                jnp.asarray(np.where(has_high, high, 0), self.dtype) - tail,
            ],
            jax.random.normal(normal_key, self.shape, self.dtype),
        )


class MultiDiscrete(_Bounded, struct.PyTreeNode):
    """Arrays of integers, each entry with a range of its own.

    Entry i is one of `start[i]`, ..., `start[i] + nvec[i] - 1`.

    Attributes:
        nvec: how many values each entry has, an array of ints of at least 1; kept as
            tuples.
        dtype: integer dtype of an element.
        start: the smallest value of each entry, an int or one for each.

    Raises:
        ValueError: if `nvec` is not an array of ints of at least 1, `start` not one
            int, or one for each entry, or `dtype` as for `Discrete`.
    """

    nvec: Any = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(
        pytree_node=False, default=jnp.dtype(jnp.int32)
    )
    start: Any = struct.field(pytree_node=False, default=0)

    def __post_init__(self) -> None:
        nvec, start = np.asarray(self.nvec), np.asarray(self.start)
        if nvec.ndim == 0 or nvec.dtype.kind not in "iu" or not np.all(nvec >= 1):
            raise ValueError(
                f"`nvec` must be an array of ints of at least 1, got {self.nvec!r}."
            )
        if start.shape not in ((), nvec.shape) or start.dtype.kind not in "iu":
            raise ValueError(
                "`start` must be an int, or an array of ints of the shape "
                f"{nvec.shape} of `nvec`, got {self.start!r}."
            )
        start = np.broadcast_to(start, nvec.shape)
        object.__setattr__(self, "nvec", _tuples(nvec.tolist()))
        object.__setattr__(self, "start", _tuples(start.tolist()))
        if nvec.size:
            checks.holds(self.dtype, int(self.low.min()), int(self.high.max()))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one element, that of `nvec`."""
        return np.shape(self.nvec)

    @property
    def low(self) -> np.ndarray:
        """The smallest value of each entry."""
        return np.asarray(self.start)

    @property
    def high(self) -> np.ndarray:
        """The largest value of each entry."""
        return np.asarray(self.start) + np.asarray(self.nvec) - 1


class MultiBinary(_Bounded, struct.PyTreeNode):
    """Arrays of zeros and ones.

    Attributes:
        shape: shape of one element.
        dtype: dtype of an element: integer or bool.
    """

    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(
        pytree_node=False, default=jnp.dtype(jnp.int8)
    )

    @property
    def low(self) -> int:
        """The smallest value, 0."""
        return 0

    @property
    def high(self) -> int:
        """The largest value, 1."""
        return 1


class Repeated(struct.PyTreeNode):
    """`num` elements of one space, stacked.

    Attributes:
        space: the space of each element.
        num: how many there are, an int of at least 1.
    """

    space: AnySpace
    num: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of all elements; None if an element has none, being made of parts."""
        shape = getattr(self.space, "shape", None)
        return None if shape is None else (self.num, *shape)

    @property
    def dtype(self) -> jax.typing.DTypeLike | None:
        """Dtype of an element, if it has one."""
        return getattr(self.space, "dtype", None)

    def sample(self, key: chex.PRNGKey) -> ArrayTree:
        """Draws each element from a key of its own."""
        number = jnp.arange(self.num, dtype=jnp.int32)
        return jax.vmap(self.space.sample)(keys.fold_in(key, number))

    def contains(self, x: ArrayTree) -> jax.Array:
        """Tells whether every one is an element, `()` bool."""
        return jnp.all(jax.vmap(self.space.contains)(x))


class Dict(struct.PyTreeNode):
    """Elements of several spaces, by name.

    Attributes:
        spaces: the spaces, by name.
    """

    spaces: Mapping[str, AnySpace]

    def sample(self, key: chex.PRNGKey) -> dict[str, ArrayTree]:
        """Draws each from a key of its own, in the order of their names."""
        return {
            name: self.spaces[name].sample(keys.fold_in(key, number))
            for number, name in enumerate(sorted(self.spaces))
        }

    def contains(self, x: Mapping[str, ArrayTree]) -> jax.Array:
        """Tells whether every one is an element of its space, `()` bool."""
        inside = [self.spaces[name].contains(x[name]) for name in sorted(self.spaces)]
        return jnp.all(jnp.stack(inside))


class Tuple(struct.PyTreeNode):
    """Elements of several spaces, in order.

    Attributes:
        spaces: the spaces, in order.
    """

    spaces: tuple[AnySpace, ...]

    def sample(self, key: chex.PRNGKey) -> tuple[ArrayTree, ...]:
        """Draws each from a key of its own."""
        return tuple(
            space.sample(keys.fold_in(key, number))
            for number, space in enumerate(self.spaces)
        )

    def contains(self, x: tuple[ArrayTree, ...]) -> jax.Array:
        """Tells whether every one is an element of its space, `()` bool."""
        pairs = zip(self.spaces, x, strict=True)
        return jnp.all(jnp.stack([space.contains(part) for space, part in pairs]))


class TreeSpace(struct.PyTreeNode):
    """Pytrees in which every leaf has a space of its own.

    It has neither `shape` nor `dtype`: each part has its own.

    Attributes:
        parts: the spaces, in the structure of an element.
    """

    parts: ArrayTree

    def sample(self, key: chex.PRNGKey) -> ArrayTree:
        """Draws every part, each from a key of its own."""
        parts, structure = jax.tree.flatten(self.parts, is_leaf=is_space)
        drawn = [
            part.sample(part_key)
            for part, part_key in zip(
                parts, jax.random.split(key, len(parts)), strict=True
            )
        ]
        return jax.tree.unflatten(structure, drawn)

    def contains(self, x: ArrayTree) -> jax.Array:
        """Tells whether every part contains its leaf of `x`, `()` bool."""
        flags = jax.tree.map(
            lambda part, leaf: part.contains(leaf), self.parts, x, is_leaf=is_space
        )
        return jnp.all(
            jnp.stack([jnp.asarray(flag) for flag in jax.tree.leaves(flags)])
        )


def is_space(x: object) -> bool:
    """Tells a space from the containers of spaces."""
    return hasattr(x, "sample")


def _tuples(x: int | list) -> int | tuple:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


_NUMBERS = (int, float, np.ndarray, np.generic, jax.Array)
