"""Computes statistics of the episodes in a trajectory, or of exactly N episodes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from rollout import checks
from rollout.nonfinite import count_nonfinite
from rollout.types import Episode, Episodes, Transition

# Student's t at 97.5 % for 1 to 4 degrees of freedom, where its expansion is poor.
_T_QUANTILES = (12.706205, 4.302653, 3.182446, 2.776445)
_Z_QUANTILE = 1.959964  # the normal one


class Moments(struct.PyTreeNode, kw_only=True):
    """Count, sum, squared deviations and bounds of some values; never NaN.

    The mean and the other statistics are computed when they are read: NaN without any
    value.

    Attributes:
        count: `()` int32, how many there are.
        total: `()` float32, their sum.
        squared_deviations: `()` float32, the sum of their squared deviations from
            the mean.
        low: `()` float32, the smallest, infinity if there is none.
        high: `()` float32, the largest, minus infinity if there is none.
    """

    count: jax.Array  # ()
    total: jax.Array  # ()
    squared_deviations: jax.Array  # ()
    low: jax.Array  # ()
    high: jax.Array  # ()

    @property
    def mean(self) -> jax.Array:
        """`()` float32, the mean."""
        return self._derive(lambda xp, x, n: x.total / n)

    @property
    def std(self) -> jax.Array:
        """`()` float32, standard deviation (population)."""
        return self._derive(lambda xp, x, n: xp.sqrt(x.squared_deviations / n))

    @property
    def min(self) -> jax.Array:
        """`()` float32, the smallest."""
        return self._derive(lambda xp, x, n: x.low)

    @property
    def max(self) -> jax.Array:
        """`()` float32, the largest."""
        return self._derive(lambda xp, x, n: x.high)

    def __str__(self) -> str:
        """Formats the mean and its 95 % interval, if there are at least two values."""
        if not _is_known(self):
            return repr(self)
        if self.count < 2:
            return f"{self.mean:.6g}" if self.count else "none"
        low, high = self.interval(-1), self.interval(1)
        return f"{self.mean:.6g} (95 %: {low:.6g} to {high:.6g})"

    def interval(self, side: int) -> jax.Array:
        """`()` float32, lower (-1) or upper (1) end of the mean's 95 % interval."""

        def end(xp: Any, x: Moments, n: Any) -> Any:
            # The interval uses the sample's standard deviation, with divisor n - 1.
            freedom = xp.maximum(n - 1, 1)
            error = xp.sqrt(x.squared_deviations / n) / xp.sqrt(freedom)
            margin = _t_quantile(xp, freedom) * error
            return x.total / n + np.float32(side) * margin

        return self._derive(end, least=2)

    def _derive(self, fn: Callable[..., Any], least: int = 1) -> Any:
        """Computes a statistic; NaN for fewer than `least` values.

        It is computed on the host unless traced: on the device its NaN would trip
        `jax_debug_nans`.
        """
        fields = jax.tree.leaves(self)
        if any(isinstance(x, Tracer) for x in fields):
            count = jnp.maximum(self.count, 1).astype(jnp.float32)
            return jnp.where(self.count < least, jnp.nan, fn(jnp, self, count))
        host = jax.device_get(self)
        count = np.maximum(host.count, 1).astype(np.float32)
        with np.errstate(all="ignore"):
            value = fn(np, host, count)
        return np.where(host.count < least, np.float32(np.nan), value)[()]


class CollectStats(struct.PyTreeNode, kw_only=True):
    """Statistics of the episodes that ended.

    A window in which no episode ended has `num_episodes` 0 and NaN for every mean,
    standard deviation, minimum and maximum: nothing that looks like data. These are
    computed from `returns` and `lengths` when they are read: NumPy floats, or traced.

    Attributes:
        num_steps: `()` int32, environment steps over all lanes, idle rows not counted.
        num_episodes: `()` int32, episodes that ended, also if they began before.
        num_terminated: `()` int32, episodes that terminated.
        num_truncated: `()` int32, episodes that were only truncated, also by
            `max_steps`.
        num_unfinished: `()` int32, episodes that `max_steps` cut: their return and
            length cover the steps played.
        num_nonfinite: `()` int32, rows with a NaN or infinity in the reward, the action
            or the extras (minus infinity in logits and the like does not count): NaN
            parameters show here, for a discrete policy if it records its log_prob or
            logits. For `Episodes`, which have no rows, the episodes whose return is
            NaN or infinite.
        returns: moments of the undiscounted returns.
        lengths: moments of the lengths in steps.
        accumulated: moments of each accumulated value that is one number per episode,
            by its path in `accumulated`, joined by "/".
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

    def __str__(self) -> str:
        """Formats the mean return, its 95 % interval and the number of episodes."""
        if not _is_known(self):
            return repr(self)
        if not self.num_episodes:
            text = f"no episode ended in {plural(self.num_steps, 'step')}"
        else:
            text = f"return {self.returns}, {plural(self.num_episodes, 'episode')}"
        if self.num_unfinished:
            text += f", {self.num_unfinished:,} cut by `max_steps`"
        if self.num_nonfinite:
            text += f", {self.num_nonfinite:,} with NaN or infinity"
        return text

    @property
    def return_mean(self) -> jax.Array:
        """`()` float32, mean undiscounted return."""
        return self.returns.mean

    @property
    def return_std(self) -> jax.Array:
        """`()` float32, standard deviation of the returns (population)."""
        return self.returns.std

    @property
    def return_min(self) -> jax.Array:
        """`()` float32, smallest return."""
        return self.returns.min

    @property
    def return_max(self) -> jax.Array:
        """`()` float32, largest return."""
        return self.returns.max

    @property
    def return_ci_low(self) -> jax.Array:
        """`()` float32, lower end of the 95 % confidence interval of the mean return.

        By Student's t; NaN for fewer than two episodes.
        """
        return self.returns.interval(-1)

    @property
    def return_ci_high(self) -> jax.Array:
        """`()` float32, upper end of the 95 % confidence interval of the mean return.

        By Student's t; NaN for fewer than two episodes.
        """
        return self.returns.interval(1)

    @property
    def length_mean(self) -> jax.Array:
        """`()` float32, mean length in steps."""
        return self.lengths.mean

    @property
    def length_std(self) -> jax.Array:
        """`()` float32, standard deviation of the lengths (population)."""
        return self.lengths.std

    @property
    def length_min(self) -> jax.Array:
        """`()` float32, shortest length."""
        return self.lengths.min

    @property
    def length_max(self) -> jax.Array:
        """`()` float32, longest length."""
        return self.lengths.max


class EpisodeWindow(struct.PyTreeNode, kw_only=True):
    """The last K episodes that ended, for the learning curve of a loop inside `jit`.

    A batch in which no episode ended has no mean return; a window has one as soon as
    one episode has ended. The first episodes that end are short ones, so a curve means
    little until K have ended. Keep the window in the state of the loop:

        window = rollout.EpisodeWindow.create(100)  # before the loop
        window = window.add(trajectory)  # in each update

    Attributes:
        returns: `[K]` float32, undiscounted returns, the last episode's last.
        lengths: `[K]` int32, lengths in steps, zero where no episode has ended yet.
    """

    returns: jax.Array  # [K]
    lengths: jax.Array  # [K]

    @classmethod
    def create(cls, num_episodes: int) -> Self:
        """Returns the window of a loop that begins.

        Args:
            num_episodes: K, at least 1.

        Raises:
            ValueError: if `num_episodes` is not an int of at least 1.
        """
        size = checks.int_between("num_episodes", num_episodes)
        returns, lengths = jnp.zeros(size, jnp.float32), jnp.zeros(size, jnp.int32)
        return cls(returns=returns, lengths=lengths)

    def add(self, data: Transition | Episodes) -> Self:
        """Moves the window on by the episodes that ended in `data`. Pure.

        Args:
            data: the next trajectory, `[T, B, ...]`, or `Episodes`; its masked-out
                rows do not count.

        Raises:
            ValueError: if `data` is neither, or if this is the window of several runs.
        """
        if jnp.ndim(self.lengths) != 1:
            raise ValueError(
                "`add` must be called on one window, got those of several runs, of "
                f"shape {jnp.shape(self.lengths)}: map it by `jax.vmap`."
            )
        size = len(self.lengths)
        new = newest(data, size)
        num_new = jnp.sum(new[:, 1] > 0, dtype=jnp.int32)  # an episode has a length
        place = jnp.arange(size)
        is_old = place < size - num_new
        shift = lambda old, new: jnp.where(  # noqa: E731
            is_old, jnp.roll(old, -num_new), new.astype(old.dtype)
        )
        return self.replace(
            returns=shift(self.returns, new[:, 0]),
            lengths=shift(self.lengths, new[:, 1]),
        )

    @property
    def num_episodes(self) -> jax.Array:
        """`()` int32, how many episodes the window has, at most K."""
        return _xp(self).sum(self.lengths > 0, axis=-1, dtype=np.int32)

    @property
    def return_mean(self) -> jax.Array:
        """`()` float32, their mean undiscounted return; NaN before the first."""
        return self._mean(self.returns)

    @property
    def length_mean(self) -> jax.Array:
        """`()` float32, their mean length in steps; NaN before the first."""
        return self._mean(self.lengths)

    def __str__(self) -> str:
        """Formats the mean return and the number of episodes."""
        if not _is_known(self):
            return repr(self)
        if not self.num_episodes:
            return "no episode has ended"
        last = plural(self.num_episodes, "episode")
        return f"return {self.return_mean:.6g}, last {last}"

    def _mean(self, values: jax.Array) -> jax.Array:
        xp = _xp(self)  # NumPy where nothing is traced: see `Moments`
        count = self.num_episodes
        total = xp.sum(xp.asarray(values, np.float32), axis=-1)
        mean = total / xp.maximum(count, 1).astype(np.float32)
        return xp.where(count > 0, mean, np.float32(np.nan))[()]


class Finished(NamedTuple):
    """The episodes that ended in `T` steps of `B` lanes, one entry per lane and step.

    Attributes:
        episode_return: `[T * B]` float32, undiscounted return; where `mask` is False,
            the return so far of the unfinished episode.
        episode_length: `[T * B]` int32, length in steps; where `mask` is False, so far.
        lane: `[T * B]` int32, the lane.
        mask: `[T * B]` bool, True where an episode ended.
    """

    episode_return: jax.Array
    episode_length: jax.Array
    lane: jax.Array
    mask: jax.Array


def summarize(data: Transition | Episodes) -> CollectStats:
    """Summarizes the episodes that ended in `data`, inside or outside of `jit`.

    An episode that began in an earlier trajectory counts whole, where it ends. A window
    favours short episodes, since more of them end in it: for an unbiased mean play
    exactly N, with `collect_episodes` or `evaluate`.

    Args:
        data: a trajectory, `[T, B, ...]` or with any other leading axes, whose
            masked-out rows do not count; or `Episodes`. It is not consumed.

    Returns:
        Statistics, each `()`.

    Raises:
        ValueError: if `data` is neither.
    """
    if not isinstance(data, Transition | Episodes):
        raise ValueError(
            "`data` must be a trajectory or `Episodes`, got "
            f"{type(data).__name__}; for a stream's batch, pass its `trajectory`."
        )
    if isinstance(data, Episodes):
        every = jnp.ones(data.terminated.shape, bool)
        ended = every if isinstance(data.mask, tuple) else data.mask
        return _describe(
            data,
            ended=ended,
            terminated=data.terminated,
            num_steps=data.num_steps,
            num_unfinished=_count(~data.finished & ended),
            num_nonfinite=_count(~jnp.isfinite(data.episode_return) & ended),
        )
    return _describe(
        data,
        ended=data.done & data.mask,
        terminated=data.terminated & data.mask,
        num_steps=_count(data.mask),
        num_unfinished=jnp.zeros((), jnp.int32),
        num_nonfinite=count_nonfinite(data),
    )


def finished(trajectory: Transition) -> Finished:
    """Lists the episodes that ended in a trajectory, inside or outside of `jit`.

    Args:
        trajectory: `[T, B, ...]`; masked-out rows do not count.

    Returns:
        One entry per lane and step, ordered by time, then by lane; `mask` is True where
        an episode ended. Outside of `jit`,
        `finished(trajectory).episode_return[finished(trajectory).mask]` is the list.

    Raises:
        ValueError: if `trajectory` is no trajectory.
    """
    checks.trajectory(trajectory)
    num_steps, num_envs = trajectory.mask.shape
    return Finished(
        episode_return=trajectory.episode_return.reshape(-1),
        episode_length=trajectory.episode_length.reshape(-1),
        lane=jnp.tile(jnp.arange(num_envs, dtype=jnp.int32), num_steps),
        mask=(trajectory.done & trajectory.mask).reshape(-1),
    )


def newest(data: Transition | Episodes, size: int) -> jax.Array:
    """Returns the last episodes that ended, `[size, 2]` float32: returns and lengths.

    In the order in which they ended, or started in `Episodes`; zero before the first.
    """
    if isinstance(data, Episodes):
        every = jnp.ones(data.terminated.shape, bool)
        ended, mask = data, every if isinstance(data.mask, tuple) else data.mask
    else:
        ended = finished(data)
        mask = ended.mask
    number = jnp.cumsum(mask[::-1])[::-1]  # 1 for the last
    place = jnp.where(mask & (number <= size), size - number, size)
    values = (ended.episode_return, ended.episode_length.astype(jnp.float32))
    blank = jnp.zeros((size, 2), jnp.float32)
    return blank.at[place].set(jnp.stack(values, axis=1), mode="drop")


def log_stats(stats: Any, *, prefix: str = "") -> dict[str, float]:
    """Flattens statistics into a dict of Python floats, for any logger.

    Args:
        stats: a `CollectStats`, a `StreamStats`, an `EpisodeWindow`, an `AgentStats`, a
            mapping, or any of these nested; every leaf a number or a `()` array.
        prefix: a group of names: "train" makes "train/return_mean" of "return_mean".

    Returns:
        Names to floats; a nested name is its path joined by "/". A mean over no episode
        is NaN.

    Raises:
        ValueError: if a leaf is not a scalar, or if two have the same name.
    """
    flat = {}
    group = f"{prefix.rstrip('/')}/" if prefix else ""
    for path, leaf in jax.tree.leaves_with_path(jax.device_get(_named(stats))):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if np.shape(leaf):
            raise ValueError(
                f"`stats` must have scalar leaves, got shape {np.shape(leaf)} at "
                f"{name}."
            )
        if group + name in flat:
            raise ValueError(
                f"`stats` must have different names, got {name} twice, for nested ones "
                'are joined by "/".'
            )
        flat[group + name] = float(leaf)
    return flat


def _describe(
    data: Transition | Episodes | Episode,
    *,
    ended: jax.Array,
    terminated: jax.Array,
    **counts: jax.Array,
) -> CollectStats:
    return CollectStats(
        num_episodes=_count(ended),
        num_terminated=_count(terminated),
        num_truncated=_count(ended & ~terminated),
        returns=moments(data.episode_return, ended),
        lengths=moments(data.episode_length.astype(jnp.float32), ended),
        accumulated={
            jax.tree_util.keystr(path, simple=True, separator="/"): moments(
                leaf.astype(jnp.float32), ended
            )
            for path, leaf in jax.tree.leaves_with_path(data.accumulated)
            if leaf.shape == ended.shape
        },
        **counts,
    )


def nothing(episode: Episode) -> CollectStats:
    """Returns the statistics of no episode, like those of a carry's `episode`."""
    none, zero = jnp.zeros_like(episode.episode_id, bool), jnp.int32(0)
    counts = {"num_steps": zero, "num_unfinished": zero, "num_nonfinite": zero}
    return _describe(episode, ended=none, terminated=none, **counts)


def _t_quantile(xp: Any, freedom: Any) -> Any:
    """Computes Student's t at 97.5 % for `freedom` degrees, at least 1.

    Cornish-Fisher expansion, "Handbook of Mathematical Functions" (Abramowitz and
    Stegun), 26.7.5: within 3e-4 of the true value from 5 degrees on.
    """
    z = _Z_QUANTILE
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    expansion = z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
    table = xp.asarray(_T_QUANTILES, xp.float32)
    small = table[xp.clip(freedom, 1, len(_T_QUANTILES)).astype(xp.int32) - 1]
    return xp.where(freedom > len(_T_QUANTILES), expansion, small)


def _xp(tree: Any) -> Any:
    """Returns `jnp` where something is traced, else NumPy."""
    return jnp if any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)) else np


def _is_known(stats: CollectStats | Moments | EpisodeWindow) -> bool:
    """Returns whether statistics are those of one run, and not traced."""
    rank = 1 if isinstance(stats, EpisodeWindow) else 0
    leaves = jax.tree.leaves(stats)
    return _xp(stats) is np and all(np.ndim(x) == rank for x in leaves)


def plural(count: Any, noun: str) -> str:
    """Returns "1 step", "1,280 steps"."""
    return f"{int(count):,} {noun}" + ("" if count == 1 else "s")


def _count(flag: jax.Array) -> jax.Array:
    return jnp.sum(flag, dtype=jnp.int32)


def moments(value: jax.Array, flag: jax.Array) -> Moments:
    """Computes the moments of `value`, float, where `flag`, of the same shape."""
    count, total = _count(flag), jnp.sum(jnp.where(flag, value, 0.0))
    # Two passes: the difference of two large sums would lose the digits that matter.
    mean = total / jnp.maximum(count, 1).astype(total.dtype)
    deviation = jnp.where(flag, value - mean, 0.0)
    return Moments(
        count=count,
        total=total,
        squared_deviations=jnp.sum(deviation**2),
        low=jnp.min(jnp.where(flag, value, jnp.inf), initial=jnp.inf),
        high=jnp.max(jnp.where(flag, value, -jnp.inf), initial=-jnp.inf),
    )


def merge(parts: Sequence[Any]) -> Any:
    """Merges statistics of successive batches, on the host in float64.

    Args:
        parts: a `CollectStats` or an `AgentStats` of each batch, at least one.

    Returns:
        The statistics of all batches, with Python and NumPy numbers as leaves.
    """
    is_moments = lambda x: isinstance(x, Moments)  # noqa: E731
    return jax.tree.map(_merge, *jax.device_get(list(parts)), is_leaf=is_moments)


def _merge(*parts: Any) -> Any:
    if not isinstance(parts[0], Moments):
        return sum(x.item() for x in parts)
    names = ("count", "total", "squared_deviations")
    columns = (np.array([getattr(x, name) for x in parts], float) for name in names)
    count, total, squared = columns
    # Deviations from the common mean: those within each part, and those of its mean.
    with np.errstate(invalid="ignore"):  # of infinite values
        between = total / np.maximum(count, 1) - total.sum() / max(count.sum(), 1)
        deviations = np.sum(squared + count * between**2)
    return Moments(
        count=count.sum().astype(np.int64),
        total=total.sum(),
        squared_deviations=deviations,
        low=min(x.low for x in parts),
        high=max(x.high for x in parts),
    )


def _named(stats: Any) -> Any:
    """Converts statistics to plain dicts, since not every mapping is a pytree."""
    if isinstance(stats, Mapping):
        return {name: _named(value) for name, value in stats.items()}
    if isinstance(stats, CollectStats):
        values = {name: getattr(stats, name) for name in _NAMES}
        own = stats.accumulated.items()
        return values | {f"{name}_mean": moments.mean for name, moments in own}
    if isinstance(stats, Moments | EpisodeWindow):
        names = _MOMENTS if isinstance(stats, Moments) else _WINDOW
        return {name: getattr(stats, name) for name in names}
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type):
        return _named(vars(stats))
    return stats


_MOMENTS = ("count", "mean", "std", "min", "max")
_WINDOW = ("num_episodes", "return_mean", "length_mean")
_NAMES = (
    "num_steps",
    "num_episodes",
    "num_terminated",
    "num_truncated",
    "num_unfinished",
    "num_nonfinite",
    *(f"return_{x}" for x in ("mean", "std", "min", "max", "ci_low", "ci_high")),
    *(f"length_{x}" for x in ("mean", "std", "min", "max")),
)
