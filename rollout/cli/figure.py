"""Draws the figure of `python -m rollout --plot`: returns and lengths of episodes.

With several agents, the returns are those of each agent.
"""

import io
from typing import Any

import numpy as np

_COLORS = {"terminated": "#4c78a8", "truncated": "#f58518", "cut": "#9d9da1"}
_MAX_BINS, _MAX_POINTS = 50, 5000
_NUM_MEANS = 50  # of each agent's returns
_MOST_NAMED = 9  # agents; a legend of more would cover the figure


def draw(title: str, order: str, episodes: Any, kind: str, agents: Any = None) -> bytes:
    """Returns the bytes of a figure of episodes.

    Args:
        title: of the figure.
        order: the episodes are in the order in which they "started" or "ended".
        episodes: `[N]` as NumPy arrays.
        kind: "png", "svg" or "pdf".
        agents: returns by agent, `[N]` each, NaN where it never acted; None for
            environments of one agent.
    """
    file = io.BytesIO()
    make_figure(title, order, episodes, agents).savefig(file, format=kind)
    return file.getvalue()


def make_figure(title: str, order: str, episodes: Any, agents: Any = None) -> Any:
    """Draws the returns in order, and a histogram of the lengths."""
    from matplotlib.figure import Figure  # pyplot would have global state

    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=13)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    length = episodes.episode_length
    if agents:
        drawn = _draw_agents(left, agents)
    else:
        drawn = _draw_returns(left, episodes.episode_return)
    left.set_title(f"{length.size:,} episodes{drawn}", fontsize=10)
    left.set_xlabel(f"episode, in the order in which they {order}")
    terminated, finished = episodes.terminated, episodes.finished
    kinds = {"terminated": terminated, "truncated": finished & ~terminated}
    kinds = {x: flag for x, flag in {**kinds, "cut": ~finished}.items() if flag.any()}
    low, high = int(length.min()), int(length.max())
    width = -(-(high - low + 1) // _MAX_BINS)  # whole steps, so that no bin is favoured
    edges = np.arange(low, high + width + 1, width) - 0.5
    values, colors = [length[x] for x in kinds.values()], [_COLORS[x] for x in kinds]
    right.hist(values, edges, stacked=True, color=colors, label=list(kinds))
    right.set_title(f"mean length {length.mean():,.1f} steps", fontsize=10)
    right.set_xlabel("episode length (steps)")
    right.set_ylabel("number of episodes")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.15)  # room for the legend
        if len(axes.get_legend_handles_labels()[1]) <= _MOST_NAMED:
            axes.legend(frameon=False, loc="upper right", ncols=3)
    return figure


def _draw_returns(axes: Any, value: np.ndarray) -> str:
    """Draws a dot for each episode, and the mean; returns a note for the title."""
    every = -(-value.size // _MAX_POINTS)
    number = np.arange(1, value.size + 1)
    axes.plot(number[::every], value[::every], ".", alpha=0.5, markeredgewidth=0)
    mean = value.mean(dtype=np.float64)
    axes.axhline(mean, color="black", label=f"mean {mean:,.4g}")
    axes.set_ylabel("episode return (sum of rewards)")
    return f" (1 in {every} drawn)" if every > 1 else ""


def _draw_agents(axes: Any, agents: dict[str, np.ndarray]) -> str:
    """Draws a line for each agent: dots of a game would hide each other."""
    size = 1
    for name, value in agents.items():
        acted = np.flatnonzero(np.isfinite(value))
        if not acted.size:
            continue
        its = value[acted].astype(np.float64)
        size = max(1, its.size // _NUM_MEANS)
        # A mean stands at the last of its episodes; neighbours overlap by half.
        means = np.convolve(its, np.full(size, 1 / size), "valid")[:: max(1, size // 2)]
        number = acted[size - 1 :: max(1, size // 2)] + 1
        axes.plot(number, means, label=f"{name} {its.mean():,.4g}")
    axes.set_ylabel("return of each agent (sum of rewards)")
    return f", running means of {size:,}" if size > 1 else ""
