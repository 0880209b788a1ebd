"""Draws the figure of `python -m rollout --plot`: returns and lengths of episodes."""

from pathlib import Path
from typing import Any

import numpy as np

_COLORS = {"terminated": "#4c78a8", "truncated": "#f58518", "cut": "#9d9da1"}
_MAX_BINS = 50


def draw(path: Path, title: str, order: str, episodes: dict[str, Any]) -> None:
    """Writes a figure of episodes, in the format of the file's suffix."""
    make_figure(title, order, episodes).savefig(path)


def make_figure(title: str, order: str, episodes: dict[str, Any]) -> Any:
    """Draws the returns in order, and a histogram of the lengths.

    Args:
        title: of the figure.
        order: the episodes are in the order in which they "started" or "ended".
        episodes: `[N]` arrays: `episode_return`, `episode_length`, `terminated` and
            `finished`.
    """
    from matplotlib.figure import Figure  # pyplot would have global state

    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=13)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    value, length = episodes["episode_return"], episodes["episode_length"]
    terminated, finished = episodes["terminated"], episodes["finished"]
    left.set_title(f"{length.size:,} episodes", fontsize=10)
    left.set_xlabel(f"episode, in the order in which they {order}")
    style = {"alpha": 0.5, "markeredgewidth": 0, "rasterized": True}
    left.plot(np.arange(1, value.size + 1), value, ".", **style)
    mean = value.mean(dtype=np.float64)
    left.axhline(mean, color="black", label=f"mean {mean:,.4g}")
    left.set_ylabel("episode return (sum of rewards)")
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
        axes.legend(frameon=False, loc="upper right", ncols=3)
    return figure
