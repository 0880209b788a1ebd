"""Do agents learn better with `Config(normalize_observations=True)`?

Trains PPO and SAC in brax's hopper with five seeds, with and without the option, and
evaluates the final parameters in 100 episodes, with the most likely actions. PPO also
runs with rewards normalized by `NormalizeReward`.

    pip install ".[brax,bench]" optax
    python benchmarks/normalization.py docs/normalization.json

Runs in the file are only repeated with `--repeat`.
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import jax
from harness import complete

import rollout
from rollout import envs
from rollout.recipes import ppo, sac

PPO_CONFIG = ppo.Config(
    num_updates=122,
    num_minibatches=32,
    learning_rate=1e-3,
    ent_coef=0.0,
)
SAC_CONFIG = sac.Config(
    num_updates=25,
    num_steps=1000,
    learning_starts=4000,
    learning_rate=3e-4,
    buffer_size=200_000,
    hidden_layer_sizes=(128, 128),
    reward_scale=1.0,
)
PROGRAMS: dict[str, Any] = {
    "PPO": (ppo.PPO, PPO_CONFIG, 32),
    "SAC": (sac.SAC, SAC_CONFIG, 4),
}


def make_env(name: str, num_envs: int, gamma: float) -> Any:
    """Makes hoppers, for PPO with normalized rewards."""
    env = envs.make_vec("brax:hopper", num_envs)
    return envs.NormalizeReward(env, gamma=gamma) if name == "PPO" else env


def train(name: str, is_normalized: bool, seed: int) -> dict[str, Any]:
    """Trains and evaluates one seed."""
    agent_class, config, num_envs = PROGRAMS[name]
    config = config.replace(normalize_observations=is_normalized)
    agent = agent_class(make_env(name, num_envs, config.gamma), config)
    program = jax.jit(lambda key: agent.train(agent.init(key)))
    program = program.lower(jax.random.key(seed)).compile()
    start = time.process_time()
    state, _ = jax.block_until_ready(program(jax.random.key(seed)))
    seconds = time.process_time() - start
    greedy = agent.collector.replace(policy=agent.eval_policy)
    stats = rollout.evaluate(greedy, state.params, jax.random.key(1000 + seed), 100)
    return {"return": float(stats.returns.mean), "seconds": seconds}


def main() -> None:
    """Trains every program with every seed, and writes the file after each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--programs", nargs="*", default=[*PROGRAMS])
    parser.add_argument("--repeat", action="store_true")
    args = parser.parse_args()
    runs = [
        (
            (f"{name}, {'normalized' if is_normalized else 'raw'}", str(seed)),
            functools.partial(train, name, is_normalized, seed),
        )
        for seed in range(args.seeds)
        for name in args.programs
        for is_normalized in (True, False)
    ]
    complete(args.file, runs, args.repeat)


if __name__ == "__main__":
    main()
