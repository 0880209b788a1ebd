"""What `python -m rollout` reports of a run: a table and a figure."""

import argparse
import os
from typing import TYPE_CHECKING

import jax
import numpy as np

from rollout._run import XLA_CPU_LOOP, Ended, Program, Result

if TYPE_CHECKING:  # it takes long to import, and only the figure needs it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _DARK = "#4c78a8", "#f58518", "#1f3552"
_MAX_BINS = 50
_MAX_MEANS = 40
_MAX_POINTS = 5000


def print_table(args: argparse.Namespace, program: Program, result: Result) -> None:
    """Prints what was run, what the episodes were like and how fast they came."""
    device = jax.devices()[0]
    kind = "" if device.device_kind == device.platform else f" ({device.device_kind})"
    params = ", ".join(f"{name}={value!r}" for name, value in args.env_param)
    num_rows = args.num_envs * args.num_steps
    print_row("environment", args.env + (f" ({params})" if params else ""))
    print_row("device", device.platform + kind)
    print_row("jax", jax.__version__)
    if XLA_CPU_LOOP in os.environ.get("XLA_FLAGS", ""):
        print_row("xla cpu loop", "on")
    print_row("envs", f"{args.num_envs:,}")
    print_row("steps", f"{num_rows:,}")
    _print_episodes(result.ended)
    print_row("compile time", f"{program.compile_time:.2f} s")
    print_row("run time", f"{result.run_time:.3f} s")
    print_row("steps per second", f"{num_rows / result.run_time:,.0f}")


def print_row(label: str, value: object) -> None:
    """Prints one row of the table."""
    print(f"{label:<18}{value}".rstrip())


def draw(env_id: str, num_envs: int, ended: Ended) -> "Figure":
    """Draws the returns over time and the distribution of the lengths.

    Args:
        env_id: id of the environment, for the title.
        num_envs: B, lanes that stepped side by side.
        ended: the episodes, at least one.

    Returns:
        A figure that no other code can see: nothing of pyplot's global state is used.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{env_id}: random policy in {num_envs:,} envs", fontsize=13)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_returns(left, num_envs, ended)
    _draw_lengths(right, ended)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure


def _print_episodes(ended: Ended) -> None:
    count, terminated = ended.terminated.size, int(ended.terminated.sum())
    if not count:
        print_row("episodes", "0 (no episode ended in this window)")
        return
    flags = f"{terminated:,} terminated, {count - terminated:,} truncated"
    print_row("episodes", f"{count:,} ({flags})")
    print_row("", "".join(f"{name:<12}" for name in ("mean", "std", "min", "max")))
    values = {"return": ended.episode_return, "length": ended.episode_length}
    for label, value in values.items():
        x = value.astype(np.float64)  # a float32 sum of many loses digits
        moments = (x.mean(), x.std(), x.min(), x.max())
        print_row(label, "".join(f"{moment:<12.6g}" for moment in moments))


def _draw_returns(axes: "Axes", num_envs: int, ended: Ended) -> None:
    """Draws the episodes as light points, and the mean of all, group by group."""
    from matplotlib.ticker import EngFormatter

    step, value = ended.step * num_envs, ended.episode_return
    every = -(-value.size // _MAX_POINTS)
    alpha = float(np.clip(300 / value.size, 0.3, 0.8))
    points = {"color": _BLUE, "alpha": alpha, "markersize": 6, "markeredgewidth": 0}
    axes.plot(step[::every], value[::every], ".", **points)
    means = _means(step, value, min(_MAX_MEANS, max(1, value.size // 10)))
    if means.shape[1] > 1:
        line = {"color": _DARK, "linewidth": 1.6, "label": "mean of successive ones"}
        axes.plot(*means, ".-", **line)
        axes.margins(y=0.15)  # room for the legend
        axes.legend(frameon=False, loc="upper left")
    drawn = f" (1 in {every} drawn)" if every > 1 else ""
    axes.set_title(f"{value.size:,} episodes, where they ended{drawn}", fontsize=10)
    axes.set_xlabel("environment steps, all envs together")
    axes.set_ylabel("episode return (sum of rewards)")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


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


def _draw_lengths(axes: "Axes", ended: Ended) -> None:
    """Draws the histogram of the lengths, the two ways to end apart."""
    length, terminated = ended.episode_length, ended.terminated
    low, high = int(length.min()), int(length.max())
    width = -(-(high - low + 1) // _MAX_BINS)  # whole steps, so that no bin is favoured
    edges = np.arange(low, high + width + 1, width) - 0.5
    kinds = [("terminated", _BLUE, terminated), ("truncated", _ORANGE, ~terminated)]
    labels, colors, flags = zip(*(kind for kind in kinds if kind[2].any()), strict=True)
    values = [length[flag] for flag in flags]
    axes.hist(values, edges, stacked=True, color=colors, label=labels)
    axes.set_xlim(edges[0] - 2 * width, edges[-1] + 2 * width)
    axes.set_ylim(top=1.2 * axes.get_ylim()[1])  # room for the legend
    axes.legend(frameon=False, ncols=2)
    axes.set_title(f"mean length {length.mean():,.1f} steps", fontsize=10)
    axes.set_xlabel("episode length (steps)")
    axes.set_ylabel("number of episodes")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:,.0f}")
