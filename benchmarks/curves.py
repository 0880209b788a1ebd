"""Plots learning curves of the recipes: the mean over seeds and its 95 % interval.

    python benchmarks/curves.py docs/recipes/sac.json

writes `docs/recipes/sac.png`. The file contains `steps`, a list of environment steps,
and `returns`, a list of the same length per seed, with null before the first value.
Alternatively, `lines` maps each label of the legend to `steps` and `returns`. Optional
keys are `title`, `ylabel`, `ylim`, `at` (a level to mark), and `xlabel` and `unit` if
`steps` does not count environment steps. The program of a recipe defines both lists:

    python benchmarks/curves.py docs/recipes/sac.json --run --seeds 5

first runs the program of `docs/recipes/sac.md` with seeds 0 to 4 and writes both lists
to the file. If the file contains `lines`, they become the lines of the program's plot.
"""

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import recipes

import rollout

STYLE = Path(__file__).parents[1] / "docs" / "curves.mplstyle"


def run_page(page: Path, seed: int) -> dict[str, tuple[Any, Any]]:
    """Runs the program of a recipe with a seed.

    Returns:
        `steps` and `returns` of the program, if it defines them, as the line `""`; and
        the coordinates of every line of its plot, by label.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    plt.close("all")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec(recipes.source(page.stem, seed=seed), names)
    lines: dict[str, tuple[Any, Any]] = {"": (names.get("steps"), names.get("returns"))}
    for line in plt.gca().lines:
        lines[str(line.get_label())] = line.get_data()
    return lines


def merge(runs: list[dict[str, tuple[Any, Any]]], label: str) -> dict[str, Any]:
    """Joins a line of all seeds."""
    steps, *_ = (np.asarray(run[label][0], float).tolist() for run in runs)
    returns = [np.asarray(run[label][1], float).tolist() for run in runs]
    return {"steps": steps, "returns": returns}


def band(returns: Any) -> tuple[np.ndarray, np.ndarray]:
    """Computes the mean over seeds, `[U]`, and half of its 95 % interval (Student's t).

    Both are NaN at points without a value for every seed.
    """
    values = np.asarray(returns, float)  # null becomes NaN
    if len(values) < 2:
        return values[0], np.full(values[0].shape, np.nan)
    mean, _, high = rollout.stats.mean_interval(values)
    return mean, high - mean


def plot(
    axes: Any, steps: Any, returns: Any, label: str | None = None, unit: float = 1000
) -> None:
    """Plots one line with its confidence band."""
    mean, half = band(returns)
    x = np.asarray(steps) / unit
    (line,) = axes.plot(x, mean, label=label)
    axes.fill_between(
        x, mean - half, mean + half, color=line.get_color(), alpha=0.2, lw=0
    )


def draw(data: dict[str, Any], path: Path) -> None:
    """Plots the curves of a file into one picture."""
    with plt.style.context(STYLE):
        figure, axes = plt.subplots()
        for label, line in data.get("lines", {None: data}).items():
            plot(axes, line["steps"], line["returns"], label, data.get("unit", 1000))
        if "at" in data:
            axes.axhline(data["at"], color="#777777", linestyle="--", linewidth=1)
        if "lines" in data:
            axes.legend()
        axes.set_title(data.get("title", ""))
        axes.set_xlabel(data.get("xlabel", "environment steps, thousands"))
        axes.set_ylabel(data.get("ylabel", "mean return"))
        axes.set_ylim(data.get("ylim"))
        figure.savefig(path, dpi=110)
        plt.close(figure)


def main() -> None:
    """Parses the options, runs the recipe with `--run`, and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    plt.switch_backend("agg")
    if args.run:
        runs = [run_page(args.file.with_suffix(".md"), x) for x in range(args.seeds)]
        data = json.loads(args.file.read_text()) if args.file.exists() else {}
        if "lines" in data:
            labels = [x for x in runs[0] if x and not x.startswith("_")]
            data["lines"] = {label: merge(runs, label) for label in labels}
        else:
            data |= merge(runs, "")
        args.file.write_text(json.dumps(data) + "\n")
    draw(json.loads(args.file.read_text()), args.file.with_suffix(".png"))


if __name__ == "__main__":
    main()
