"""The two spaces most environments need: `Discrete` and `Box`."""

import chex
import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Discrete:
    """The integers 0, ..., n - 1.

    Attributes:
        n: number of elements, a Python int.
        dtype: integer dtype of an element.
    """

    n: int = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(
        pytree_node=False, default=jnp.dtype(jnp.int32)
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one element, `()`."""
        return ()

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Draws one element uniformly."""
        return jax.random.randint(key, (), 0, self.n, self.dtype)

    def contains(self, x: jax.Array) -> jax.Array:
        """Tells whether `x` is one of the integers, `()` bool."""
        return (x >= 0) & (x < self.n)


@struct.dataclass
class Box:
    """Arrays with every entry between `low` and `high`.

    Attributes:
        low: lower bounds, broadcast to `shape`.
        high: upper bounds, broadcast to `shape`.
        shape: shape of one element.
        dtype: dtype of an element.
    """

    low: jax.typing.ArrayLike
    high: jax.typing.ArrayLike
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(
        pytree_node=False, default=jnp.dtype(jnp.float32)
    )

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Draws one element uniformly; the bounds must be finite."""
        uniform = jax.random.uniform(key, self.shape, minval=self.low, maxval=self.high)
        return uniform.astype(self.dtype)

    def contains(self, x: jax.Array) -> jax.Array:
        """Tells whether every entry lies within its bounds, `()` bool."""
        return jnp.all((x >= self.low) & (x <= self.high))
