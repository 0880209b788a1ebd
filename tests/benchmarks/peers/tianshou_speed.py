"""How many environment steps does Tianshou collect in a second?

`Collector.collect` on a `DummyVectorEnv` into a `VectorReplayBuffer`, which is emptied
before every batch of 2,000 steps as its trainer does for algorithms such as PPO. No
log-probabilities are recorded: its PPO computes them from the batch afterwards.

    pip install "tianshou==2.0.1" "gymnasium==1.4.0" "torch==2.13.0" "numpy==2.4.6"
    python tianshou_speed.py
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib import metadata

import gymnasium
import torch
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor
from tianshou.utils.torch_utils import policy_within_training_step

NUM_ENVS, NUM_STEPS = 16, 125
BATCH = NUM_ENVS * NUM_STEPS


def make_env() -> gymnasium.Env:
    """Makes one environment, without the checks of the first step."""
    return gymnasium.make("CartPole-v1", disable_env_checker=True)


def make_program() -> Callable[[], int]:
    """Makes a call that collects a batch and says how many steps it has."""
    env = DummyVectorEnv([make_env] * NUM_ENVS)
    env.seed(0)
    network = Net(state_shape=(4,), hidden_sizes=(64, 64), activation=torch.nn.Tanh)
    actor = DiscreteActor(preprocess_net=network, action_shape=2, softmax_output=False)
    policy = DiscreteActorPolicy(actor=actor, action_space=gymnasium.spaces.Discrete(2))
    buffer = VectorReplayBuffer(total_size=BATCH, buffer_num=NUM_ENVS)
    collector = Collector(policy, env, buffer)
    collector.reset()

    # The trainer does not switch gradients off; doing so is faster by a few percent.
    @torch.no_grad()
    def collect() -> int:
        collector.reset_buffer(keep_statistics=True)
        with policy_within_training_step(policy):
            return collector.collect(n_step=BATCH).n_collected_steps

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
        "peer": "tianshou",
        "version": metadata.version("tianshou"),
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
