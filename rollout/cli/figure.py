"""The figures of `python -m rollout --plot`: returns and lengths of episodes."""

from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.cli.types import Ended, Played

if TYPE_CHECKING:  # these take long to import, and not every run needs them
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREY, _DARK = "#4c78a8", "#f58518", "#9d9da1", "#1f3552"
_MAX_BINS = 50
_MAX_MEANS = 40
_MAX_POINTS = 5000


def draw_steps(env_id: str, num_envs: int, ended: Ended) -> "Figure":
    """Draws the returns over time, and how the lengths of the episodes spread."""
    figure, left, right = _make_figure(env_id, num_envs)
    step, value = ended.step * num_envs, ended.episode_return
    drawn = _draw_points(left, step, value)
    means = _means(step, value, min(_MAX_MEANS, max(1, value.size // 10)))
    if means.shape[1] > 1:
        line = {"color": _DARK, "linewidth": 1.6, "label": "mean of successive ones"}
        left.plot(*means, ".-", **line)
        _make_room_for_legend(left)
    left.set_title(f"{value.size:,} episodes, where they ended{drawn}", fontsize=10)
    left.set_xlabel("environment steps, all envs together")
    kinds = {"terminated": ended.terminated, "truncated": ~ended.terminated}
    _draw_lengths(right, ended.episode_length, kinds)
    return figure


def draw_episodes(env_id: str, num_envs: int, played: Played) -> "Figure":
    """Draws the returns in start order and their mean, and how the lengths spread."""
    figure, left, right = _make_figure(env_id, num_envs)
    episodes: Any = played.episodes
    stats: Any = played.stats
    value = episodes.episode_return
    drawn = _draw_points(left, np.arange(1, value.size + 1), value)
    left.set_xlim(0, value.size + 1)
    interval = stats.return_ci_low, stats.return_ci_high
    left.axhline(stats.return_mean, color=_DARK, linewidth=1.6, label="mean")
    if np.all(np.isfinite(interval)):
        label = "its 95 % confidence interval"
        left.axhspan(*interval, color=_DARK, alpha=0.3, linewidth=0, label=label)
    _make_room_for_legend(left)
    left.set_title(f"{value.size:,} episodes as they started{drawn}", fontsize=10)
    left.set_xlabel("episode, in the order in which they started")
    kinds = {
        "terminated": episodes.terminated,
        "truncated": episodes.truncated & ~episodes.terminated,
        "cut": ~episodes.finished,
    }
    _draw_lengths(right, episodes.episode_length, kinds)
    return figure


def _make_figure(env_id: str, num_envs: int) -> tuple["Figure", "Axes", "Axes"]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # without pyplot and its global state

    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{env_id}: random policy in {num_envs:,} envs", fontsize=13)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, left, right


def _draw_points(axes: Any, x: np.ndarray, value: np.ndarray) -> str:
    """Draws the returns as light points; says how many, if not all."""
    from matplotlib.ticker import EngFormatter

    every = -(-value.size // _MAX_POINTS)
    alpha = float(np.clip(300 / value.size, 0.3, 0.8))
    points = {"color": _BLUE, "alpha": alpha, "markersize": 6, "markeredgewidth": 0}
    axes.plot(x[::every], value[::every], ".", **points)
    axes.set_ylabel("episode return (sum of rewards)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return f" (1 in {every} drawn)" if every > 1 else ""


def _make_room_for_legend(axes: Any) -> None:
    axes.margins(y=0.15)
    axes.legend(frameon=False, loc="upper left", ncols=2)


def _means(step: np.ndarray, value: np.ndarray, num_groups: int) -> np.ndarray:
    """Mean step and mean value of groups of successive episodes, about equally many.

    Episodes of the same step stay together: their order among each other is the one of
    the lanes, not of time.
    """
    rank = np.searchsorted(step, step)
    group = rank * num_groups // step.size
    count = np.bincount(group)
    sums = np.stack([np.bincount(group, weights=x) for x in (step, value)])
    return sums[:, count > 0] / count[count > 0]


def _draw_lengths(axes: Any, length: np.ndarray, kinds: dict) -> None:
    """Draws the histogram of the lengths, the ways to end (names to flags) apart."""
    low, high = int(length.min()), int(length.max())
    width = -(-(high - low + 1) // _MAX_BINS)  # whole steps, so that no bin is favoured
    edges = np.arange(low, high + width + 1, width) - 0.5
    pairs = zip(kinds.items(), (_BLUE, _ORANGE, _GREY), strict=False)
    shown = [
        (label, length[flag], color) for (label, flag), color in pairs if flag.any()
    ]
    labels, values, colors = map(list, zip(*shown, strict=True))
    axes.hist(values, edges, stacked=True, color=colors, label=labels)
    axes.set_xlim(edges[0] - 2 * width, edges[-1] + 2 * width)
    axes.set_ylim(top=1.2 * axes.get_ylim()[1])  # room for the legend
    axes.legend(frameon=False, ncols=3)
    axes.set_title(f"mean length {length.mean():,.1f} steps", fontsize=10)
    axes.set_xlabel("episode length (steps)")
    axes.set_ylabel("number of episodes")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:,.0f}")
