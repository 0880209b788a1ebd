"""Computes statistics of the episodes in a trajectory, or of exactly N episodes."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout import checks
from rollout.moments import Moments, is_known, moments, moments_by_name, xp_of
from rollout.nonfinite import count_nonfinite
from rollout.types import Episodes, Transition


class CollectStats(struct.PyTreeNode, kw_only=True):
    """Statistics of the episodes that ended: `stats.returns.mean` is the mean return.

    A window in which no episode ended has `num_episodes` 0 and NaN for every mean,
    standard deviation, minimum and maximum: nothing that looks like data.

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
        if not is_known(self.num_episodes):
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
        is_old = jnp.arange(size) < size - num_new
        returns, lengths = new[:, 0], new[:, 1].astype(jnp.int32)
        return self.replace(
            returns=jnp.where(is_old, jnp.roll(self.returns, -num_new), returns),
            lengths=jnp.where(is_old, jnp.roll(self.lengths, -num_new), lengths),
        )

    @property
    def num_episodes(self) -> jax.Array:
        """`()` int32, how many episodes the window has, at most K."""
        return xp_of(self).sum(self.lengths > 0, axis=-1, dtype=np.int32)

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
        if not is_known(self.num_episodes):
            return repr(self)
        if not self.num_episodes:
            return "no episode has ended"
        last = plural(self.num_episodes, "episode")
        return f"return {self.return_mean:.6g}, last {last}"

    def _mean(self, values: jax.Array) -> jax.Array:
        xp = xp_of(self)  # NumPy where nothing is traced: see `Moments`
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
        ended, terminated, num_steps = present(data), data.terminated, data.num_steps
        is_cut, is_bad = ~data.finished, ~jnp.isfinite(data.episode_return)
        num_unfinished, num_nonfinite = _count(is_cut & ended), _count(is_bad & ended)
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


def present(episodes: Episodes) -> jax.Array:
    """Returns which of the episodes there are, `[N]` bool."""
    is_any = isinstance(episodes.mask, tuple)
    return jnp.ones(episodes.terminated.shape, bool) if is_any else episodes.mask


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
    ended = data if isinstance(data, Episodes) else finished(data)
    mask = present(data) if isinstance(data, Episodes) else ended.mask
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


def plural(count: Any, noun: str) -> str:
    """Returns "1 step", "1,280 steps"."""
    return f"{int(count):,} {noun}" + ("" if count == 1 else "s")


def _named(stats: Any) -> Any:
    """Converts statistics to plain dicts, since not every mapping is a pytree."""
    if isinstance(stats, Mapping):
        return {name: _named(value) for name, value in stats.items()}
    if isinstance(stats, CollectStats):
        values = {x: y for x, y in vars(stats).items() if x.startswith("num_")}
        for of, its in (("return", stats.returns), ("length", stats.lengths)):
            values |= {f"{of}_{name}": y for name, y in _figures(its).items()}
        values["return_ci_low"] = stats.returns.ci_low
        values["return_ci_high"] = stats.returns.ci_high
        own = stats.accumulated.items()
        return values | {f"{name}_mean": its.mean for name, its in own}
    if isinstance(stats, Moments):
        return {"count": stats.count, **_figures(stats)}
    if isinstance(stats, EpisodeWindow):
        means = {"return_mean": stats.return_mean, "length_mean": stats.length_mean}
        return {"num_episodes": stats.num_episodes, **means}
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type):
        return _named(vars(stats))
    return stats


def _figures(x: Moments) -> dict[str, jax.Array]:
    return {"mean": x.mean, "std": x.std, "min": x.min, "max": x.max}


def _count(flag: jax.Array) -> jax.Array:
    return jnp.sum(flag, dtype=jnp.int32)
