"""How well and how fast do teams learn with the recipes?

Every run is compiled separately. Seconds are CPU seconds without compilation. "agent"
is the recipe of SMAX with `agent_transitions`. `docs/teams.json` also has the runs of
JaxMARL's scripts with the same settings, which this script does not repeat.

    pip install ".[jaxmarl]" distrax matplotlib optax
    python benchmarks/teams.py docs/teams.json

Runs in the file are only repeated with `--repeat`, so an interrupted script resumes.
`charts.py` draws the pictures of the recipes, and `docs/coming_from/jaxmarl.png`.
"""

import argparse
import functools
import math
import re
import time
from pathlib import Path
from typing import Any

import jax
import recipes
from harness import complete
from recipes import FOLDER as RECIPES

# Code for the observation of the critic in IPPO and in MAPPO.
LOCAL = """\
def transform_obs(obs):  # all agents of all environments, [..., 3 * n, 18]
    return obs
"""
GLOBAL = re.findall(r"```py\n(.*?)```", (RECIPES / "ippo.md").read_text(), re.DOTALL)[0]
# Recipe, replaced text, and number of steps.
TASKS: dict[str, tuple[str, dict[str, str], int]] = {
    "IPPO, spread": ("ippo", {}, 299_008),
    "MAPPO, spread": ("ippo", {LOCAL: GLOBAL}, 299_008),
    "VDN, spread": ("vdn", {}, 299_520),
    "IPPO, SMAX 3m": ("smax", {}, 600_064),
    "IPPO, SMAX 3m, agent": (
        "smax",
        {"team_transitions": "agent_transitions"},
        600_064,
    ),
}


def run(task: str, seed: int) -> dict[str, Any]:
    """Runs the program of a page, compiles it again, and returns its results."""
    name, changes, _ = TASKS[task]
    code = recipes.source(name, changes, seed)
    parts = re.split(r"^(?=for |rates|plt)", code, flags=re.MULTILINE)
    setup, loop = parts[:2]  # the third part plots
    names: dict[str, Any] = {"__name__": name}
    exec(compile(setup, name, "exec"), names)
    update = names["update"]

    def timed_update(*args: Any) -> Any:
        if "arguments" not in names:
            names["arguments"] = jax.eval_shape(lambda *x: x, *args)
        result = update(*args)
        if "start" not in names:
            names["start"] = (jax.block_until_ready(result), time.process_time())[1]
        return result

    names["update"] = timed_update
    exec(compile(loop, name, "exec"), names)
    curve = [float(x) for x in jax.block_until_ready(names["returns"])]
    seconds = time.process_time() - names["start"]
    jax.clear_caches()
    lowered = update.lower(*names["arguments"])
    start = time.process_time()
    memory = lowered.compile().memory_analysis()
    compile_seconds = time.process_time() - start
    nbytes = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    nbytes += memory.output_size_in_bytes - memory.alias_size_in_bytes
    jax.clear_caches()
    print(f"{task}, seed {seed}: {curve[-1]:.2f}, {seconds:.0f} s", flush=True)
    curve = [None if math.isnan(x) else round(x, 3) for x in curve]
    return {"curve": curve, "s": seconds, "compile": compile_seconds, "bytes": nbytes}


def main() -> None:
    """Runs all tasks and seeds for which the file has no values."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeat", action="store_true", help="also runs in the file")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    args = parser.parse_args()
    complete(
        args.file,
        (
            ((task, "ours", str(seed)), functools.partial(run, task, seed))
            for seed in range(args.seeds)
            for task in args.tasks
        ),
        args.repeat,
    )


if __name__ == "__main__":
    main()
