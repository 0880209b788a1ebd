"""Trains a recipe with several seeds, for the learning curves of its page.

    python benchmarks/curves.py docs/recipes/sac.json --seeds 5
    python benchmarks/charts.py docs/recipes/sac.png

The first command runs the program of `docs/recipes/sac.md` with seeds 0 to 4 and writes
the lists `steps` and `returns` of the program to the file. If the file contains
`lines`, they become the lines of the program's plot. The second command draws them.
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
from harness import record


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


def main() -> None:
    """Runs a recipe with every seed, and writes the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    plt.switch_backend("agg")
    runs = [run_page(args.file.with_suffix(".md"), x) for x in range(args.seeds)]
    data = json.loads(args.file.read_text()) if args.file.exists() else {}
    if "lines" in data:
        labels = [x for x in runs[0] if x and not x.startswith("_")]
        data["lines"] = {label: merge(runs, label) for label in labels}
    else:
        data |= merge(runs, "")
    args.file.write_text(json.dumps(data | record()) + "\n")


if __name__ == "__main__":
    main()
