"""How many environment steps does RLlib collect in a second?

`SingleAgentEnvRunner.sample` in this process, without `ray.init`, on the
`SyncVectorEnv` that it makes by default and with the module of PPO. A call takes 2,000
steps or a few more, and returns episodes that hold observations, actions, rewards,
logits and log-probabilities. `--mode vector_entry_point` takes Gymnasium's own CartPole
of many instead.

    pip install "ray[rllib]==2.60.0" "gymnasium==1.2.2" "torch==2.13.0" "numpy==2.4.6"
    python rllib_speed.py
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib import metadata

import gymnasium
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

NUM_ENVS, NUM_STEPS = 16, 125
BATCH = NUM_ENVS * NUM_STEPS


def make_program(mode: str) -> Callable[[], int]:
    """Makes a call that collects a batch and says how many steps it has."""
    model = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh")
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=NUM_ENVS,
            gym_env_vectorize_mode=mode,
        )
        .rl_module(model_config=model)
        .debugging(seed=0)
    )
    runner = SingleAgentEnvRunner(config=config)

    def collect() -> int:
        episodes = runner.sample(num_timesteps=BATCH)
        runner.get_metrics()  # as the algorithm does; they pile up otherwise
        return sum(len(episode) for episode in episodes)

    return collect


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--warmup", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--mode", default="sync", choices=("sync", "vector_entry_point")
    )
    args = parser.parse_args()
    # More threads are slower: the network is tiny.
    torch.set_num_threads(args.threads)
    collect = make_program(args.mode)
    run(collect, args.warmup)
    taken, num_steps = [], 0
    for _ in range(args.repeats):
        start = time.perf_counter()
        num_steps = run(collect, args.steps)
        taken.append(time.perf_counter() - start)
    result = {
        "peer": "rllib",
        "version": metadata.version("ray"),
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
