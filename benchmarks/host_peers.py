"""How many environment steps do other libraries collect per second?

Each library needs a separate virtual environment. It collects batches of 2,000 steps
of 16 CartPoles with a PyTorch policy of two layers of 64. Prints one line of JSON.

- `tianshou`: `Collector.collect` on a `DummyVectorEnv` into a `VectorReplayBuffer`,
  emptied before every batch, as the trainer does for algorithms such as PPO. No
  log-probabilities are recorded: Tianshou's PPO computes them later from the batch.
- `torchrl`: `Collector` of observations, actions, log-probabilities, rewards and next
  observations, on `GymWrapper` around Gymnasium's `SyncVectorEnv`, its fastest option.
- `stable_baselines3`: `PPO.collect_rollouts` on a `DummyVecEnv`, which its guide
  recommends for environments as cheap as CartPole. A rollout contains observations,
  actions, rewards, values and log-probabilities. The method always computes GAE. By
  default the critic is a separate network (4-64-64-1).
- `rllib`: `SingleAgentEnvRunner.sample` without `ray.init`, on the default
  `SyncVectorEnv` and with the module of PPO; episodes contain observations, actions,
  rewards, logits and log-probabilities.

    pip install "tianshou==2.0.1" "gymnasium==1.4.0" "torch==2.13.0" "numpy==2.4.6"
    pip install "torchrl==0.14.1" "tensordict==0.14.3" "gymnasium==1.4.0" \\
        "torch==2.13.0" "numpy==2.4.6"
    pip install "stable-baselines3==2.9.2" "gymnasium==1.4.0" "torch==2.13.0" \\
        "numpy==2.4.6"
    pip install "ray[rllib]==2.60.0" "gymnasium==1.2.2" "torch==2.13.0" "numpy==2.4.6"
    python host_peers.py tianshou
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib import metadata

import gymnasium
import torch

NUM_ENVS, NUM_STEPS = 16, 125
BATCH = NUM_ENVS * NUM_STEPS


def make_env() -> gymnasium.Env:
    """Makes a single environment without the checks of the first step."""
    return gymnasium.make("CartPole-v1", disable_env_checker=True)


def tianshou() -> Callable[[], int]:
    """Makes a function that collects a batch and returns its number of steps."""
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import DiscreteActor
    from tianshou.utils.torch_utils import policy_within_training_step

    env = DummyVectorEnv([make_env] * NUM_ENVS)
    env.seed(0)
    network = Net(state_shape=(4,), hidden_sizes=(64, 64), activation=torch.nn.Tanh)
    actor = DiscreteActor(preprocess_net=network, action_shape=2, softmax_output=False)
    policy = DiscreteActorPolicy(actor=actor, action_space=gymnasium.spaces.Discrete(2))
    buffer = VectorReplayBuffer(total_size=BATCH, buffer_num=NUM_ENVS)
    collector = Collector(policy, env, buffer)
    collector.reset()

    # The trainer does not disable gradients; `no_grad` is a few percent faster.
    @torch.no_grad()
    def collect() -> int:
        collector.reset_buffer(keep_statistics=True)
        with policy_within_training_step(policy):
            return collector.collect(n_step=BATCH).n_collected_steps

    return collect


def torchrl() -> Callable[[], int]:
    """Makes a function that collects a batch and returns its number of steps."""
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.envs import GymWrapper
    from torchrl.modules import MLP, ProbabilisticActor

    # `GymWrapper` rejects Gymnasium's default mode and recommends `DISABLED`.
    mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    options = {"vectorization_mode": "sync", "vector_kwargs": mode}
    vector_env = gymnasium.make_vec("CartPole-v1", NUM_ENVS, **options)
    env = GymWrapper(vector_env, categorical_action_encoding=True)
    sizes = {"in_features": 4, "out_features": 2, "num_cells": [64, 64]}
    network = MLP(**sizes, activation_class=torch.nn.Tanh)
    policy = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        spec=env.action_spec,
    )
    collector = Collector(
        env,
        policy,
        frames_per_batch=BATCH,
        track_traj_ids=False,  # faster than the default
        auto_register_policy_transforms=False,
    )
    batches = iter(collector)
    return lambda: next(batches).numel()


def stable_baselines3() -> Callable[[], int]:
    """Makes a function that collects a batch and returns its number of steps."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    model = PPO(
        "MlpPolicy",
        DummyVecEnv([make_env] * NUM_ENVS),
        n_steps=NUM_STEPS,
        batch_size=BATCH,
        policy_kwargs={"net_arch": [64, 64], "activation_fn": torch.nn.Tanh},
        device="cpu",
        seed=0,
    )
    # `learn` calls this before its first rollout.
    _, callback = model._setup_learn(total_timesteps=10**9, callback=None)

    def collect() -> int:
        num_collected = model.num_timesteps
        model.collect_rollouts(model.env, callback, model.rollout_buffer, NUM_STEPS)
        return model.num_timesteps - num_collected

    return collect


def rllib() -> Callable[[], int]:
    """Makes a function that collects a batch and returns its number of steps."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    model = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh")
    config = PPOConfig().environment("CartPole-v1").rl_module(model_config=model)
    config = config.env_runners(num_env_runners=0, num_envs_per_env_runner=NUM_ENVS)
    runner = SingleAgentEnvRunner(config=config.debugging(seed=0))

    def collect() -> int:
        episodes = runner.sample(num_timesteps=BATCH)
        runner.get_metrics()  # as the algorithm does; otherwise metrics accumulate
        return sum(len(episode) for episode in episodes)

    return collect


LIBRARIES = {
    "tianshou": ("Tianshou", "tianshou", tianshou),
    "torchrl": ("TorchRL", "torchrl", torchrl),
    "stable_baselines3": ("Stable-Baselines3", "stable-baselines3", stable_baselines3),
    "rllib": ("RLlib", "ray", rllib),
}


def run(collect: Callable[[], int], num_steps: int) -> float:
    """Collects batches for at least `num_steps` steps; returns steps per second."""
    start, collected = time.perf_counter(), 0
    while collected < num_steps:
        collected += collect()
    return collected / (time.perf_counter() - start)


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads are slower: the network is tiny
    name, package, make_collect = LIBRARIES[args.library]
    collect = make_collect()
    run(collect, BATCH)
    rate = statistics.median(run(collect, 20_000) for _ in range(args.repeats))
    version = metadata.version(package)
    result = {"library": name, "version": version, "steps_per_second": round(rate)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
