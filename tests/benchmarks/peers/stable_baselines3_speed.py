"""How many environment steps does Stable-Baselines3 collect in a second?

`PPO.collect_rollouts` on a `DummyVecEnv`, which its guide recommends for environments
as cheap as CartPole. A rollout of 2,000 steps holds observations, actions, rewards,
values and log-probabilities, and ends with GAE, which the method always computes. The
policy has a network of its own for the values (4-64-64-1), its default.

    pip install "stable-baselines3==2.9.2" "gymnasium==1.4.0" "torch==2.13.0" \\
        "numpy==2.4.6"
    python stable_baselines3_speed.py
"""

from collections.abc import Callable

import gymnasium
import timing
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


if __name__ == "__main__":
    timing.report(make_program, "stable-baselines3")
