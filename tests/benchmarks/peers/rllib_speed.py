"""How many environment steps does RLlib collect in a second?

`SingleAgentEnvRunner.sample` in this process, without `ray.init`, on the
`SyncVectorEnv` that it makes by default and with the module of PPO. A call takes 2,000
steps or a few more, and returns episodes that hold observations, actions, rewards,
logits and log-probabilities. `--env vector_entry_point` takes Gymnasium's own CartPole
of many instead.

    pip install "ray[rllib]==2.60.0" "gymnasium==1.2.2" "torch==2.13.0" "numpy==2.4.6"
    python rllib_speed.py
"""

from collections.abc import Callable

import timing
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


if __name__ == "__main__":
    timing.report(make_program, "ray", ("sync", "vector_entry_point"))
