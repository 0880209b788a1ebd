"""How many environment steps does TorchRL collect in a second?

`Collector` in this process, in batches of 2,000 steps of observations, actions,
log-probabilities, rewards and next observations. Its environments, with `--env`:

- `sync`: `GymWrapper` around Gymnasium's `SyncVectorEnv`, by far the fastest;
- `serial`: `SerialEnv` of `GymEnv`;
- `parallel`: `ParallelEnv` of `GymEnv`, which is 16 more processes.

    pip install "torchrl==0.14.1" "tensordict==0.14.3" "gymnasium==1.4.0" \\
        "torch==2.13.0" "numpy==2.4.6"
    python torchrl_speed.py
"""

from collections.abc import Callable

import gymnasium
import timing
import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, GymEnv, GymWrapper, ParallelEnv, SerialEnv
from torchrl.modules import MLP, ProbabilisticActor

NUM_ENVS, NUM_STEPS = 16, 125
BATCH = NUM_ENVS * NUM_STEPS
ENVS = ("sync", "serial", "parallel")


def make_one() -> EnvBase:
    """Makes one environment."""
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_env(kind: str) -> EnvBase:
    """Makes all of them."""
    if kind == "serial":
        return SerialEnv(NUM_ENVS, make_one)
    if kind == "parallel":
        # The default, "spawn", imports PyTorch in every process.
        return ParallelEnv(NUM_ENVS, make_one, mp_start_method="fork")
    # `GymWrapper` refuses Gymnasium's default mode, and prefers this one.
    env = gymnasium.make_vec(
        "CartPole-v1",
        NUM_ENVS,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED},
    )
    return GymWrapper(env, categorical_action_encoding=True)


def make_program(kind: str) -> Callable[[], int]:
    """Makes a call that collects a batch and says how many steps it has."""
    env = make_env(kind)
    network = MLP(
        in_features=4,
        out_features=2,
        num_cells=[64, 64],
        activation_class=torch.nn.Tanh,
    )
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

    def collect() -> int:
        return next(batches).numel()

    return collect


if __name__ == "__main__":
    timing.report(make_program, "torchrl", ENVS)
