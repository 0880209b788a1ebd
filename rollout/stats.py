"""Statistics of episodes, means over seeds, moments, and counts of nonfinite values.

`Moments` holds the mean, the variance and the range of numbers; `merge` merges
statistics of separate batches. `nonfinite` defines the rule for all checks of the
package: observations, actions, rewards and final values must be finite. Extras may
contain minus infinity, since logits use it for invalid actions. Accumulated values may
be infinite, since a running minimum starts at infinity.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from rollout.base.names import Hints
from rollout.base.platform import to_host
from rollout.envs.types import ArrayTree
from rollout.types import Episode, Episodes, Transition, check_data, check_trajectory

_FIELDS = "obs", "action", "next_obs", "reward", "extras", "final_value", "accumulated"


class Moments(struct.PyTreeNode, kw_only=True):
    """Count, sum, squared deviations and bounds of a set of values.

    The mean and all other statistics are computed on access, as NumPy floats or
    tracers. They are NaN if there are no values; the fields are then 0 or infinite. If
    `jax_debug_nans` is set, tracers are minus infinity in place of NaN.

    Attributes:
        count: `()` int32, number of values.
        total: `()` float32, sum of the values.
        squared_deviations: `()` float32, sum of squared deviations from the mean.
        low: `()` float32, smallest value, infinity if there are no values.
        high: `()` float32, largest value, minus infinity if there are no values.
    """

    count: jax.Array  # ()
    total: jax.Array  # ()
    squared_deviations: jax.Array  # ()
    low: jax.Array  # ()
    high: jax.Array  # ()

    @property
    def mean(self) -> jax.Array:
        """`()` float32, mean."""
        return self._derive(lambda xp, x, n: x.total / n)

    @property
    def std(self) -> jax.Array:
        """`()` float32, standard deviation (population)."""
        return self._derive(lambda xp, x, n: xp.sqrt(x.squared_deviations / n))

    @property
    def min(self) -> jax.Array:
        """`()` float32, smallest value."""
        return self._derive(lambda xp, x, n: x.low)

    @property
    def max(self) -> jax.Array:
        """`()` float32, largest value."""
        return self._derive(lambda xp, x, n: x.high)

    @property
    def ci_low(self) -> jax.Array:
        """`()` float32, lower end of the 95 % confidence interval of the mean.

        Uses Student's t; NaN for fewer than two values.
        """
        return self._derive(lambda xp, x, n: x.total / n - _margin(xp, x, n), 2)

    @property
    def ci_high(self) -> jax.Array:
        """`()` float32, upper end of the 95 % confidence interval of the mean.

        Uses Student's t; NaN for fewer than two values.
        """
        return self._derive(lambda xp, x, n: x.total / n + _margin(xp, x, n), 2)

    def __str__(self) -> str:
        """Formats the mean and its 95 % interval, if there are at least two values."""
        if not is_known(self.count):
            return repr(self)
        if self.count < 2:
            return f"{self.mean:.6g}" if self.count else "none"
        return f"{self.mean:.6g} (95 %: {self.ci_low:.6g} to {self.ci_high:.6g})"

    def _derive(self, fn: Callable[..., Any], min_count: int = 1) -> Any:
        """Computes a statistic; NaN for fewer than `min_count` values.

        A NaN on the device would raise an error if `jax_debug_nans` is set. Untraced
        statistics are therefore computed on the host, and traced ones have no NaN.
        """
        xp = xp_of(self)
        x = self if xp is jnp else jax.device_get(self)
        with np.errstate(all="ignore"):
            value = fn(xp, x, xp.maximum(x.count, 1).astype(np.float32))
            has_nans = xp is np or not jax.debug_nans.value
            undefined = np.float32(np.nan if has_nans else -np.inf)
            return xp.where(x.count < min_count, undefined, value)[()]


def moments(
    value: jax.Array, flag: jax.Array, axis: int | None = None, xp: Any = jnp
) -> Moments:
    """Computes the moments of the values with a True flag, in float32.

    Args:
        value: array of numbers.
        flag: bool, True for values to include, of the same shape.
        axis: the axis to reduce; None reduces all axes.
        xp: `jnp`, or NumPy if no array is traced.
    """
    value, zero = value.astype(np.float32), np.float32(0)
    count = xp.sum(flag, axis=axis, dtype=np.int32, keepdims=True)
    total = xp.sum(xp.where(flag, value, zero), axis=axis, keepdims=True)
    # Two passes: the difference of two large sums would lose significant digits.
    mean = total / xp.maximum(count, 1).astype(total.dtype)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        deviation = xp.where(flag, value - mean, zero)
    limit = np.float32(np.inf)
    return Moments(
        count=count.squeeze(axis),
        total=total.squeeze(axis),
        squared_deviations=xp.sum(deviation**2, axis=axis),
        # Without values the bounds are infinite, so that `merge` ignores them.
        low=xp.min(xp.where(flag, value, limit), axis=axis, initial=limit),
        high=xp.max(xp.where(flag, value, -limit), axis=axis, initial=-limit),
    )


def moments_by_name(tree: ArrayTree, flag: jax.Array) -> dict[str, Moments]:
    """Computes the moments of each leaf that has the shape of `flag`, by path."""
    return {name: moments(x, flag) for name, x in by_name(tree, flag.shape).items()}


def by_name(tree: ArrayTree, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    """Returns the leaves of this shape by path, joined by "/"."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
        if leaf.shape == shape
    }


def merge(parts: Sequence[Any]) -> Any:
    """Merges statistics of successive batches, on the host in float64.

    Args:
        parts: statistics of at least one batch: any pytree of counts, sums and
            `Moments`, such as a `CollectStats`.

    Returns:
        The statistics of all batches, with Python and NumPy numbers as leaves.
    """

    def combine(*parts: Any) -> Any:
        # Sum counts as Python ints: the counts of a long run exceed 2^31.
        if not isinstance(parts[0], Moments):
            return sum(np.asarray(x).item() for x in parts)
        sums = [(x.count, x.total, x.squared_deviations) for x in parts]
        count, total, squared = np.array(sums, float).T
        # Add the deviations within each part and between the means of the parts.
        with np.errstate(invalid="ignore"):  # infinite values
            between = total / np.maximum(count, 1) - total.sum() / max(count.sum(), 1)
            deviations = np.sum(squared + count * between**2)
        return Moments(
            count=count.sum().astype(np.int64),
            total=total.sum(),
            squared_deviations=deviations,
            low=min(x.low for x in parts),
            high=max(x.high for x in parts),
        )

    parts = to_host(list(parts))
    return jax.tree.map(combine, *parts, is_leaf=lambda x: isinstance(x, Moments))


def xp_of(tree: Any) -> Any:
    """Returns `jnp` if an array is traced, else NumPy."""
    # NumPy outside of `jit`: `jnp` would compile a program for each operation.
    return jnp if any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)) else np


def is_known(count: Any) -> bool:
    """Returns whether a count is not traced and belongs to a single run."""
    return xp_of(count) is np and np.ndim(count) == 0


def _margin(xp: Any, x: Moments, n: Any) -> Any:
    """Computes half the width of the 95 % confidence interval of a mean of `n` values.

    Student's t at 97.5 % is from the Cornish-Fisher expansion, "Handbook of
    Mathematical Functions" (Abramowitz and Stegun), 26.7.5: within 3e-4 of the true
    value for at least 5 degrees of freedom.
    """
    freedom = xp.maximum(n - 1, 1)
    z = 1.959964  # quantile of the normal distribution
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    expansion = z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
    table = xp.asarray((12.706205, 4.302653, 3.182446, 2.776445), xp.float32)
    small = table[xp.clip(freedom, 1, len(table)).astype(xp.int32) - 1]
    quantile = xp.where(freedom > len(table), expansion, small)
    # The interval uses the sample's standard deviation, with divisor n - 1.
    return quantile * (xp.sqrt(x.squared_deviations / n) / xp.sqrt(freedom))


def nonfinite(trajectory: Transition) -> dict[str, jax.Array]:
    """Finds the rows with NaN or infinity, by field.

    Args:
        trajectory: `[T, B, ...]`, or a transition, `[B, ...]`; empty fields, `()`, are
            skipped.

    Returns:
        The names of float fields, such as `extras.value`, to `[T, B]` bool.
    """
    fields = {name: vars(trajectory)[name] for name in _FIELDS}
    flags = {}
    for path, leaf in jax.tree.leaves_with_path(fields):
        # Integers and keys are always finite.
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        flag, field = ~jnp.isfinite(leaf), name.split(".")[0]
        if field == "extras":
            flag = jnp.isnan(leaf) | (leaf == jnp.inf)
        if field == "accumulated":
            flag = jnp.isnan(leaf)
        axes = range(trajectory.mask.ndim, leaf.ndim)
        flags[name] = jnp.any(flag, axis=tuple(axes))
    return flags


def is_nonfinite(trajectory: Transition) -> jax.Array:
    """Finds the rows with NaN or infinity in any field, `[T, B]` bool."""
    return sum(nonfinite(trajectory).values(), jnp.zeros(trajectory.mask.shape, bool))


def count_nonfinite(trajectory: Transition) -> jax.Array:
    """Counts the rows in which an action, reward or extra is not finite, `()` int32.

    Skips all other fields, so that XLA can remove the ones that are unused.
    """
    skipped_fields = {"obs": (), "next_obs": (), "final_value": (), "accumulated": ()}
    flag = is_nonfinite(trajectory.replace(**skipped_fields))
    return jnp.sum(trajectory.mask & flag, dtype=jnp.int32)


class CollectStats(Hints, struct.PyTreeNode, kw_only=True):
    """Statistics of the episodes that ended: `stats.returns.mean` is the mean return.

    If no episode ended, `num_episodes` is 0, and every mean, standard deviation,
    minimum and maximum is NaN.

    Attributes:
        num_steps: `()` int32, environment steps over all lanes, without idle rows.
        num_episodes: `()` int32, episodes that ended, including earlier starts.
        num_terminated: `()` int32, episodes that terminated.
        num_truncated: `()` int32, episodes that were truncated but not terminated,
            including truncations by `max_episode_steps`.
        num_unfinished: `()` int32, episodes that `max_episode_steps` truncated: return
            and length cover the steps taken.
        num_nonfinite: `()` int32, rows with a NaN or infinity in the reward, the action
            or the extras, except minus infinity in extras such as logits. Use it to
            detect NaN parameters; a discrete policy must record log_prob or logits for
            this. For `Episodes`, the number of episodes with a nonfinite return.
        returns: moments of the undiscounted returns.
        lengths: moments of the lengths in steps.
        accumulated: moments of each accumulated value that is one number per episode,
            by path in `accumulated`, joined by "/".
    """

    num_steps: jax.Array  # ()
    num_episodes: jax.Array  # ()
    num_terminated: jax.Array  # ()
    num_truncated: jax.Array  # ()
    num_unfinished: jax.Array  # ()
    num_nonfinite: jax.Array  # ()
    returns: Moments
    lengths: Moments
    accumulated: dict[str, Moments] = struct.field(default_factory=dict)

    @classmethod
    def init(cls, episode: Episode) -> Self:
        """Returns the statistics of no episodes, to `merge` with later statistics.

        Args:
            episode: `carry.episode`, for the names of the accumulated values.
        """
        # Use the types of the results of `merge`: a sum of statistics then keeps its
        # structure in a checkpoint.
        sums: Any = dict.fromkeys(("total", "squared_deviations"), np.float64(0))
        sums |= {"count": np.int64(0), "low": np.float32(np.inf)}
        zero = Moments(**sums, high=-sums["low"])
        count: Any = 0
        names = by_name(episode.accumulated, episode.episode_id.shape)
        return cls(
            num_steps=count,
            num_episodes=count,
            num_terminated=count,
            num_truncated=count,
            num_unfinished=count,
            num_nonfinite=count,
            returns=zero,
            lengths=zero,
            accumulated=dict.fromkeys(names, zero),
        )

    def __str__(self) -> str:
        """Formats the mean return, its 95 % interval and the number of episodes."""
        if not is_known(self.num_episodes):
            return repr(self)
        if not self.num_episodes:
            text = f"no episode ended in {plural(self.num_steps, 'step')}"
        else:
            text = f"return {self.returns}, {plural(self.num_episodes, 'episode')}"
        if self.num_unfinished:
            text += f", {self.num_unfinished:,} truncated by `max_episode_steps`"
        if self.num_nonfinite:
            text += f", {self.num_nonfinite:,} with NaN or infinity"
        return text


def summarize(data: Transition | Episodes) -> CollectStats:
    """Summarizes the episodes that ended in `data`, inside or outside of `jit`.

    An episode that spans several trajectories counts in the last one, with its full
    return and length. A trajectory of T steps is biased toward short episodes, since
    more of them end in it. For an unbiased mean, play exactly N episodes with
    `collect_episodes` or `evaluate`.

    Args:
        data: a trajectory, `[T, B, ...]` or with any other leading axes, whose
            masked-out rows are ignored; or `Episodes`. It is not donated.

    Returns:
        Statistics, each `()`.

    Raises:
        ValueError: if `data` is neither a trajectory nor `Episodes`.
    """
    check_data(data)
    return _summarize(data)


# Jitted: otherwise a call from Python would compile a program for each operation.
@jax.jit
def _summarize(data: Transition | Episodes) -> CollectStats:
    if isinstance(data, Episodes):
        ended, terminated, num_steps = present(data), data.terminated, data.num_steps
        # Episodes have no rows to search for NaN, but NaN propagates to the return.
        is_open, is_bad = ~data.finished, ~jnp.isfinite(data.episode_return)
        num_unfinished, num_nonfinite = _count(is_open & ended), _count(is_bad & ended)
    else:
        ended, terminated = data.done & data.mask, data.terminated & data.mask
        num_steps, num_unfinished = _count(data.mask), jnp.zeros((), jnp.int32)
        num_nonfinite = count_nonfinite(data)
    return CollectStats(
        num_steps=num_steps,
        num_episodes=_count(ended),
        num_terminated=_count(terminated),
        num_truncated=_count(ended & ~terminated),
        num_unfinished=num_unfinished,
        num_nonfinite=num_nonfinite,
        returns=moments(data.episode_return, ended),
        lengths=moments(data.episode_length, ended),
        accumulated=moments_by_name(data.accumulated, ended),
    )


def mean_interval(
    x: jax.Array, *, axis: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the mean and its 95 % interval. Use it to plot curves of several seeds.

        mean, low, high = mean_interval(metrics["return_mean"])  # [seeds, updates]

    The interval uses Student's t for independent values along `axis`. If one of the S
    values is NaN or infinite, the mean and the interval are not finite.

    Args:
        x: `[S, ...]` numbers, for example one curve per seed.
        axis: axis of the S values, at least two.

    Returns:
        The mean, the lower end and the upper end of the interval, float32, each of the
        shape of `x` without `axis`: tracers inside of `jit`, otherwise NumPy arrays.

    Raises:
        ValueError: if there are fewer than two values along `axis`.
    """
    xp = xp_of(x)
    x = xp.asarray(x)
    if not -x.ndim <= axis < x.ndim or x.shape[axis] < 2:
        raise ValueError(
            f"`x` must have at least 2 values along axis {axis}, got shape {x.shape}. "
            "A single seed has no interval: train more seeds."
        )
    result = moments(x, xp.ones(x.shape, bool), axis=axis, xp=xp)
    return result.mean, result.ci_low, result.ci_high


def present(episodes: Episodes) -> jax.Array:
    """Returns `Episodes.mask` as an array, `[N]` bool."""
    is_default = isinstance(episodes.mask, tuple)  # () means that all are True
    return jnp.ones(episodes.terminated.shape, bool) if is_default else episodes.mask


def ended_episodes(trajectory: Transition) -> Episodes:
    """Lists the episodes that ended in a trajectory, inside or outside of `jit`.

    Args:
        trajectory: `[T, B, ...]`; masked-out rows are ignored.

    Returns:
        One entry per lane and step, `[T * B]`, ordered by time, then by lane. `mask` is
        True if an episode ended; all other entries hold the return and length so far.
        Outside of `jit`, `ended.episode_return[ended.mask]` contains the returns.
        `accumulated` is `()`.

    Raises:
        ValueError: if `trajectory` is not a trajectory.
    """
    check_trajectory(trajectory)
    return _ended_episodes(trajectory)


@jax.jit
def _ended_episodes(trajectory: Transition) -> Episodes:
    lane = jnp.arange(trajectory.mask.shape[1], dtype=jnp.int32)[None]
    ended = (trajectory.done & trajectory.mask).reshape(-1)
    return Episodes(
        episode_return=trajectory.episode_return.reshape(-1),
        episode_length=trajectory.episode_length.reshape(-1),
        terminated=trajectory.terminated.reshape(-1) & ended,
        truncated=trajectory.truncated.reshape(-1) & ended,
        finished=ended,
        lane=jnp.broadcast_to(lane, trajectory.mask.shape).reshape(-1),
        num_steps=_count(trajectory.mask),
        mask=ended,
    )


def plural(count: Any, noun: str) -> str:
    """Formats a count with a noun: "1 step", "1,280 steps"."""
    return f"{int(count):,} {noun}" + ("" if count == 1 else "s")


def _count(flag: jax.Array) -> jax.Array:
    return jnp.sum(flag, dtype=jnp.int32)
