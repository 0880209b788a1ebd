"""How many environment steps does Tianshou collect in a second?

`Collector.collect` on a `DummyVectorEnv` into a `VectorReplayBuffer`, which is emptied
before every batch of 2,000 steps as its trainer does for algorithms such as PPO. No
log-probabilities are recorded: its PPO computes them from the batch afterwards.

    pip install "tianshou==2.0.1" "gymnasium==1.4.0" "torch==2.13.0" "numpy==2.4.6"
    python tianshou_speed.py
"""

from collections.abc import Callable

import gymnasium
import timing
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


if __name__ == "__main__":
    timing.report(make_program, "tianshou")
