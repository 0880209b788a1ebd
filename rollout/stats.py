"""Statistics of episodes: of those that ended in a trajectory, or of exactly N."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.finite import count_faulty
from rollout.types import Episodes, Transition

# Student's t at 97.5 % for 1 to 4 degrees of freedom, where its expansion is poor.
_T_QUANTILES = (12.706205, 4.302653, 3.182446, 2.776445)
_Z_QUANTILE = 1.959964  # the normal one


@struct.dataclass(kw_only=True)
class CollectStats:
    """What is known of the episodes that ended.

    A window in which no episode ended has `num_episodes` 0 and NaN for every mean,
    standard deviation, minimum and maximum: nothing that looks like data.

    Attributes:
        num_steps: `()` int32, environment steps over all lanes, idle rows not counted.
        num_episodes: `()` int32, episodes that ended, also if they began before.
        num_terminated: `()` int32, those of them that terminated.
        num_truncated: `()` int32, those of them that were only truncated, also by
            `max_steps`.
        num_unfinished: `()` int32, those of them that `max_steps` cut: their return
            and length are those of the part that was played.
        num_nonfinite: `()` int32, rows with a NaN or infinity in the reward, the action
            or the extras (minus infinity in logits and the like does not count): NaN
            parameters show here, for a discrete policy if it records its log_prob or
            logits. For `Episodes`, which have no rows, the episodes whose return is
            NaN or infinite.
        return_mean: `()` float32, mean undiscounted return.
        return_std: `()` float32, standard deviation of the returns (population).
        return_min: `()` float32, smallest return.
        return_max: `()` float32, largest return.
        return_ci_low: `()` float32, lower end of the 95 % confidence interval of the
            mean return, by Student's t; NaN for fewer than two episodes.
        return_ci_high: `()` float32, its upper end.
        length_mean: `()` float32, mean length in steps.
        length_std: `()` float32, standard deviation of the lengths (population).
        length_min: `()` float32, shortest length.
        length_max: `()` float32, longest length.
    """

    num_steps: jax.Array  # ()
    num_episodes: jax.Array  # ()
    num_terminated: jax.Array  # ()
    num_truncated: jax.Array  # ()
    num_unfinished: jax.Array  # ()
    num_nonfinite: jax.Array  # ()
    return_mean: jax.Array  # ()
    return_std: jax.Array  # ()
    return_min: jax.Array  # ()
    return_max: jax.Array  # ()
    return_ci_low: jax.Array  # ()
    return_ci_high: jax.Array  # ()
    length_mean: jax.Array  # ()
    length_std: jax.Array  # ()
    length_min: jax.Array  # ()
    length_max: jax.Array  # ()


def summarize(data: Transition | Episodes) -> CollectStats:
    """Summarizes the episodes that ended in `data`, inside or outside of `jit`.

    An episode that began in an earlier trajectory counts whole, where it ends. The
    episodes that happen to end in a window are short rather than long: for a mean
    without bias take exactly N, by `collect_episodes` or `evaluate`.

    Args:
        data: a trajectory, `[T, B, ...]` or with any other leading axes, of which rows
            whose `mask` is False do not count; or `Episodes`. It is not consumed.

    Returns:
        Statistics, each `()`.
    """
    if isinstance(data, Episodes):
        every = jnp.ones(data.terminated.shape, bool)
        return _describe(
            data.episode_return,
            data.episode_length,
            ended=every,
            terminated=data.terminated,
            num_steps=data.num_steps,
            num_unfinished=_count(~data.finished),
            num_nonfinite=_count(~jnp.isfinite(data.episode_return)),
        )
    return _describe(
        data.episode_return,
        data.episode_length,
        ended=data.done & data.mask,
        terminated=data.terminated & data.mask,
        num_steps=_count(data.mask),
        num_unfinished=jnp.zeros((), jnp.int32),
        num_nonfinite=count_faulty(data),
    )


def log_stats(stats: Any, *, prefix: str = "") -> dict[str, float]:
    """Turns statistics into what any logger takes: a flat dict of Python floats.

    Args:
        stats: a `CollectStats`, a `StreamStats`, a mapping, or any of these nested;
            every leaf a number or a `()` array.
        prefix: put in front of every name.

    Returns:
        Names, those of nested ones joined by "/", to floats. A mean over no episode is
        NaN there too.

    Raises:
        ValueError: if a leaf is not a scalar.
    """
    flat = {}
    for path, leaf in jax.tree.leaves_with_path(jax.device_get(_named(stats))):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if np.shape(leaf):
            raise ValueError(
                f"`stats` must have scalar leaves, got shape {np.shape(leaf)} at "
                f"{name}."
            )
        flat[prefix + name] = float(leaf)
    return flat


def _describe(
    episode_return: jax.Array,
    episode_length: jax.Array,
    *,
    ended: jax.Array,
    terminated: jax.Array,
    **counts: jax.Array,
) -> CollectStats:
    returns = _moments(episode_return, ended)
    lengths = _moments(episode_length.astype(jnp.float32), ended)
    num_episodes = _count(ended)
    mean, std, *_ = returns
    # The interval takes the sample's standard deviation, whose divisor is n - 1.
    freedom = num_episodes - 1
    margin = _t_quantile(freedom) * std / jnp.sqrt(freedom)
    names = ("mean", "std", "min", "max")
    return CollectStats(
        num_episodes=num_episodes,
        num_terminated=_count(terminated),
        num_truncated=_count(ended & ~terminated),
        return_ci_low=mean - margin,
        return_ci_high=mean + margin,
        **{f"return_{name}": x for name, x in zip(names, returns, strict=True)},
        **{f"length_{name}": x for name, x in zip(names, lengths, strict=True)},
        **counts,
    )


def _t_quantile(freedom: jax.Array) -> jax.Array:
    """Student's t at 97.5 % for `freedom` degrees, NaN below 1.

    Cornish-Fisher expansion, "Handbook of Mathematical Functions" (Abramowitz and
    Stegun), 26.7.5: within 3e-4 of the true value from 5 degrees on.
    """
    z, n = _Z_QUANTILE, jnp.maximum(freedom, 1).astype(jnp.float32)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    expansion = z + sum(term / n ** (i + 1) for i, term in enumerate(terms))
    table = jnp.array((jnp.nan, *_T_QUANTILES), jnp.float32)
    small = table[jnp.clip(freedom, 0, len(_T_QUANTILES))]
    return jnp.where(freedom > len(_T_QUANTILES), expansion, small)


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


def _named(stats: Any) -> Any:
    if isinstance(stats, Mapping):
        return {name: _named(value) for name, value in stats.items()}
    return stats
