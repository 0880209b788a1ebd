"""How fast does a `HostCollector` step environments of PettingZoo?

Collects `STEPS` steps of 8 environments with random actions, in this process and in two
workers, and divides the CPU time by that of a plain loop, which samples actions with
NumPy and stores nothing. Reports microseconds per step of one environment.

    pip install ".[pettingzoo]"
    taskset -c 0,1 python benchmarks/pettingzoo_speed.py
"""

import functools
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from harness import measure, run

import rollout
from rollout import agents, envs

warnings.simplefilter("ignore")
NUM_ENVS, STEPS = 8, 200


def makers() -> dict[str, Callable[[], Any]]:
    """Returns the functions that create an environment, by name."""
    from mpe2 import simple_spread_v3
    from pettingzoo.classic import connect_four_v3

    return {
        "simple spread, parallel": simple_spread_v3.parallel_env,
        "connect four, in turns": connect_four_v3.env,
    }


def plain_loop(make: Callable[[], Any]) -> Callable[[], None]:
    """Creates a program that steps the environments with random actions."""
    members, rng = [make() for _ in range(NUM_ENVS)], np.random.default_rng(0)
    is_parallel = not hasattr(members[0], "last")
    for number, env in enumerate(members):
        env.reset(seed=number)
    sizes = {x: members[0].action_space(x).n for x in members[0].possible_agents}

    def step_all() -> None:
        for env in members:
            env.step({agent: rng.integers(sizes[agent]) for agent in env.agents})
            if not env.agents:
                env.reset(seed=int(rng.integers(2**31)))

    def take_turn(env: Any) -> None:
        while True:
            obs, _, terminated, truncated, _ = env.last()
            if not (terminated or truncated):
                break
            env.step(None)
            if not env.agents:
                env.reset(seed=int(rng.integers(2**31)))
        env.step(rng.choice(np.flatnonzero(obs["action_mask"])))

    def loop() -> None:
        for _ in range(STEPS):
            if is_parallel:
                step_all()
            else:
                for env in members:
                    take_turn(env)

    return loop


def collection(env: Any) -> Callable[[], Any]:
    """Creates a program that collects steps with random actions."""
    policy = agents.random_policy_map(env)
    collector = rollout.HostCollector(env=env, policy=policy)
    params = dict.fromkeys(env.groups)
    carry = collector.init(jax.random.key(0))

    def collect() -> Any:
        nonlocal carry
        carry, trajectory = collector.collect_steps(carry, params, STEPS)
        return trajectory.reward

    return collect


def speed_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times each environment."""
    for name, make in makers().items():
        adapt = functools.partial(envs.from_pettingzoo, make, NUM_ENVS)
        programs = {"loop": plain_loop(make)}
        for label, num_workers in (("here", None), ("two workers", 2)):
            programs[label] = collection(adapt(num_workers=num_workers))
        timing = measure(programs, args.repeats)
        us = {x: 1e6 * y.wall / (NUM_ENVS * STEPS) for x, y in timing.items()}
        yield {
            "environment": name,
            "plain loop, us": f"{us['loop']:.0f}",
            "collector, us": f"{us['here']:.0f}",
            "collector / loop": f"{us['here'] / us['loop']:.2f}",
            "two workers, us": f"{us['two workers']:.0f}",
            "two workers / loop": f"{us['two workers'] / us['loop']:.2f}",
        }


if __name__ == "__main__":
    run(__doc__, 5, {"pettingzoo": speed_rows})
