"""Do agents learn the same on four devices as on one?

Trains five seeds on one and on four virtual CPU devices, with the same settings, and
evaluates the final parameters in 100 episodes, with the most likely actions.

    pip install ".[brax,bench]" optax
    python benchmarks/devices_learning.py docs/devices_learning.json

Runs in the file are only repeated with `--repeat`.
"""

import argparse
import functools
import os
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
)

import jax
from harness import complete
from normalization import PPO_CONFIG

import rollout
from rollout import envs
from rollout.recipes import dqn, ppo, sac

HOPPER = PPO_CONFIG.replace(normalize_observations=True)
# Agent, settings, environment and number of lanes.
TASKS: dict[str, tuple[Any, Any, str, int]] = {
    "PPO, CartPole": (ppo.PPO, ppo.Config(num_updates=40), "CartPole-v1", 64),
    "PPO, Breakout": (
        ppo.PPO,
        ppo.Config(num_updates=122, learning_rate=5e-3, activation="relu"),
        "Breakout-MinAtar",
        64,
    ),
    "PPO, hopper": (ppo.PPO, HOPPER, "brax:hopper", 64),
    "DQN, CartPole": (dqn.DQN, dqn.Config(prioritized=False), "CartPole-v1", 16),
    "SAC, Pendulum": (
        sac.SAC,
        sac.Config(gradient_steps=4, num_steps=250),
        "Pendulum-v1",
        4,
    ),
}


@functools.cache
def program(name: str, num_devices: int) -> tuple[Any, Any]:
    """Makes an agent, and its training compiled for any key."""
    agent_class, config, env_id, num_envs = TASKS[name]
    options: dict[str, Any] = {}
    if env_id == "brax:hopper":
        options = {"backend": "positional"}
    env = envs.vectorize(envs.make(env_id, **options), num_envs)
    if options:
        env = envs.NormalizeReward(env, gamma=config.gamma)
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((num_devices,), ("lanes",), devices=devices)
    agent = agent_class(env, config, mesh=mesh if num_devices > 1 else None)
    return agent, jax.jit(lambda key: agent.train(agent.init(key))[0].params)


def train(name: str, num_devices: int, seed: int) -> dict[str, float]:
    """Trains and evaluates one seed."""
    agent, train = program(name, num_devices)
    params = train(jax.random.key(seed))
    greedy = agent.collector.replace(policy=agent.eval_policy)
    key = jax.random.key(1000 + seed)
    stats = rollout.evaluate(greedy, params, key, num_episodes=100)
    return {"return": float(stats.returns.mean)}


def main() -> None:
    """Trains every seed of every task, and writes the file after each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", default=[*TASKS])
    parser.add_argument("--repeat", action="store_true")
    args = parser.parse_args()
    runs = [
        (
            (name, f"{num_devices}", str(seed)),
            functools.partial(train, name, num_devices, seed),
        )
        for name in args.tasks
        for num_devices in (1, 4)
        for seed in range(args.seeds)
    ]
    complete(args.file, runs, args.repeat)


if __name__ == "__main__":
    main()
