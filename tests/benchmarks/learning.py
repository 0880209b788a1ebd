"""How well do the notebooks learn, and how fast?

Runs the code cells of the training notebooks as they are, without a kernel and without
showing a picture, and prints what each left in its `results`: the mean return of every
seed over 100 evaluation episodes, and the wall time, that of the first with compiling.

    python tests/benchmarks/learning.py
    python tests/benchmarks/learning.py 04_ppo 06_dqn_replay --json FILE
"""

import argparse
import contextlib
import io
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
from harness import machine

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = ("04_ppo", "05_recurrent_ppo", "06_dqn_replay")


def run(name: str) -> dict[str, Any]:
    """Executes the code cells of a notebook; returns its `results`."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    space: dict[str, Any] = {"__name__": name}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            code = compile(cell.source, f"{name}.ipynb, cell {number}", "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, space)
    return space["results"]


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", default=NOTEBOOKS)
    parser.add_argument("--json", metavar="FILE", help="write the results here as well")
    args = parser.parse_args()
    matplotlib.use("agg")
    print(machine(), flush=True)
    print("| run | returns by seed | mean | first seed, s | another seed, s |")
    print("|---|---|---|---|---|", flush=True)
    found = {}
    for name in args.notebooks:
        for title, result in run(name).items():
            found[title] = result
            returns, seconds = result["returns"], result["seconds"]
            each = ", ".join(f"{x:.2f}" for x in returns)
            later = f"{statistics.median(seconds[1:]):.1f}" if seconds[1:] else ""
            print(
                f"| {title} | {each} | {statistics.mean(returns):.2f} | "
                f"{seconds[0]:.1f} | {later} |",
                flush=True,
            )
    if args.json:
        text = json.dumps({"machine": machine(), "results": found}, indent=1)
        Path(args.json).write_text(text)


if __name__ == "__main__":
    main()
