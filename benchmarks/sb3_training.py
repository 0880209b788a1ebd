"""How fast is PPO in Gymnasium's CartPole, against sbx and Stable-Baselines3?

All programs have eight environments in one process, the settings of `SETTINGS`, and
separate networks of two layers of 64. Each run is a new process on one core: two
updates, timed as the start, then 98 updates, timed per update. Afterwards 100 episodes
are played with sampled actions. The runs of a seed follow one another.

    pip install "sbx-rl==0.28.0" "torch==2.13.0"  # in another virtual environment
    taskset -c 0 python benchmarks/sb3_training.py --python /path/to/its/python
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

NUM_ENVS, NUM_STEPS, NUM_EPOCHS, BATCH_SIZE = 8, 128, 10, 64
START, UPDATES = 2, 98
PROGRAMS = {"rollout": "rollout", "sbx": "sbx", "stable_baselines3": "SB3"}


def timed(fn: Any, *args: Any) -> tuple[Any, float, float]:
    """Calls a function; returns its result, CPU seconds and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = fn(*args)
    return result, time.process_time() - cpu, time.perf_counter() - wall


def ours(seed: int) -> dict[str, float]:
    """Trains `rollout.recipes.ppo`."""
    import jax

    import rollout
    from rollout.recipes.ppo import PPO, Config

    config = Config(
        num_updates=START + UPDATES,
        num_steps=NUM_STEPS,
        num_epochs=NUM_EPOCHS,
        num_minibatches=NUM_ENVS * NUM_STEPS // BATCH_SIZE,
        learning_rate=3e-4,
        anneal_lr=False,
        vf_coef=1.0,  # Stable-Baselines3 has no factor of 0.5
        ent_coef=0.0,
    )
    env = rollout.envs.from_gymnasium("CartPole-v1", num_envs=NUM_ENVS)
    agent = PPO(env, config)

    def start() -> Any:
        state = agent.init(jax.random.key(seed))
        return jax.block_until_ready(agent.train(state, START))[0]

    def train(state: Any) -> Any:
        return jax.block_until_ready(agent.train(state, UPDATES))[0]

    state, start_cpu, _ = timed(start)
    state, cpu, wall = timed(train, state)
    collector = agent.freeze(state).collector
    stats = rollout.evaluate(collector, state.params, jax.random.key(1000 + seed), 100)
    returns = float(stats.returns.mean)
    return {"start": start_cpu, "cpu": cpu, "wall": wall, "return": returns}


def theirs(library: str, seed: int) -> dict[str, float]:
    """Trains PPO of sbx or of Stable-Baselines3."""
    import importlib

    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    env = make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=seed)
    settings = {"n_steps": NUM_STEPS, "n_epochs": NUM_EPOCHS, "batch_size": BATCH_SIZE}
    rows = NUM_ENVS * NUM_STEPS

    def start() -> Any:
        ppo = importlib.import_module(library).PPO
        model = ppo("MlpPolicy", env, seed=seed, device="cpu", **settings)
        return model.learn(START * rows)

    def train(model: Any) -> Any:
        return model.learn(UPDATES * rows, reset_num_timesteps=False)

    model, start_cpu, _ = timed(start)
    model, cpu, wall = timed(train, model)
    assert model.num_timesteps == (START + UPDATES) * rows
    env = make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=1000 + seed)
    returns, _ = evaluate_policy(model, env, 100, deterministic=False)
    return {"start": start_cpu, "cpu": cpu, "wall": wall, "return": float(returns)}


def main() -> None:
    """Runs one program, or all programs with five seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", nargs="?", choices=list(PROGRAMS))
    parser.add_argument("--python", help="with sbx and Stable-Baselines3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    if args.program:
        fn = ours if args.program == "rollout" else theirs
        inputs = (args.seed,) if fn is ours else (args.program, args.seed)
        print(json.dumps(fn(*inputs)))
        return
    results: dict[str, list[dict[str, float]]] = {x: [] for x in PROGRAMS}
    for seed in range(args.seeds):
        for name in PROGRAMS:
            python = sys.executable if name == "rollout" else args.python
            command = [python, __file__, name, "--seed", str(seed)]
            text = subprocess.run(command, check=True, capture_output=True, text=True)
            results[name].append(json.loads(text.stdout.splitlines()[-1]))
            print(name, seed, results[name][-1], flush=True)
    for name, runs in results.items():
        median = {x: statistics.median(r[x] for r in runs) for x in runs[0]}
        update = {x: 1000 * median[x] / UPDATES for x in ("cpu", "wall")}
        returns = [r["return"] for r in runs]
        print(name, f"start {median['start']:.1f} CPU s, update", update, returns)


if __name__ == "__main__":
    main()
