"""How well and how fast do the training notebooks learn?

Runs the code cells of the notebooks without a kernel and without displaying pictures,
and prints the variable `results` of each notebook: the mean return of every seed over
100 evaluation episodes, and the wall time. The time of the first seed includes
compilation.

    python benchmarks/learning.py
    python benchmarks/learning.py --notebooks 04_ppo 06_dqn_replay
"""

import contextlib
import io
import statistics
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
from harness import run

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = ("04_ppo", "05_recurrent_ppo", "06_dqn_replay")


def execute(name: str) -> dict[str, Any]:
    """Executes the code cells of a notebook; returns its `results`."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    namespace: dict[str, Any] = {"__name__": name}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            code = compile(cell.source, f"{name}.ipynb, cell {number}", "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, namespace)
    return namespace["results"]


def rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Runs every notebook and yields a row per result."""
    matplotlib.use("agg")
    for name in args.notebooks:
        for title, result in execute(name).items():
            returns, seconds = result["returns"], result["seconds"]
            median = f"{statistics.median(seconds[1:]):.1f}" if seconds[1:] else ""
            yield {
                "Run": title,
                "Returns by seed": ", ".join(f"{x:.2f}" for x in returns),
                "Mean": f"{statistics.mean(returns):.2f}",
                "First seed, s": f"{seconds[0]:.1f}",
                "Another seed, s": median,
            }


if __name__ == "__main__":
    run(__doc__, 1, {"what the notebooks learn": rows}, notebooks=NOTEBOOKS)
