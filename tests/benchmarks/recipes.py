"""How much do the recipes learn, and how long do they take?

Copies the code of each page of `docs/recipes` to a file, runs it in a process of its
own, and prints a table: the result, the wall time and the CPU time of all threads and
workers, both with compiling. With `--pictures` the pictures of the pages are replaced.

    python tests/benchmarks/recipes.py
    python tests/benchmarks/recipes.py dqn sac --pictures
"""

import argparse
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time

from machine import machine

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "recipes"
# What is printed at the end of each program.
RESULTS = {
    "action_masks": "returns[-1]",
    "dqn": "returns[-1]",
    "gymnasium_workers": "np.loadtxt('log.csv', delimiter=',')[-1, 1]",
    "recurrent_ppo": "returns[-1]",
    "sac": "returns[-1]",
    "sweep": "returns[:, :, -1].mean(axis=1), returns[:, :, -1].min(axis=1)",
}


def run(name: str, pictures: bool) -> str:
    """Runs the code of a page; returns a row of the table."""
    page = (FOLDER / f"{name}.md").read_text()
    program, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    # Under the guard of a program with worker processes, too.
    others = "\n".join([*others, f"print('result', {RESULTS[name]})"])
    guarded = "\n".join(f"    {line}" for line in others.splitlines())
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "train.py")
        path.write_text(f'{program}\nif __name__ == "__main__":\n{guarded}\n')
        packages = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "PYTHONPATH": packages, "MPLBACKEND": "agg"}
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            [sys.executable, path.name],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        wall = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if pictures:
            shutil.copy(path.with_name(f"{name}.png"), FOLDER)
    cpu = sum(after[:2]) - sum(before[:2])
    result = done.stdout.rpartition("result ")[2].strip()
    return f"| {name} | {result} | {wall:.0f} | {cpu:.0f} |"


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=list(RESULTS))
    parser.add_argument("--pictures", action="store_true", help="replace the pictures")
    args = parser.parse_args()
    print(machine())
    print("| recipe | result | wall, s | CPU, s |\n|---|---|---|---|", flush=True)
    for name in args.recipes:
        print(run(name, args.pictures), flush=True)


if __name__ == "__main__":
    main()
