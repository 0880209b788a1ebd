"""Running mean and variance of batches, for the normalising wrappers."""

import jax
import jax.numpy as jnp
from flax import struct

from rollout.envs.types import ArrayTree

_PRIOR_COUNT = 1e-4  # as Gymnasium's RunningMeanStd


class Statistics(struct.PyTreeNode, kw_only=True):
    """Mean and variance of every entry of a value; no lane axis.

    Attributes:
        mean: `[...]` float, in the structure of one lane's value.
        var: `[...]` float, population variance, in the same structure.
        count: `()` float32, values seen. After 2^24 batches it no longer grows, and the
            newest batches weigh a little more than the old ones.
    """

    mean: ArrayTree
    var: ArrayTree
    count: jax.Array  # ()


def prior(value: ArrayTree, num_axes: int = 1) -> Statistics:
    """Returns the statistics before the first batch, like `value`, `[B, ...]`.

    The first `num_axes` axes are those of the batch.
    """

    def full(number: float) -> ArrayTree:
        return jax.tree.map(
            # Half precision is too coarse for statistics.
            lambda x: jnp.full(
                x.shape[num_axes:],
                number,
                jnp.promote_types(float_dtype(x), jnp.float32),
            ),
            value,
        )

    return Statistics(mean=full(0.0), var=full(1.0), count=jnp.float32(_PRIOR_COUNT))


def updated(old: Statistics, value: ArrayTree, num_axes: int = 1) -> Statistics:
    """Updates the statistics with the batch `value`, `[B, ...]`.

    The first `num_axes` axes are those of the batch, of which only B counts. An entry
    that is not finite in some lane keeps its mean and variance.
    """
    num_new = jax.tree.leaves(value)[0].shape[0]
    count = old.count + num_new
    # Weights stay in [0, 1]; sums would grow with the count.
    kept, new = old.count / count, num_new / count

    def update(
        x: jax.Array, mean: jax.Array, var: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x, axes = x.astype(mean.dtype), tuple(range(num_axes))
        delta = jnp.mean(x, axes) - mean
        new_var = kept * var + new * jnp.var(x, axes) + jnp.square(delta) * kept * new
        new_mean = mean + delta * new
        is_finite = jnp.isfinite(new_var)
        return jnp.where(is_finite, new_mean, mean), jnp.where(is_finite, new_var, var)

    pairs = jax.tree.map(update, value, old.mean, old.var)
    mean, var = jax.tree.transpose(
        jax.tree.structure(value), jax.tree.structure((0, 0)), pairs
    )
    return Statistics(mean=mean, var=var, count=count)


def float_dtype(x: jax.Array) -> jnp.dtype:
    """Returns the dtype of a normalised leaf."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.dtype(jnp.float32)
