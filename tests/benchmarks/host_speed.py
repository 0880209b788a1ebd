"""What does it cost to step environments of Gymnasium in this process, and in others?

Microseconds per step of 16 environments, interleaved in one process, and seen from it:

- `CartPole-v1`, in turn, against gymnasium's `SyncVectorEnv` without a copy;
- an environment that does nothing, in turn and in 1, 2 and 4 worker processes, against
  `SyncVectorEnv` and `AsyncVectorEnv`. The latter has one process per environment.

    python tests/benchmarks/host_speed.py
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from machine import machine

import envs
from envs.host.local import LocalEnvs

NUM_ENVS = 16
SEEDS, EVERY = np.arange(NUM_ENVS, dtype=np.uint32), np.ones(NUM_ENVS, bool)
OWN = {"autoreset_mode": AutoresetMode.DISABLED}


class Nothing(gymnasium.Env):
    """Does nothing."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        """Starts an episode."""
        return self.obs, {}

    def step(self, action: Any) -> tuple:
        """Takes a step."""
        return self.obs, 1.0, False, False, {}


def ours(env: Any) -> Callable[[np.ndarray], float]:
    """Makes a function that times one step, and resets what ended."""
    env.reset(SEEDS, EVERY)

    def run(action: np.ndarray) -> float:
        start = time.perf_counter()
        step = env.step(action)
        end = time.perf_counter()
        done = step.terminated | step.truncated
        if done.any():
            env.reset(SEEDS, done)
        return end - start

    return run


def theirs(env: Any) -> Callable[[np.ndarray], float]:
    """The same of a vector environment of gymnasium."""
    env.reset(seed=SEEDS.tolist())

    def run(action: np.ndarray) -> float:
        start = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(action)
        end = time.perf_counter()
        done = terminated | truncated
        if done.any():
            env.reset(seed=SEEDS.tolist(), options={"reset_mask": done})
        return end - start

    return run


def report(name: str, runs: dict[str, Callable], num_steps: int) -> None:
    """Prints the fifth percentile and the median of each."""
    times: dict[str, list[float]] = {key: [] for key in runs}
    actions = np.random.default_rng(0).integers(0, 2, (num_steps, NUM_ENVS))
    for action in actions:
        for key, run in runs.items():
            times[key].append(run(action))
    for key, values in times.items():
        low, middle = np.quantile(values, [0.05, 0.5]) * 1e6
        print(f"{name:12} {key:16} {low:7.0f} us, median {middle:7.0f} us")


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-steps", type=int, default=2000)
    num_steps = parser.parse_args().num_steps
    print(machine())
    cart_pole = [functools.partial(gymnasium.make, "CartPole-v1")] * NUM_ENVS
    runs = {
        "local": ours(LocalEnvs(cart_pole)),
        "SyncVectorEnv": theirs(SyncVectorEnv(cart_pole, copy=False, **OWN)),
    }
    report("CartPole-v1", runs, num_steps)
    nothing = [Nothing] * NUM_ENVS
    pools = {f"{n} workers": envs.workers(nothing, n) for n in (1, 2, 4)}
    vector = AsyncVectorEnv(nothing, context="forkserver", copy=False, **OWN)
    runs = {
        "local": ours(LocalEnvs(nothing)),
        "SyncVectorEnv": theirs(SyncVectorEnv(nothing, copy=False, **OWN)),
        **{name: ours(pool) for name, pool in pools.items()},
        "AsyncVectorEnv": theirs(vector),
    }
    report("nothing", runs, num_steps)
    vector.close()
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
