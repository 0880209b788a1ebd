"""How well and how fast do PPO and DQN learn: the recipes and PureJaxRL?

All programs use the settings of `TASKS` and the same versions of gymnax and brax. Every
program is compiled separately. The runs of a seed are interleaved and timed in CPU
seconds. `rollout.evaluate` runs 100 episodes with the final parameters of every run:
sampled actions for PPO, greedy actions for DQN.

    pip install ".[brax]" flashbax matplotlib optax
    git clone https://github.com/luchris429/purejaxrl
    taskset -c 0 python benchmarks/learning_compared.py docs/learning.json \\
        --purejaxrl purejaxrl/purejaxrl
    taskset -c 0 python benchmarks/learning_compared.py \\
        docs/learning_more_seeds.json \\
        --purejaxrl purejaxrl/purejaxrl --tasks "PPO CartPole" "DQN CartPole" \\
        --makers ours limit_is_failure purejaxrl --seeds 25

`taskset` restricts the process to one core: with more cores, CPU seconds include
waiting threads. Runs in the file are only repeated with `--repeat`, so an interrupted
script resumes. `docs/learning.json` also has the runs of rejax, which this script does
not repeat. Then `charts.py` draws `docs/learning.png`, and `tables.py` writes the
tables of the page.
Without `--purejaxrl`, only the recipes run.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import purejaxrl
import recipes
from harness import complete
from recipes import (
    PUREJAXRL,
    DQNSettings,
    Learner,
    LimitIsFailure,
    PPOSettings,
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
Makers = dict[str, Callable[[str, PPOSettings | DQNSettings], Learner]]


def make(
    env_id: str, config: PPOSettings | DQNSettings, *, limit_is_failure: bool = False
) -> Learner:
    """Creates the learner of a recipe with these settings."""
    env = recipes.make_env(env_id)
    env = LimitIsFailure(env) if limit_is_failure else env
    if isinstance(config, DQNSettings):
        return recipes.make_dqn(env, config)
    return recipes.make_ppo(envs.vectorize(env, config.num_envs), config)


def makers(folder: Path | None) -> Makers:
    """Returns functions that make learners, with the keys of `NAMES`."""
    fns: Makers = {"ours": make}
    if folder:
        fns["purejaxrl"] = functools.partial(purejaxrl.make_learner, folder=folder)
    fns["limit_is_failure"] = functools.partial(make, limit_is_failure=True)
    return fns


def time_call(fn: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of `fn()` and its CPU seconds, summed over all threads."""
    start = time.process_time()
    result = jax.block_until_ready(fn())
    return result, time.process_time() - start


def make_evaluator(learner: Learner, env_id: str) -> rollout.Collector:
    """Creates the collector for the evaluation of a learner."""
    env = envs.vectorize(recipes.make_env(env_id), NUM_EPISODES)
    policy = rollout.stateless_policy(learner.act)
    return rollout.Collector(env=env, policy=policy)


def run(
    task: str, maker: str, make: Callable, seed: int, programs: dict[Any, Any]
) -> dict[str, float]:
    """Trains and evaluates one seed; compiles the program of a task once."""
    (env_id, config), result = TASKS[task], dict[str, float]()
    key, eval_key = jax.random.key(seed), jax.random.key(1000 + seed)
    if (task, maker) not in programs:
        if programs and task not in next(iter(programs)):
            programs.clear()  # programs use memory maps; a process has 65,530
            jax.clear_caches()
        learner = make(env_id, config)
        lowered = jax.jit(learner.train).lower(key)
        program, result["compile"] = time_call(lowered.compile)
        programs[task, maker] = program, learner, make_evaluator(learner, env_id)
    program, learner, evaluator = programs[task, maker]
    outputs, seconds = time_call(lambda: program(key))
    params = learner.params(outputs)
    stats = rollout.evaluate(evaluator, params, eval_key, NUM_EPISODES)
    print(f"{task}, {maker} {seed}: {stats}, {seconds:.1f} s", flush=True)
    return {"return": float(stats.returns.mean), "seconds": seconds, **result}


def main() -> None:
    """Runs all tasks, seeds and programs for which the file has no values."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--purejaxrl", type=Path, help="folder with `ppo.py`")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--makers", nargs="*", choices=sorted({*NAMES} - {"rejax"}))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeat", action="store_true", help="also runs in the file")
    args = parser.parse_args()
    fns = makers(args.purejaxrl)
    programs: dict[Any, Any] = {}
    runs = []
    for task, seed in itertools.product(args.tasks, range(args.seeds)):
        for name in args.makers or fns:
            fn = functools.partial(run, task, name, fns[name], seed, programs)
            runs.append(((task, name, str(seed)), fn))
    complete(args.file, runs, args.repeat)


if __name__ == "__main__":
    main()
