"""Running mean and variance of batches."""

import jax
import jax.numpy as jnp
from flax import struct

from envs.types import ArrayTree

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


def prior(value: ArrayTree) -> Statistics:
    """The statistics before anything is seen of values like `value`, `[B, ...]`."""

    def full(number: float) -> ArrayTree:
        return jax.tree.map(
            lambda x: jnp.full(x.shape[1:], number, _accumulator_dtype(x)), value
        )

    return Statistics(mean=full(0.0), var=full(1.0), count=jnp.float32(_PRIOR_COUNT))


def updated(old: Statistics, value: ArrayTree) -> Statistics:
    """Updates the statistics with the batch `value`, `[B, ...]`.

    An entry that is not finite in some lane keeps its mean and variance.
    """
    num_new = jax.tree.leaves(value)[0].shape[0]
    count = old.count + num_new
    # As weights, so that nothing grows with the count.
    kept, new = old.count / count, num_new / count

    def update(
        x: jax.Array, mean: jax.Array, var: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x = x.astype(mean.dtype)
        delta = jnp.mean(x, axis=0) - mean
        spread = kept * var + new * jnp.var(x, axis=0) + jnp.square(delta) * kept * new
        shifted = mean + delta * new
        is_finite = jnp.isfinite(spread)
        return jnp.where(is_finite, shifted, mean), jnp.where(is_finite, spread, var)

    pairs = jax.tree.map(update, value, old.mean, old.var)
    mean, var = jax.tree.transpose(
        jax.tree.structure(value), jax.tree.structure((0, 0)), pairs
    )
    return Statistics(mean=mean, var=var, count=count)


def float_dtype(x: jax.Array) -> jnp.dtype:
    """Dtype of a normalised leaf."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.dtype(jnp.float32)


def _accumulator_dtype(x: jax.Array) -> jnp.dtype:
    """Dtype of the statistics of a leaf: half precision cannot hold a running mean."""
    return jnp.promote_types(float_dtype(x), jnp.float32)
