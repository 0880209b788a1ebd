"""How long does a training take, against Stable-Baselines3 and sbx?

Each run is a new process on one core. It trains a short while, which includes the
compilation, and then trains on. Reports medians of interleaved runs: CPU seconds of the
whole process with a cache of compiled programs that an earlier process has filled, and
of the second part alone. Networks and hyperparameters are equal.

    pip install ".[mujoco,train,bench]" stable-baselines3 sbx-rl
    taskset -c 0 python benchmarks/peer_trainings.py --json docs/speed.json
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from harness import run

LIBRARIES = {
    "rollout": "rollout",
    "stable_baselines3": "Stable-Baselines3",
    "sbx": "sbx",
}
START = 0.1  # of the steps with gradients, before the second part


class Task(NamedTuple):
    """A training: its environments, and the same settings for both interfaces."""

    agent: str
    env_id: str
    num_envs: int
    num_steps: int  # environment steps
    config: dict[str, Any]
    settings: dict[str, Any]


OFF_POLICY = {"batch_size": 256, "buffer_size": 100_000, "learning_starts": 1000}
TASKS = {
    "PPO, CartPole, 8 lanes": Task(
        "PPO",
        "CartPole-v1",
        8,
        51_200,
        {"num_steps": 128, "num_minibatches": 4, "num_epochs": 4, "anneal_lr": False},
        {"n_steps": 128, "batch_size": 256, "n_epochs": 4},
    ),
    "DQN, CartPole": Task(
        "DQN",
        "CartPole-v1",
        1,
        20_000,
        {
            **OFF_POLICY,
            "num_steps": 4,
            "gradient_steps": 1,
            "n_step": 1,
            "prioritized": False,
            "hidden_layer_sizes": (64, 64),
        },
        {**OFF_POLICY, "train_freq": 4, "gradient_steps": 1},
    ),
    "SAC, Pendulum": Task(
        "SAC",
        "Pendulum-v1",
        1,
        3_000,
        {**OFF_POLICY, "num_steps": 100, "hidden_layer_sizes": (256, 256)},
        OFF_POLICY,
    ),
    "TD3, Pendulum": Task(
        "TD3",
        "Pendulum-v1",
        1,
        3_000,
        {**OFF_POLICY, "num_steps": 100, "hidden_layer_sizes": (256, 256)},
        {**OFF_POLICY, "policy_kwargs": {"net_arch": [256, 256]}},
    ),
    "SAC, HalfCheetah": Task(
        "SAC",
        "HalfCheetah-v5",
        1,
        3_000,
        {**OFF_POLICY, "num_steps": 100, "hidden_layer_sizes": (256, 256)},
        OFF_POLICY,
    ),
}


def train(library: str, task: Task) -> dict[str, float]:
    """Trains in this process; returns its CPU seconds, total and of the second part."""
    # Random steps before the first gradient step, which `Agent.init` takes.
    random_steps = task.settings.get("learning_starts", 0)
    start_steps = random_steps + int(START * (task.num_steps - random_steps))
    if library == "rollout":
        import jax

        import rollout

        module = importlib.import_module(f"rollout.recipes.{task.agent.lower()}")
        rows = task.config["num_steps"] * task.num_envs
        num_updates = (task.num_steps - random_steps) // rows
        num_first = (start_steps - random_steps) // rows
        config = module.Config(num_updates=num_updates, **task.config)
        env = rollout.envs.from_gymnasium(task.env_id, task.num_envs)
        agent = getattr(module, task.agent)(env, config)
        state, _ = agent.train(agent.init(jax.random.key(0)), num_first)
        jax.block_until_ready(state)
        start = time.process_time()
        state, _ = agent.train(state, num_updates - num_first)
        jax.block_until_ready(state)
    else:
        import torch
        from stable_baselines3.common.env_util import make_vec_env

        torch.set_num_threads(1)
        env = make_vec_env(task.env_id, task.num_envs, seed=0)
        agent_class = getattr(importlib.import_module(library), task.agent)
        model = agent_class("MlpPolicy", env, device="cpu", **task.settings)
        model.learn(start_steps)
        start = time.process_time()
        model.learn(task.num_steps - start_steps, reset_num_timesteps=False)
    end = time.process_time()
    return {"total": end, "training": end - start}


def run_process(library: str, name: str, cache: str) -> dict[str, float]:
    """Runs a training in a new process."""
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, __file__, "--library", library, "--task", name]
    text = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return json.loads(text.stdout.splitlines()[-1])


def training_rows(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Trains every task with every library; the first runs fill the cache."""
    with tempfile.TemporaryDirectory() as cache:
        for name in options.tasks:
            times: dict[str, list[dict[str, float]]] = {x: [] for x in LIBRARIES}
            for index in range(options.repeats + 1):
                for library in LIBRARIES:
                    result = run_process(library, name, cache)
                    if index:
                        times[library].append(result)
            medians = {
                library: {
                    part: statistics.median(x[part] for x in runs)
                    for part in ("total", "training")
                }
                for library, runs in times.items()
            }
            ours = medians["rollout"]
            for library, label in LIBRARIES.items():
                total, training = medians[library].values()
                yield {
                    "training": name,
                    "library": label,
                    "total CPU s": f"{total:.1f}",
                    "over rollout": f"{total / ours['total']:.2f}",
                    "training CPU s": f"{training:.1f}",
                    "training over rollout": f"{training / ours['training']:.2f}",
                }


if __name__ == "__main__":
    if "--library" in sys.argv:
        print(json.dumps(train(sys.argv[2], TASKS[sys.argv[4]])))
    else:
        run(__doc__, 3, {"trainings of peers": training_rows}, tasks=tuple(TASKS))
