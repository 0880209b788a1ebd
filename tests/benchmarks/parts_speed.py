"""Where does the time of a collection go, and what does `next_obs` cost?

Times the parts of `collect_steps` with `rollout.profile`: policy, environment step,
auto-reset and recording, each compiled on its own, and the whole. `limit` is what
policy, step and recording cost alone, over the whole. Then the whole again with a
`record_fn` that leaves out `next_obs`. Random policy, 128 steps a call, every field
returned to Python, medians of calls in turn.

    python tests/benchmarks/parts_speed.py
    python tests/benchmarks/parts_speed.py --envs Acrobot-v1 --sizes 1024
"""

import argparse
import statistics
import time

import jax
from machine import machine

import rollout
from rollout import envs

ENVS = ("CartPole-v1", "Acrobot-v1", "Breakout-MinAtar")
SIZES = (128, 1024)
NUM_STEPS = 128
REPEATS = 21
PARTS = ("policy", "env_step", "auto_reset", "recording", "whole")


def without_next_obs(collector: rollout.Collector) -> rollout.Collector:
    """The same collector, which does not return `next_obs`."""
    return collector.replace(record_fn=lambda row: row.replace(next_obs=()))


def times_in_turn(*collectors: rollout.Collector) -> list[float]:
    """Seconds of a call of each collector, medians."""
    carry = collectors[0].init(jax.random.key(0))
    seconds: list[list[float]] = [[] for _ in collectors]
    for _ in range(1 + REPEATS):
        for each, collector in zip(seconds, collectors, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(collector.collect_steps(carry, None, NUM_STEPS))
            each.append(time.perf_counter() - begin)
    return [statistics.median(each[1:]) for each in seconds]


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", nargs="*", default=ENVS)
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    args = parser.parse_args()
    print(machine(), flush=True)
    print("| env | envs | policy | step | reset | recording | whole | limit | ", end="")
    print("with `next_obs` / without |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in args.envs:
        for num_envs in args.sizes:
            env = envs.make_vec(name, num_envs)
            policy = rollout.random_policy(env.action_space)
            collector = rollout.Collector(env=env, policy=policy)
            parts = rollout.profile(collector, None, NUM_STEPS, num_repeats=REPEATS)
            limit = (parts.policy + parts.env_step + parts.recording) / parts.whole
            ms = " | ".join(f"{1e3 * getattr(parts, x):.2f}" for x in PARTS)
            each, less = times_in_turn(collector, without_next_obs(collector))
            print(f"| {name} | {num_envs:,} | {ms} | {limit:.2f} | {each / less:.2f} |")


if __name__ == "__main__":
    main()
