"""Computes statistics of episodes, means over seeds, and counts of nonfinite values.

`nonfinite` has the rule for all checks of the package. Observations, actions, rewards
and final values must be finite. In extras, such as logits, minus infinity marks an
invalid action, so only NaN and plus infinity count there. In accumulated values only
NaN counts: a minimum starts at infinity.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from rollout.moments import Moments, is_known, moments, moments_by_name, xp_of
from rollout.types import Episodes, Transition, check_data, check_trajectory

_FIELDS = "obs", "action", "next_obs", "reward", "extras", "final_value", "accumulated"


def nonfinite(trajectory: Transition) -> dict[str, jax.Array]:
    """Finds the rows with NaN or infinity, by field.

    Args:
        trajectory: `[T, B, ...]`, or a transition, `[B, ...]`; empty fields, `()`, are
            skipped.

    Returns:
        The names of float fields, such as `extras.value`, to `[T, B]` bool.
    """
    fields = {name: getattr(trajectory, name) for name in _FIELDS}
    flags = {}
    for path, leaf in jax.tree.leaves_with_path(fields):
        # Integers and keys are always finite.
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        bad, field = ~jnp.isfinite(leaf), name.split(".")[0]
        if field == "extras":
            bad = jnp.isnan(leaf) | (leaf == jnp.inf)
        if field == "accumulated":
            bad = jnp.isnan(leaf)
        axes = range(trajectory.mask.ndim, leaf.ndim)
        flags[name] = jnp.any(bad, axis=tuple(axes))
    return flags


def is_nonfinite(trajectory: Transition) -> jax.Array:
    """Finds the rows with NaN or infinity in any field, `[T, B]` bool."""
    return sum(nonfinite(trajectory).values(), jnp.zeros(trajectory.mask.shape, bool))


def count_nonfinite(trajectory: Transition) -> jax.Array:
    """Counts the rows in which an action, reward or extra is not finite, `()` int32.

    Skips all other fields, so that a program need not compute unused ones.
    """
    unread = {"obs": (), "next_obs": (), "final_value": (), "accumulated": ()}
    bad = is_nonfinite(trajectory.replace(**unread))
    return jnp.sum(trajectory.mask & bad, dtype=jnp.int32)


class CollectStats(struct.PyTreeNode, kw_only=True):
    """Statistics of the episodes that ended: `stats.returns.mean` is the mean return.

    If no episode ended, `num_episodes` is 0, and every mean, standard deviation,
    minimum and maximum is NaN.

    Attributes:
        num_steps: `()` int32, environment steps over all lanes, without idle rows.
        num_episodes: `()` int32, episodes that ended, including earlier starts.
        num_terminated: `()` int32, episodes that terminated.
        num_truncated: `()` int32, episodes that were only truncated, also by
            `max_episode_steps`.
        num_unfinished: `()` int32, episodes that `max_episode_steps` truncated: return
            and length cover the steps taken.
        num_nonfinite: `()` int32, rows with a NaN or infinity in the reward, the action
            or the extras, except minus infinity in extras such as logits. Use it to
            detect NaN parameters; a discrete policy must record log_prob or logits for
            this. `Episodes` have no rows: counts episodes with a nonfinite return.
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

    An episode that spans several trajectories counts in the last one, with the full
    return and length. A window favors short episodes, since more of them end in it: for
    an unbiased mean play exactly N episodes, with `collect_episodes` or `evaluate`.

    Args:
        data: a trajectory, `[T, B, ...]` or with any other leading axes, whose
            masked-out rows do not count; or `Episodes`. It is not donated.

    Returns:
        Statistics, each `()`.

    Raises:
        ValueError: if `data` is neither a trajectory nor `Episodes`.
    """
    check_data(data)
    return _summarize(data)


# Jitted: from Python, each operation would be a program.
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

    The interval is Student's t for independent values along `axis`. A NaN or infinity
    is not skipped: the mean and the interval at that point are not finite.

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
    of_axis = moments(x, xp.ones(x.shape, bool), axis=axis, xp=xp)
    return of_axis.mean, of_axis.ci_low, of_axis.ci_high


def present(episodes: Episodes) -> jax.Array:
    """Returns which entries hold an episode that counts, `[N]` bool."""
    # () stands for True: without `min_steps` all episodes count.
    is_any = isinstance(episodes.mask, tuple)
    return jnp.ones(episodes.terminated.shape, bool) if is_any else episodes.mask


def ended_episodes(trajectory: Transition) -> Episodes:
    """Lists the episodes that ended in a trajectory, inside or outside of `jit`.

    Args:
        trajectory: `[T, B, ...]`; masked-out rows do not count.

    Returns:
        One entry per lane and step, `[T * B]`, ordered by time, then by lane. `mask` is
        True if an episode ended; all other entries hold the return and length so far.
        Outside of `jit`, `ended.episode_return[ended.mask]` is the list of returns.
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
