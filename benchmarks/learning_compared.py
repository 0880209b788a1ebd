"""How well and how fast do PPO and DQN learn: the recipes, PureJaxRL and rejax?

All programs use the settings of `TASKS` and the same versions of gymnax and brax. Every
program is compiled separately. The runs of a seed are interleaved and timed in CPU
seconds. `rollout.evaluate` runs 100 episodes with the final parameters of every run:
sampled actions for PPO, greedy actions for DQN.

    pip install ".[brax]" flashbax matplotlib optax rejax==0.1.3
    git clone https://github.com/luchris429/purejaxrl
    taskset -c 0 python benchmarks/learning_compared.py docs/learning.json \\
        --purejaxrl purejaxrl/purejaxrl --plot docs/learning.png
    taskset -c 0 python benchmarks/learning_compared.py \\
        docs/learning_more_seeds.json \\
        --purejaxrl purejaxrl/purejaxrl --tasks "PPO CartPole" "DQN CartPole" \\
        --makers ours limit_is_failure purejaxrl --seeds 25

`taskset` restricts the process to one core: with more cores, CPU seconds include
waiting threads. Values in the file are not recomputed, so an interrupted run resumes.
Without `--purejaxrl`, only the recipes and rejax run.
"""

import argparse
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import learners_of_peers
import numpy as np
import recipes
from harness import machine
from recipes import (
    PUREJAXRL,
    DQNSettings,
    Learner,
    LimitIsFailure,
    PPOSettings,
    total_steps,
)

import rollout
from rollout import envs

NUM_EPISODES = 100
MINATAR = PUREJAXRL.replace(  # as in PureJaxRL's MinAtar notebook
    num_updates=122, num_minibatches=8, learning_rate=5e-3, activation="relu"
)
ROBOT = PUREJAXRL.replace(
    num_updates=196,
    num_envs=16,
    num_minibatches=8,
    learning_rate=3e-4,
    ent_coef=0.0,
    hidden_layer_sizes=(256, 256),
)
CLASSIC = PUREJAXRL.replace(num_updates=976, num_envs=4)
Task = tuple[str, PPOSettings | DQNSettings]
TASKS: dict[str, Task] = {
    "PPO CartPole": ("CartPole-v1", CLASSIC),
    "PPO Acrobot": ("Acrobot-v1", CLASSIC),
    "DQN CartPole": ("CartPole-v1", DQNSettings(25_000)),
    "DQN Acrobot": ("Acrobot-v1", DQNSettings(25_000)),
    "PPO inverted pendulum": ("brax:inverted_pendulum", ROBOT),
    "PPO Breakout": ("Breakout-MinAtar", MINATAR),
    "PPO Space Invaders": ("SpaceInvaders-MinAtar", MINATAR),
    "DQN Breakout": ("Breakout-MinAtar", DQNSettings(25_000)),
    "DQN Space Invaders": ("SpaceInvaders-MinAtar", DQNSettings(25_000)),
}
NAMES = {
    "ours": "rollout",
    "purejaxrl": "PureJaxRL",
    "rejax": "rejax",
    "limit_is_failure": "rollout, limits as failures",
}
COLORS = {"ours": "#0072B2", "purejaxrl": "#D55E00", "rejax": "#009E73"}
Makers = dict[str, Callable[[str, PPOSettings | DQNSettings], Learner]]


def make(
    env_id: str, config: PPOSettings | DQNSettings, *, limit_is_failure: bool = False
) -> Learner:
    """Makes the learner of a recipe with these settings."""
    env = recipes.make_env(env_id)
    env = LimitIsFailure(env) if limit_is_failure else env
    if isinstance(config, DQNSettings):
        return recipes.make_dqn(env, config)
    return recipes.make_ppo(envs.vectorize(env, config.num_envs), config)


def makers(folder: Path | None) -> Makers:
    """Returns functions that make learners, with the keys of `NAMES`."""
    fns: Makers = {"ours": make, "rejax": learners_of_peers.make_rejax}
    if folder:
        fns["purejaxrl"] = functools.partial(
            learners_of_peers.make_purejaxrl, folder=folder
        )
    fns["limit_is_failure"] = functools.partial(make, limit_is_failure=True)
    return fns


def time_call(fn: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of `fn()` and its CPU seconds, summed over all threads."""
    start = time.process_time()
    result = jax.block_until_ready(fn())
    return result, time.process_time() - start


def make_evaluator(learner: Learner, env_id: str) -> rollout.Collector:
    """Makes the collector for the evaluation of a learner."""
    env = envs.vectorize(recipes.make_env(env_id), NUM_EPISODES)
    policy = rollout.stateless_policy(learner.act)
    return rollout.Collector(env=env, policy=policy)


def run(
    task: Task,
    fns: Makers,
    num_seeds: int,
    done: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Trains every seed with every maker; adds values to `done` and saves them."""
    jax.clear_caches()  # programs use memory maps; a process is limited to 65,530
    programs, learners, evaluators = {}, {}, {}
    for seed in range(num_seeds):
        for name, make in fns.items():
            values = done.setdefault(
                name, {"compile": None, "returns": {}, "seconds": {}}
            )
            if str(seed) in values["returns"]:
                continue
            key, eval_key = jax.random.key(seed), jax.random.key(1000 + seed)
            if name not in programs:
                learner = learners[name] = make(*task)
                evaluators[name] = make_evaluator(learner, task[0])
                lowered = jax.jit(learner.train).lower(key)
                programs[name], values["compile"] = time_call(lowered.compile)
            program = functools.partial(programs[name], key)
            result, seconds = time_call(program)
            params = learners[name].params(result)
            stats = rollout.evaluate(evaluators[name], params, eval_key, NUM_EPISODES)
            values["seconds"][str(seed)] = seconds
            values["returns"][str(seed)] = float(stats.returns.mean)
            print(f"  {name} {seed}: {stats}, {seconds:.1f} s", flush=True)
            save()


def interval(values: dict[str, float]) -> tuple[float, float]:
    """Returns the mean over seeds and half of its 95 % interval."""
    samples = list(values.values())
    if len(samples) < 2:
        return samples[0], math.nan
    mean, _, high = rollout.stats.mean_interval(np.array(samples))
    return float(mean), float(high - mean)


def table(results: dict[str, Any]) -> str:
    """Formats the table of mean returns for the page; the plot also shows the time."""
    names = [x for x in COLORS if any(x in values for values in results.values())]
    heads = [NAMES[x] for x in names]
    lines = [f"| | steps | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for task, values in results.items():
        cells = [_cell(values, x, "returns") for x in names]
        steps = f"{total_steps(TASKS[task][1]):,}"
        lines.append(f"| {task} | {steps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_endings(results: dict[str, Any]) -> str:
    """Formats the table of returns with and without time limits treated as failures."""
    names = "ours", "limit_is_failure", "purejaxrl"
    lines = [f"| | seeds | {' | '.join(NAMES[x] for x in names)} |", "|---" * 5 + "|"]
    for task, values in results.items():
        if all(x in values for x in names):
            cells = [_cell(values, x, "returns") for x in names]
            seeds = len(values["ours"]["returns"])
            lines.append(f"| {task} | {seeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: dict[str, Any], name: str, field: str) -> str:
    """Formats the mean and half of its interval with non-breaking spaces."""
    if name not in values:
        return ""
    text = "{:.1f} ± {:.1f}".format(*interval(values[name][field]))
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def draw(results: dict[str, Any], path: Path) -> None:
    """Plots the return of every seed over its CPU seconds, one panel per task."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    num_rows = -(-len(results) // 3)
    figure, grid = plt.subplots(
        num_rows, 3, figsize=(9, 2.4 * num_rows), layout="constrained", squeeze=False
    )
    for axes, (task, by_maker) in zip(grid.flat, results.items(), strict=False):
        for name, color in COLORS.items():
            if name not in by_maker:
                continue
            values = by_maker[name]
            x, y = values["seconds"], values["returns"]
            axes.plot(list(x.values()), list(y.values()), "o", color=color, alpha=0.35)
            (mid_x, half_x), (mid_y, half_y) = interval(x), interval(y)
            style = {"color": color, "linewidth": 1.5, "label": NAMES[name]}
            axes.errorbar(mid_x, mid_y, half_y, half_x, "s", markersize=6, **style)
        axes.set_title(task, fontsize=10)
        axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid.flat[len(results) :]:
        axes.set_visible(False)
    figure.supxlabel("CPU seconds of a training", fontsize=10)
    figure.supylabel("mean return of 100 episodes", fontsize=10)
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150, facecolor="white")


def main() -> None:
    """Parses the options, trains, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("values", type=Path, help="JSON file with all values")
    parser.add_argument("--purejaxrl", type=Path, help="folder with `ppo.py`")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--makers", nargs="*", choices=list(NAMES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="file for the plot")
    args = parser.parse_args()
    stored = {"machine": machine(), "results": {}}
    if args.values.exists():
        stored = json.loads(args.values.read_text())
    print(stored["machine"], flush=True)

    def save() -> None:
        args.values.write_text(json.dumps(stored, indent=1) + "\n")

    fns = makers(args.purejaxrl)
    if args.makers:
        fns = {name: fns[name] for name in args.makers}
    for task in args.tasks:
        print(task, flush=True)
        done = stored["results"].setdefault(task, {})
        run(TASKS[task], fns, args.seeds, done, save)
    print(table(stored["results"]))
    print(table_of_endings(stored["results"]))
    if args.plot:
        draw(stored["results"], args.plot)


if __name__ == "__main__":
    main()
