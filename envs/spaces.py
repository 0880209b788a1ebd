"""The spaces most environments need, and three that are made of others."""

from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from envs import checks, keys
from envs.types import Space


@struct.dataclass
class Discrete:
    """The integers `start`, ..., `start + n - 1`.

    Attributes:
        n: number of elements, an int of at least 1.
        dtype: integer dtype of an element.
        start: the smallest element, an int.

    Raises:
        ValueError: if `n` is not an int of at least 1, or `start` not an int.
    """

    n: int = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(
        pytree_node=False, default=jnp.dtype(jnp.int32)
    )
    start: int = struct.field(pytree_node=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.count("n", self.n))
        object.__setattr__(self, "start", checks.integer("start", self.start))

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


@struct.dataclass
class Box:
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
        if any(isinstance(x, jax.core.Tracer) for x in bounds):
            return
        # Rows of spaces, as `vmap` over environments makes them, have an axis more.
        if not np.all(np.asarray(self.low) <= np.asarray(self.high)):
            raise ValueError(
                f"`low` must be at most `high`, got low={self.low}, high={self.high}."
            )

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Draws one element uniformly; the bounds must be finite."""
        return keys.draw(key, self.low, self.high, self.shape, self.dtype)

    def contains(self, x: jax.Array) -> jax.Array:
        """Tells whether every entry lies within its bounds, `()` bool."""
        return jnp.all((x >= self.low) & (x <= self.high))


@struct.dataclass
class Repeated:
    """`num` elements of one space, stacked.

    Attributes:
        space: the space of each element.
        num: how many there are, an int of at least 1.
    """

    space: Space
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

    def sample(self, key: chex.PRNGKey) -> chex.ArrayTree:
        """Draws each element from a key of its own."""
        number = jnp.arange(self.num, dtype=jnp.int32)
        return jax.vmap(self.space.sample)(keys.fold_in(key, number))

    def contains(self, x: chex.ArrayTree) -> jax.Array:
        """Tells whether every one is an element, `()` bool."""
        return jnp.all(jax.vmap(self.space.contains)(x))


@struct.dataclass
class Dict:
    """Elements of several spaces, by name.

    Attributes:
        spaces: the spaces, by name.
    """

    spaces: Mapping[str, Space]

    def sample(self, key: chex.PRNGKey) -> dict[str, chex.ArrayTree]:
        """Draws each from a key of its own, in the order of their names."""
        return {
            name: self.spaces[name].sample(keys.fold_in(key, number))
            for number, name in enumerate(sorted(self.spaces))
        }

    def contains(self, x: Mapping[str, chex.ArrayTree]) -> jax.Array:
        """Tells whether every one is an element of its space, `()` bool."""
        inside = [self.spaces[name].contains(x[name]) for name in sorted(self.spaces)]
        return jnp.all(jnp.stack(inside))


@struct.dataclass
class Tuple:
    """Elements of several spaces, in order.

    Attributes:
        spaces: the spaces, in order.
    """

    spaces: tuple[Space, ...]

    def sample(self, key: chex.PRNGKey) -> tuple[chex.ArrayTree, ...]:
        """Draws each from a key of its own."""
        return tuple(
            space.sample(keys.fold_in(key, number))
            for number, space in enumerate(self.spaces)
        )

    def contains(self, x: tuple[chex.ArrayTree, ...]) -> jax.Array:
        """Tells whether every one is an element of its space, `()` bool."""
        pairs = zip(self.spaces, x, strict=True)
        return jnp.all(jnp.stack([space.contains(part) for space, part in pairs]))


_NUMBERS = (int, float, np.ndarray, np.generic, jax.Array)
