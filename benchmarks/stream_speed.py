"""Times `Stream` and each of its options.

Batches have 1,024 environments and 128 steps each. Runs are interleaved in one process:

- `prefetch`: CartPole-v1, with a delay per batch on the host as long as a collection;
- `reuse_memory`: Breakout-MinAtar;
- the stream, with and without `reuse_memory`, against a bare loop over `collect_steps`,
  `EpisodeWindow.add` and `summarize`. Each measurement has eight batches.

    python benchmarks/stream_speed.py
"""

import functools
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


def stream_loop(env_id: str, *, delay: float = 0.0, **options: Any) -> Program:
    """Creates a program that waits for the next batch and then sleeps for `delay`."""
    options = {"key": jax.random.key(0), "steps_per_batch": BATCH, **options}
    batches = rollout.Stream(lanes(env_id, NUM_ENVS), **options)

    def step() -> None:
        batch = next(batches)
        jax.block_until_ready((batch.trajectory, batch.stats))
        time.sleep(delay)

    return step


def bare_loop(env_id: str) -> Program:
    """Creates one iteration of a plain loop around `collect_steps`."""
    collector = lanes(env_id, NUM_ENVS)
    carry = collector.init(jax.random.key(0))
    window = rollout.EpisodeWindow.init(100)
    collect = jax.jit(lambda carry: collector.collect_steps(carry, None, NUM_STEPS))

    def step() -> Any:
        nonlocal carry, window
        carry, trajectory = collect(carry)
        window = window.add(trajectory)
        return trajectory, rollout.summarize(trajectory), window

    return step


def prefetch_pair(repeats: int) -> tuple[Program, Program]:
    """Creates streams for a loop with host work as long as a collection."""
    size = {"steps_per_batch": 16 * BATCH}  # `sleep` is accurate for delays of 0.1 s
    delay = measure({"": stream_loop(CARTPOLE, **size)}, repeats, warmup=4)[""].wall
    make = functools.partial(stream_loop, CARTPOLE, delay=delay, **size)
    return make(prefetch=1), make(prefetch=0)


PAIRS: dict[str, Callable[[int], tuple[Program, Program]]] = {
    "`prefetch=1` / `prefetch=0`, own work as long as a collection": prefetch_pair,
    "`reuse_memory=True` / `reuse_memory=False`, Breakout": lambda _: (
        stream_loop(BREAKOUT, reuse_memory=True),
        stream_loop(BREAKOUT),
    ),
    "stream / a bare loop with statistics": lambda _: (
        stream_loop(CARTPOLE),
        bare_loop(CARTPOLE),
    ),
    "stream with `reuse_memory=True` / a bare loop with statistics": lambda _: (
        stream_loop(CARTPOLE, reuse_memory=True),
        bare_loop(CARTPOLE),
    ),
}


def measure_pair(name: str, repeats: int, rounds: int) -> dict[str, str]:
    """Times a pair in several rounds; returns medians and the range of the ratio."""
    calls, seconds = 8 if "bare" in name else 1, []
    for _ in range(rounds):
        first, second = PAIRS[name](repeats)
        pair = {"first": first, "second": second}
        # A stream needs several batches to reach its steady state.
        timing = measure(pair, repeats, calls=calls, warmup=4)
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
    """Times every pair of programs."""
    for name in PAIRS:
        yield measure_pair(name, args.repeats, args.rounds[0])


if __name__ == "__main__":
    run(__doc__, 15, {"streams": rows}, rounds=(3,))
