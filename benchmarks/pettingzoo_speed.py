"""How fast does a `HostCollector` step environments of PettingZoo?

Collects `STEPS` steps of 8 environments with random actions, in this process and in two
workers, and divides the time by the time of a plain loop, which samples actions with
NumPy and stores nothing. Tianshou's `Collector`, if it is installed, steps the same
environments in this process. It steps parallel environments in turns. Reports
microseconds per step of one environment.

    pip install ".[pettingzoo]" tianshou
    taskset -c 0,1 python benchmarks/pettingzoo_speed.py
"""

import functools
import importlib.util
import logging
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from harness import measure, run

import rollout
from rollout import agents, envs

warnings.simplefilter("ignore")
NUM_ENVS, STEPS = 8, 200


class Task(NamedTuple):
    """An environment, and how to step it in turns."""

    make: Callable[[], Any]
    make_in_turns: Callable[[], Any]
    num_turns: int  # in each step


def make_tasks() -> dict[str, Task]:
    """Returns the environments by name."""
    from mpe2 import simple_spread_v3 as spread
    from pettingzoo.classic import connect_four_v3 as four

    return {
        "simple spread, parallel": Task(spread.parallel_env, spread.env, 3),
        "connect four, in turns": Task(four.env, four.env, 1),
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


def tianshou_collection(task: Task) -> Callable[[], None]:
    """Creates a program in which Tianshou collects steps with random actions."""
    from tianshou.algorithm.multiagent.marl import MultiAgentOffPolicyAlgorithm
    from tianshou.algorithm.random import MARLRandomDiscreteMaskedOffPolicyAlgorithm
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.env.pettingzoo_env import PettingZooEnv

    logging.getLogger("tianshou").setLevel(logging.ERROR)
    num_rows = STEPS * task.num_turns * NUM_ENVS
    env = PettingZooEnv(task.make_in_turns())
    players = [
        MARLRandomDiscreteMaskedOffPolicyAlgorithm(env.action_space) for _ in env.agents
    ]
    collector = Collector(
        MultiAgentOffPolicyAlgorithm(algorithms=players, env=env),
        DummyVectorEnv([lambda: PettingZooEnv(task.make_in_turns())] * NUM_ENVS),
        VectorReplayBuffer(num_rows, NUM_ENVS),
    )
    collector.reset()

    def collect() -> None:
        collector.collect(n_step=num_rows)

    return collect


def speed_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times each environment."""
    for name, task in make_tasks().items():
        adapt = functools.partial(envs.from_pettingzoo, task.make, NUM_ENVS)
        programs = {"loop": plain_loop(task.make)}
        for label, num_workers in (("here", None), ("two workers", 2)):
            programs[label] = collection(adapt(num_workers=num_workers))
        if importlib.util.find_spec("tianshou"):
            programs["tianshou"] = tianshou_collection(task)
        timing = measure(programs, args.repeats)
        us = {x: 1e6 * y.wall / (NUM_ENVS * STEPS) for x, y in timing.items()}
        row = {
            "environment": name,
            "plain loop, us": f"{us['loop']:.0f}",
            "collector, us": f"{us['here']:.0f}",
            "collector / loop": f"{us['here'] / us['loop']:.2f}",
            "two workers, us": f"{us['two workers']:.0f}",
            "two workers / loop": f"{us['two workers'] / us['loop']:.2f}",
        }
        if "tianshou" in us:
            row["Tianshou, us"] = f"{us['tianshou']:.0f}"
            row["Tianshou / collector"] = f"{us['tianshou'] / us['here']:.2f}"
        yield row


if __name__ == "__main__":
    run(__doc__, 5, {"environments of PettingZoo": speed_rows})
