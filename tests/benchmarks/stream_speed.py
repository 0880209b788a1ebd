"""What does a stream cost, and what do its options bring?

Times, interleaved in one process, with 1,024 environments and 128 steps of each:

- `ahead`: CartPole-v1, a delay on the host per batch that is as long as a collection;
  `prefetch=1` over `prefetch=0`;
- `recycle`: Breakout-MinAtar; `recycle=False` over `recycle=True`;
- `overhead`: CartPole-v1; the stream, with and without `recycle`, over a bare loop of
  one jitted function that collects and summarizes, and over one that only collects.
  Eight batches at a time, since a stream's statistics are made while the next batch
  begins: those of a batch are waited for with the next one;
- `check_finite`: both; with it over without.

    python tests/benchmarks/stream_speed.py
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from machine import machine

import rollout
from rollout import envs

NUM_ENVS, NUM_STEPS = 1024, 128
BATCH = NUM_ENVS * NUM_STEPS


def make_collector(env_id: str) -> rollout.Collector:
    """Makes the collector of the random policy."""
    env = envs.make_vec(env_id, NUM_ENVS)
    return rollout.Collector(env=env, policy=rollout.random_policy(env.action_space))


def make_stream(env_id: str, **options: Any) -> Callable[[], Any]:
    """Makes a call that takes the next batch and waits for it."""
    collector = make_collector(env_id)
    options = {"key": jax.random.key(0), "steps_per_batch": BATCH, **options}
    stream = rollout.Stream(collector, **options)
    stats: Any = ()

    def step() -> None:
        nonlocal stats
        batch = next(stream)
        jax.block_until_ready((batch.trajectory, stats))
        stats = batch.stats

    return step


def make_bare(env_id: str, *, summarize: bool) -> Callable[[], Any]:
    """Makes a call of the loop that everyone writes around `collect_steps`."""
    collector = make_collector(env_id)
    carry = collector.init(jax.random.key(0))

    @jax.jit
    def collect(carry: rollout.Carry) -> Any:
        carry, trajectory = collector.collect_steps(carry, None, NUM_STEPS)
        stats = rollout.summarize(trajectory) if summarize else ()
        return carry, trajectory, stats

    def step() -> None:
        nonlocal carry
        carry, trajectory, stats = collect(carry)
        jax.block_until_ready((trajectory, stats))

    return step


def measure(
    programs: dict[str, Callable[[], Any]], repeats: int, *, in_a_row: int = 1
) -> dict[str, float]:
    """Times the programs in turn; returns medians of wall time of one call, in s."""
    for program in programs.values():
        for _ in range(4):  # a stream finds its pace
            program()
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            for _ in range(in_a_row):
                program()
            times[name].append((time.perf_counter() - start) / in_a_row)
    return {name: statistics.median(taken) for name, taken in times.items()}


def measure_ahead(repeats: int) -> dict[str, float]:
    """Times a loop whose own work takes as long as a collection."""
    env_id = "CartPole-v1"
    steps_per_batch = 16 * BATCH  # a delay of some 0.1 s is kept well by `sleep`
    streams = {
        f"prefetch={prefetch}": make_stream(
            env_id, prefetch=prefetch, steps_per_batch=steps_per_batch
        )
        for prefetch in (0, 1)
    }
    alone = measure({"collection": streams["prefetch=0"]}, repeats)["collection"]

    def work(collect: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> None:
            collect()
            time.sleep(alone)

        return step

    times = measure({name: work(step) for name, step in streams.items()}, repeats)
    return {"collection": alone, **times}


def main() -> None:
    """Reads the command line and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    args = parser.parse_args()
    print(machine(), flush=True)
    kinds = {
        "ahead": lambda: measure_ahead(args.repeats),
        "recycle": lambda: measure(
            {
                f"recycle={recycle}": make_stream("Breakout-MinAtar", recycle=recycle)
                for recycle in (False, True)
            },
            args.repeats,
        ),
        "overhead": lambda: measure(
            {
                "collect and summarize": make_bare("CartPole-v1", summarize=True),
                "recycle": make_stream("CartPole-v1", recycle=True),
                "collect": make_bare("CartPole-v1", summarize=False),
                "stream": make_stream("CartPole-v1"),
            },
            args.repeats,
            in_a_row=8,
        ),
        **{
            f"check_finite {env_id}": lambda env_id=env_id: measure(
                {
                    f"check_finite={flag}": make_stream(env_id, check_finite=flag)
                    for flag in (False, True)
                },
                4 * args.repeats if env_id == "CartPole-v1" else args.repeats,
            )
            for env_id in ("CartPole-v1", "Breakout-MinAtar")
        },
    }
    rows = []
    for number in range(args.rounds):
        for kind, run in kinds.items():
            times = run()
            rows.append({"round": number, "kind": kind, **times})
            first, last = list(times.values())[-2:]
            parts = ", ".join(f"{k} {1e3 * v:.2f} ms" for k, v in times.items())
            print(f"{kind}: {parts}; last over the one before {last / first:.3f}")
            if kind == "overhead":
                for name in ("stream", "recycle"):
                    whole = times[name] / times["collect and summarize"]
                    print(f"overhead: {name} over collect and summarize {whole:.3f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": machine(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
