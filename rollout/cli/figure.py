"""Draws the figure of `python -m rollout --plot`: returns and lengths of episodes."""

from typing import Any

import numpy as np

_MAX_BINS = 50


def make_figure(title: str, episodes: dict[str, Any]) -> Any:
    """Draws the returns in order, and a histogram of the lengths.

    Args:
        title: of the figure.
        episodes: `[N]` arrays: `episode_return`, `episode_length`, `terminated` and
            `truncated`; an episode that is neither was cut.
    """
    from matplotlib.figure import Figure  # pyplot would have global state

    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    value, length = episodes["episode_return"], episodes["episode_length"]
    figure.suptitle(f"{title}: random policy, {length.size:,} episodes", fontsize=13)
    left.set(xlabel="episode", ylabel="episode return (sum of rewards)")
    # Dots in a vector format would be slow to show.
    left.plot(np.arange(1, value.size + 1), value, ".", alpha=0.5, rasterized=True)
    mean = value.mean(dtype=np.float64)
    left.axhline(mean, color="black", label=f"mean {mean:,.4g}")
    terminated, truncated = episodes["terminated"], episodes["truncated"]
    flags = terminated, truncated & ~terminated, ~(terminated | truncated)
    # Bins of whole steps, so that none is favoured.
    width = -(-(np.ptp(length) + 1) // _MAX_BINS)
    edges = np.arange(length.min(), length.max() + width + 1, width) - 0.5
    kinds = "terminated", "truncated", "cut"
    right.hist([length[x] for x in flags], edges, stacked=True, label=kinds)
    right.set(xlabel="episode length (steps)", ylabel="number of episodes")
    for axes in (left, right):
        axes.margins(y=0.15)  # room for the legend
        axes.legend(frameon=False, loc="upper right", ncols=3)
    return figure
