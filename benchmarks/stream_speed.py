"""Times a stream, and each of its options.

Batches of 1,024 environments and 128 steps of each, in turn in one process:

- `prefetch`: CartPole-v1, a delay on the host per batch, as long as a collection;
- `reuse_memory`: Breakout-MinAtar;
- the stream, with and without `reuse_memory`, over a bare loop of one jitted function
  that collects and summarizes. Eight batches at a time, since a stream's statistics are
  made
  while the next batch begins: those of a batch are waited for with the next one;
- `check_finite`: both.

    python benchmarks/stream_speed.py
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import jax
from harness import Program, lanes, measure, run

import rollout

NUM_ENVS, NUM_STEPS = 1024, 128
BATCH = NUM_ENVS * NUM_STEPS
CARTPOLE, BREAKOUT = "CartPole-v1", "Breakout-MinAtar"


def stream(env_id: str, *, delay: float = 0.0, **options: Any) -> Program:
    """Makes a call that takes the next batch and waits for it, and then longer."""
    options = {"key": jax.random.key(0), "steps_per_batch": BATCH, **options}
    made, stats = rollout.Stream(lanes(env_id, NUM_ENVS), **options), ()

    def step() -> None:
        nonlocal stats
        batch = next(made)
        jax.block_until_ready((batch.trajectory, stats))
        stats = batch.stats
        time.sleep(delay)

    return step


def bare(env_id: str) -> Program:
    """Makes a call of the loop that everyone writes around `collect_steps`."""
    collector = lanes(env_id, NUM_ENVS)
    carry = collector.init(jax.random.key(0))

    @jax.jit
    def collect(carry: rollout.Carry) -> Any:
        carry, trajectory = collector.collect_steps(carry, None, NUM_STEPS)
        return carry, trajectory, rollout.summarize(trajectory)

    def step() -> Any:
        nonlocal carry
        carry, *rest = collect(carry)
        return rest

    return step


def ahead(repeats: int) -> tuple[Program, Program]:
    """Streams for a loop whose own work takes as long as a collection."""
    size = {"steps_per_batch": 16 * BATCH}  # `sleep` keeps a delay of 0.1 s well
    alone = measure({"": stream(CARTPOLE, **size)}, repeats, warmup=4)[""].wall
    return tuple(stream(CARTPOLE, prefetch=x, delay=alone, **size) for x in (1, 0))


PAIRS: dict[str, Callable[[int], tuple[Program, Program]]] = {
    "`prefetch=1` / `prefetch=0`, own work as long as a collection": ahead,
    "`reuse_memory=True` / `reuse_memory=False`, Breakout": lambda _: (
        stream(BREAKOUT, reuse_memory=True),
        stream(BREAKOUT),
    ),
    "stream / a bare loop with statistics": lambda _: (
        stream(CARTPOLE),
        bare(CARTPOLE),
    ),
    "stream with `reuse_memory=True` / a bare loop with statistics": lambda _: (
        stream(CARTPOLE, reuse_memory=True),
        bare(CARTPOLE),
    ),
    "`check_finite` / none, CartPole": lambda _: (
        stream(CARTPOLE, check_finite=True),
        stream(CARTPOLE),
    ),
    "`check_finite` / none, Breakout": lambda _: (
        stream(BREAKOUT, check_finite=True),
        stream(BREAKOUT),
    ),
}


def measure_pair(name: str, repeats: int, rounds: int) -> dict[str, str]:
    """Times a pair in some rounds; the median of each, and the range of the ratio."""
    calls, seconds = 8 if "bare" in name else 1, []
    for _ in range(rounds):
        first, second = PAIRS[name](repeats)
        pair = {"first": first, "second": second}
        timing = measure(
            pair, repeats, calls=calls, warmup=4
        )  # a stream finds its pace
        seconds.append((timing["first"].wall, timing["second"].wall))
    first, second = (statistics.median(x) for x in zip(*seconds, strict=True))
    ratios = sorted(x / y for x, y in seconds)
    middle = statistics.median(ratios)
    return {
        "compared": name,
        "first, ms": f"{1e3 * first:.3g}",
        "second, ms": f"{1e3 * second:.3g}",
        "time, first / second": f"{middle:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
    }


def rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times each pair."""
    for name in PAIRS:
        yield measure_pair(name, args.repeats, args.rounds[0])


if __name__ == "__main__":
    run(__doc__, 15, {"streams": rows}, rounds=(3,))
