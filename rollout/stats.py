"""Statistics of the episodes that ended in a trajectory."""

import jax
import jax.numpy as jnp
from flax import struct

from rollout.types import Transition


@struct.dataclass(kw_only=True)
class CollectStats:
    """What a trajectory says about the episodes that ended in it.

    A window in which no episode ended has `num_episodes` 0 and NaN for every mean,
    standard deviation, minimum and maximum: nothing that looks like data.

    Attributes:
        num_steps: `()` int32, environment steps over all lanes, idle rows not counted.
        num_episodes: `()` int32, episodes that ended, also if they began before.
        num_terminated: `()` int32, of these the ones that terminated.
        num_truncated: `()` int32, of these the ones that were only truncated.
        num_nonfinite: `()` int32, rows with a NaN or infinity in the reward, the action
            or the extras: NaN parameters show here, for a discrete policy if it
            records its log_prob or logits.
        return_mean: `()` float32, mean undiscounted return.
        return_std: `()` float32, standard deviation of the returns (population).
        return_min: `()` float32, smallest return.
        return_max: `()` float32, largest return.
        length_mean: `()` float32, mean length in steps.
        length_std: `()` float32, standard deviation of the lengths (population).
        length_min: `()` float32, shortest length.
        length_max: `()` float32, longest length.
    """

    num_steps: jax.Array  # ()
    num_episodes: jax.Array  # ()
    num_terminated: jax.Array  # ()
    num_truncated: jax.Array  # ()
    num_nonfinite: jax.Array  # ()
    return_mean: jax.Array  # ()
    return_std: jax.Array  # ()
    return_min: jax.Array  # ()
    return_max: jax.Array  # ()
    length_mean: jax.Array  # ()
    length_std: jax.Array  # ()
    length_min: jax.Array  # ()
    length_max: jax.Array  # ()


def summarize(trajectory: Transition) -> CollectStats:
    """Summarizes the episodes that ended in `trajectory`, inside or outside of `jit`.

    An episode that began in an earlier trajectory counts whole, where it ends.

    Args:
        trajectory: `[T, B, ...]`, or any other leading axes; it is not consumed. Rows
            whose `mask` is False do not count.

    Returns:
        Statistics, each `()`.
    """
    mask = trajectory.mask
    ended = trajectory.done & mask
    terminated = trajectory.terminated & mask
    returns = _moments(trajectory.episode_return, ended)
    lengths = _moments(trajectory.episode_length.astype(jnp.float32), ended)
    names = ("mean", "std", "min", "max")
    return CollectStats(
        num_steps=_count(mask),
        num_episodes=_count(ended),
        num_terminated=_count(terminated),
        num_truncated=_count(ended & ~terminated),
        num_nonfinite=_count(mask & ~_finite(trajectory)),
        **{f"return_{name}": x for name, x in zip(names, returns, strict=True)},
        **{f"length_{name}": x for name, x in zip(names, lengths, strict=True)},
    )


def _count(flag: jax.Array) -> jax.Array:
    return jnp.sum(flag, dtype=jnp.int32)


def _moments(value: jax.Array, flag: jax.Array) -> tuple[jax.Array, ...]:
    """Mean, standard deviation, minimum and maximum of `value` where `flag`."""
    count = _count(flag)
    mean = jnp.sum(jnp.where(flag, value, 0.0)) / count
    # Two passes: the difference of two large sums would lose the digits that matter.
    deviation = jnp.where(flag, value - mean, 0.0)
    std = jnp.sqrt(jnp.sum(deviation**2) / count)
    low = jnp.min(jnp.where(flag, value, jnp.inf))
    high = jnp.max(jnp.where(flag, value, -jnp.inf))
    empty = count == 0
    return mean, std, jnp.where(empty, jnp.nan, low), jnp.where(empty, jnp.nan, high)


def _finite(trajectory: Transition) -> jax.Array:
    """`[T, B]` bool, False where a recorded number of the row is NaN or infinite."""
    finite = jnp.isfinite(trajectory.reward)
    for leaf in jax.tree.leaves((trajectory.action, trajectory.extras)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            axes = tuple(range(finite.ndim, leaf.ndim))
            finite &= jnp.all(jnp.isfinite(leaf), axis=axes)
    return finite
