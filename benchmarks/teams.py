"""How well and how fast do teams learn: the recipes and the scripts of JaxMARL?

The scripts run unmodified with the settings of the recipes. Every run is compiled
separately, the runs of a seed are interleaved, and seconds are CPU seconds without
compilation. "agent" is the recipe of SMAX with `agent_transitions`.

    pip install ".[jaxmarl]" distrax flashbax matplotlib optax pyyaml
    git clone https://github.com/FLAIROx/JaxMARL
    python benchmarks/teams.py docs/teams.json --jaxmarl JaxMARL \\
        --plot docs/coming_from/jaxmarl.png

`--plot` also plots the pictures of the recipes. Values in the file are not recomputed,
so an interrupted run resumes.
"""

import argparse
import importlib
import json
import math
import re
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import curves
import jax
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import recipes
import yaml
from recipes import FOLDER as RECIPES

matplotlib.use("agg")
# Code for the observation of the critic in IPPO and in MAPPO.
LOCAL = """\
def transform_obs(obs):  # all agents of all environments, [..., 3 * n, 18]
    return obs
"""
GLOBAL = re.findall(r"```py\n(.*?)```", (RECIPES / "ippo.md").read_text(), re.DOTALL)[0]
ENDS = {"team_transitions": "agent_transitions"}
ENDINGS = {"team_transitions": "", "agent_transitions": ", agent"}
MPE = {"TOTAL_TIMESTEPS": 299_008, "LR": 2e-3, "NUM_ENVS": 16, "NUM_STEPS": 128}
SMAX = {"TOTAL_TIMESTEPS": 600_064, "LR": 2e-3, "NUM_ENVS": 32, "NUM_STEPS": 64}
# Recipe, replaced text, metric, steps; script, config, metric and settings.
TASKS: dict[str, tuple[Any, ...]] = {
    "IPPO, spread": (
        ("ippo", {}, "returns", 299_008),
        ("IPPO.ippo_ff_mpe", "ippo_ff_mpe", "returned_episode_returns", MPE),
    ),
    "MAPPO, spread": (
        ("ippo", {LOCAL: GLOBAL}, "returns", 299_008),
        ("MAPPO.mappo_rnn_mpe", "mappo_homogenous_rnn_mpe", "returns", MPE),
    ),
    "VDN, spread": (
        ("vdn", {}, "returns", 299_520),
        (
            "QLearning.vdn_rnn",
            "alg/ql_rnn_mpe",
            "returned_episode_returns",
            {"TOTAL_TIMESTEPS": 299_520, "NUM_EPOCHS": 2, "TEST_DURING_TRAINING": False}
            | {"WANDB_MODE": "online"},
        ),
    ),
    "IPPO, SMAX 3m": (
        ("smax", {}, "returns", 600_064),
        (
            "IPPO.ippo_rnn_smax",
            "ippo_rnn_smax",
            "win_rate",
            SMAX | {"MAP_NAME": "3m", "CLIP_EPS": 0.2},
        ),
    ),
    "IPPO, SMAX 3m, agent": (("smax", ENDS, "returns", 600_064), None),
}


def run_recipe(name: str, changes: dict[str, str], figure: str, seed: int) -> Any:
    """Runs the program of a page; returns a curve, seconds and a lowering function."""
    code = recipes.source(name, changes, seed)
    parts = re.split(r"^(?=for |rates|plt)", code, flags=re.MULTILINE)
    setup, loop = parts[:2]  # the third part plots
    names: dict[str, Any] = {"__name__": name}
    exec(compile(setup, name, "exec"), names)
    with_update = names["update"]

    def timed_update(*args: Any) -> Any:
        if "arguments" not in names:
            names["arguments"] = jax.eval_shape(lambda *x: x, *args)
        result = with_update(*args)
        if "start" not in names:
            names["start"] = (jax.block_until_ready(result), time.process_time())[1]
        return result

    names["update"] = timed_update
    exec(compile(loop, name, "exec"), names)
    curve = [float(x) for x in jax.block_until_ready(names[figure])]
    seconds = time.process_time() - names["start"]
    return curve, seconds, lambda: with_update.lower(*names["arguments"])


def load_script(folder: Path, module: str, config: str, settings: dict) -> Any:
    """Loads a script of JaxMARL; returns its training function and a list of logs."""
    log: list[dict[str, Any]] = []
    wandb, hydra, omegaconf = (
        types.ModuleType(x) for x in ("wandb", "hydra", "omegaconf")
    )
    wandb.log = log.append  # type: ignore[attr-defined]
    hydra.main = lambda **_: lambda fn: fn  # type: ignore[attr-defined]
    omegaconf.OmegaConf = None  # type: ignore[attr-defined]
    sys.modules |= {"wandb": wandb, "hydra": hydra, "omegaconf": omegaconf}
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    script = importlib.import_module(f"baselines.{module}")
    script.wandb = wandb
    base = folder / "baselines" / module.partition(".")[0] / "config"
    values = yaml.safe_load((base / f"{config}.yaml").read_text())
    values = {k: float(v) if k == "LR" else v for k, v in values.items()} | settings
    if module != "QLearning.vdn_rnn":
        return script.make_train(values), log
    env = script.MPELogWrapper(script.make(values["ENV_NAME"]))
    return script.make_train(values, env), log


def run_script(folder: Path, script: tuple, seed: int) -> Any:
    """Runs a script of JaxMARL; returns the same values as `run_recipe`."""
    module, config, figure, settings = script
    train, log = load_script(folder, module, config, settings)
    key = jax.random.PRNGKey(seed)
    program = jax.jit(train).lower(key).compile()
    start = time.process_time()
    jax.block_until_ready(program(key))
    jax.effects_barrier()
    seconds = time.process_time() - start
    # VDN's script logs the mean of a metric that is 0 except in the last of 26 steps.
    scale = 26 if module == "QLearning.vdn_rnn" else 1
    curve = [scale * float(np.mean(x[figure])) for x in log]
    return curve, seconds, lambda: jax.jit(train).lower(key)


def measure(run: Callable[[], Any]) -> dict[str, Any]:
    """Runs a training, compiles it again, and returns the values for the file."""
    curve, seconds, lower = run()
    jax.clear_caches()
    lowered = lower()
    start = time.process_time()
    memory = lowered.compile().memory_analysis()
    compiling = time.process_time() - start
    nbytes = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    nbytes += memory.output_size_in_bytes - memory.alias_size_in_bytes
    jax.clear_caches()
    curve = [None if math.isnan(x) else round(x, 3) for x in curve]
    return {"curve": curve, "s": seconds, "compile": compiling, "bytes": nbytes}


def final_value(curve: list[float]) -> float:
    """Computes the mean over the last tenth of a curve."""
    return statistics.mean(curve[-len(curve) // 10 :])


def table(results: dict[str, Any]) -> str:
    """Formats the table of the page; ratios are recipe / JaxMARL, of medians."""
    lines = [
        "| | here | JaxMARL | CPU time | memory | compile time |",
        "|---" * 6 + "|",
    ]
    for task, by_maker in results.items():
        cells = []
        for maker in ("ours", "theirs"):
            ends = [[final_value(x["curve"])] for x in by_maker.get(maker, {}).values()]
            mean, half = curves.band(ends) if ends else ([], [])
            cells.append(f"{mean[0]:.2f} ± {half[0]:.2f}" if ends else "")
        ratios = ["", "", ""]
        if by_maker.get("theirs"):
            ratios = []
            for key in ("s", "bytes", "compile"):
                median = {
                    maker: statistics.median(x[key] for x in runs.values())
                    for maker, runs in by_maker.items()
                }
                ratios.append(f"{median['ours'] / median['theirs']:.2f}")
        label = task.replace(", agent", ", `agent_transitions`")
        lines.append(f"| {label} | {' | '.join(cells + ratios)} |")
    return "\n".join(lines)


def lines(results: dict[str, Any], *parts: tuple[str, str, str]) -> Any:
    """Yields a label, and steps and curves of all seeds, for each part."""
    for label, task, maker in parts:
        runs = list(results[task].get(maker, {}).values())
        curves_of_seeds = np.asarray([x["curve"] for x in runs], float)
        length, total_steps = curves_of_seeds.shape[1], TASKS[task][0][3]
        width = max(1, length // 100)  # updates per point of a line
        shape = len(runs), length // width, width
        means = curves_of_seeds[:, : length // width * width].reshape(shape).mean(-1)
        steps = total_steps / length * width * np.arange(1, shape[1] + 1)
        yield label, {"steps": steps, "returns": means}


def plot(results: dict[str, Any], path: Path) -> None:
    """Plots both libraries in one picture, and one picture per recipe."""
    tasks = [x for x in results if TASKS[x][1]]
    with plt.style.context(curves.STYLE):
        figure, panels = plt.subplots(1, len(tasks), figsize=(13, 3.2))
        for task, axes in zip(tasks, panels, strict=True):
            pair = lines(results, ("here", task, "ours"), ("JaxMARL", task, "theirs"))
            for label, line in pair:
                curves.plot(axes, line["steps"], line["returns"], label)
            axes.set(title=task, xlabel="environment steps, thousands")
            is_won = "SMAX" in task
            axes.set_ylabel("battles won" if is_won else "return of the team")
        panels[-1].legend()
        figure.savefig(path, dpi=80)
        plt.close(figure)
    team, won = {"ylabel": "return of the team"}, {"ylabel": "battles won"}
    ends = [(x, f"IPPO, SMAX 3m{y}", "ours") for x, y in ENDINGS.items()]
    pictures = {
        "ippo": (team, [(x, f"{x}, spread", "ours") for x in ("IPPO", "MAPPO")]),
        "vdn": (team, [("VDN", "VDN, spread", "ours")]),
        "smax": ({**won, "ylim": [0, 1]}, ends),
    }
    for name, (options, parts) in pictures.items():
        data = {"lines": dict(lines(results, *parts)), **options}
        curves.draw(data, RECIPES / f"{name}.png")


def main() -> None:
    """Runs all tasks and seeds for which the file has no values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--jaxmarl", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    done = json.loads(args.file.read_text()) if args.file.exists() else {}
    for seed in range(args.seeds):
        for task in args.tasks:
            (name, changes, figure, _), script = TASKS[task]
            runs = {"ours": lambda: run_recipe(name, changes, figure, seed)}  # noqa: B023
            if script and args.jaxmarl:
                runs["theirs"] = lambda: run_script(args.jaxmarl, script, seed)  # noqa: B023
            for maker, run in runs.items():
                stored = done.setdefault(task, {}).setdefault(maker, {})
                if str(seed) not in stored:
                    stored[str(seed)] = measure(run)
                    curve = stored[str(seed)]["curve"]
                    print(task, maker, seed, f"{final_value(curve):.2f}", flush=True)
                    args.file.write_text(json.dumps(done))
    print(table(done))
    if args.plot:
        plot(done, args.plot)


if __name__ == "__main__":
    main()
