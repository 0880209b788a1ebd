"""How fast is evaluation of N episodes, against a fixed horizon for every env?

Times, interleaved in one process, the random policy in CartPole-v1:

- `queue`: `collect_episodes`, 1,024 episodes over 1,024 lanes;
- `evaluate`: `rollout.evaluate` of as many, which also makes the statistics;
- `horizon`: gymnax's `RolloutWrapper.batch_rollout`, 1,024 environments stepped 500
  times each, whenever their first episode ends; it returns every step;
- `horizon, return only`: the same inside a jit that reads only the returns, so that
  XLA drops the rest;

and then how busy the lanes are when 256 of them serve 4,096 episodes.

    python tests/benchmarks/episodes_speed.py
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from gymnax.experimental import RolloutWrapper
from machine import machine

import rollout
from rollout import envs

ENV_ID = "CartPole-v1"
HORIZON = 500  # steps, the time limit of CartPole-v1
MAX_STEPS = 10_000


def make_collector(num_envs: int) -> rollout.Collector:
    """Makes the collector of the random policy."""
    env = envs.make_vec(ENV_ID, num_envs)
    return rollout.Collector(env=env, policy=rollout.random_policy(env.action_space))


def make_programs(num_episodes: int, num_envs: int) -> dict[str, Callable[[], Any]]:
    """Makes what is timed; each call blocks until its result is there."""
    collector = make_collector(num_envs)
    key = jax.random.key(0)
    carry = collector.init(key)
    wrapper = RolloutWrapper(env_name=ENV_ID, num_env_steps=HORIZON)
    keys = jax.random.split(key, num_episodes)
    lean = jax.jit(lambda keys: wrapper.batch_rollout(keys, None)[-1])
    return {
        "queue": lambda: collector.collect_episodes(
            carry, None, num_episodes, max_steps=MAX_STEPS
        ),
        "evaluate": lambda: rollout.evaluate(
            collector, key, None, num_episodes, max_steps=MAX_STEPS
        ),
        "horizon": lambda: wrapper.batch_rollout(keys, None),
        "horizon, return only": lambda: lean(keys),
    }


def measure(
    programs: dict[str, Callable[[], Any]], repeats: int
) -> dict[str, dict[str, float]]:
    """Times the programs in turn; returns medians of wall and CPU time, in s."""
    wall, cpu = ({name: [] for name in programs} for _ in range(2))
    first = {}
    for name, program in programs.items():
        start = time.perf_counter()
        jax.block_until_ready(program())
        first[name] = time.perf_counter() - start
    for _ in range(repeats):
        for name, program in programs.items():
            starts = time.perf_counter(), time.process_time()
            jax.block_until_ready(program())
            wall[name].append(time.perf_counter() - starts[0])
            cpu[name].append(time.process_time() - starts[1])
    return {
        name: {
            "wall_s": statistics.median(wall[name]),
            "cpu_s": statistics.median(cpu[name]),
            "first_call_s": first[name],
        }
        for name in programs
    }


def busy_share(num_episodes: int, num_envs: int) -> float:
    """Share of the lane-steps that were not idle."""
    collector = make_collector(num_envs)
    carry = collector.init(jax.random.key(0))
    after, episodes = collector.collect_episodes(
        carry, None, num_episodes, max_steps=MAX_STEPS
    )
    return float(episodes.num_steps / ((after.step - carry.step) * num_envs))


def main() -> None:
    """Reads the command line and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    args = parser.parse_args()
    print(machine(), flush=True)
    rows = measure(make_programs(1024, 1024), args.repeats)
    print("| 1,024 episodes | wall ms | CPU ms | first call s | wall over queue |")
    print("|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['wall_s'] * 1e3:.1f} | {row['cpu_s'] * 1e3:.1f} "
            f"| {row['first_call_s']:.1f} "
            f"| {row['wall_s'] / rows['queue']['wall_s']:.2f} |"
        )
    busy = busy_share(4096, 256)
    print(
        f"\n256 lanes serve 4,096 episodes: {busy:.1%} of the lane-steps are not idle"
    )
    if args.json:
        with open(args.json, "w") as file:
            result = {"machine": machine(), "rows": rows, "busy": busy}
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
