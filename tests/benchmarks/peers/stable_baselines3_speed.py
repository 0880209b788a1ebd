"""How many environment steps does Stable-Baselines3 collect in a second?

`PPO.collect_rollouts` on a `DummyVecEnv`, which its guide recommends for environments
as cheap as CartPole. A rollout of 2,000 steps holds observations, actions, rewards,
values and log-probabilities, and ends with GAE, which the method always computes. The
policy has a network of its own for the values (4-64-64-1), its default.

    pip install "stable-baselines3==2.9.2" "gymnasium==1.4.0" "torch==2.13.0" \\
        "numpy==2.4.6"
    python stable_baselines3_speed.py
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib import metadata

import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

NUM_ENVS, NUM_STEPS = 16, 125
BATCH = NUM_ENVS * NUM_STEPS


def make_env() -> gymnasium.Env:
    """Makes one environment, without the checks of the first step."""
    return gymnasium.make("CartPole-v1", disable_env_checker=True)


def make_program() -> Callable[[], int]:
    """Makes a call that collects a batch and says how many steps it has."""
    model = PPO(
        "MlpPolicy",
        DummyVecEnv([make_env] * NUM_ENVS),
        n_steps=NUM_STEPS,
        batch_size=BATCH,
        policy_kwargs={"net_arch": [64, 64], "activation_fn": torch.nn.Tanh},
        device="cpu",
        seed=0,
    )
    # What `learn` does before its first rollout.
    _, callback = model._setup_learn(total_timesteps=10**9, callback=None)

    def collect() -> int:
        before = model.num_timesteps
        model.collect_rollouts(model.env, callback, model.rollout_buffer, NUM_STEPS)
        return model.num_timesteps - before

    return collect


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--warmup", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    # More threads are slower: the network is tiny.
    torch.set_num_threads(args.threads)
    collect = make_program()
    run(collect, args.warmup)
    taken, num_steps = [], 0
    for _ in range(args.repeats):
        start = time.perf_counter()
        num_steps = run(collect, args.steps)
        taken.append(time.perf_counter() - start)
    result = {
        "peer": "stable_baselines3",
        "version": metadata.version("stable-baselines3"),
        "gymnasium": gymnasium.__version__,
        "torch": torch.__version__,
        "num_envs": NUM_ENVS,
        "steps": num_steps,
        "seconds": [round(x, 4) for x in taken],
        "steps_per_second": round(num_steps / statistics.median(taken)),
    }
    print(json.dumps(result))


def run(collect: Callable[[], int], num_steps: int) -> int:
    """Collects batches until there are so many steps."""
    collected = 0
    while collected < num_steps:
        collected += collect()
    return collected


if __name__ == "__main__":
    main()
