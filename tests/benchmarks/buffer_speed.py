"""How fast are add and sample, against flashbax, inside one compiled loop?

A step adds `rows` transitions and samples 256; a prioritised one also updates the
priorities of the sample. The loop is a `lax.scan` with a donated state, and hands every
sample on in its carry, so that all of it is made. Times are medians, interleaved in one
process, in microseconds a step.

- flashbax `flat`, `trajectory` (pieces of two) and `prioritised flat`: they keep no
  `next_obs` and take the next row for it, also where that begins a new episode;
- flashbax `item`: keeps `obs` and `next_obs`;
- `stored`, `shared` and `prioritized`: `ReplayBuffer` with either way of the
  successor, and `PrioritizedReplayBuffer`. `shared` has room for the final observations
  of a twentieth of the rows.

    python tests/benchmarks/buffer_speed.py [--quick] [--json FILE]
"""

import argparse
import functools
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
from machine import machine

from rollout import buffers

SAMPLE = 256
DONE_RATE = 0.02  # episodes of fifty steps
BETA = 0.4

VECTOR = jax.ShapeDtypeStruct((4,), jnp.float32)
PIXELS = jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8)
CASES = [
    *(
        (capacity, rows, VECTOR)
        for capacity in (100_000, 1_000_000)
        for rows in (128, 1024, 4096)
    ),
    (100_000, 128, PIXELS),
]


def make_rows(rows: int, obs: jax.ShapeDtypeStruct) -> dict[str, jax.Array]:
    """Makes one step of transitions, `[B, ...]`."""
    return {
        "obs": jnp.ones((rows, *obs.shape), obs.dtype),
        "action": jnp.zeros((rows,), jnp.int32),
        "reward": jnp.zeros((rows,), jnp.float32),
        "terminated": jnp.zeros((rows,), bool),
        "truncated": jnp.zeros((rows,), bool),
    }


def ours(
    kind: str, capacity: int, rows: int, step: dict[str, jax.Array]
) -> tuple[Any, Callable]:
    """An empty state, and a step of this library."""
    step = {**step, "next_obs": step["obs"]}
    if kind == "prioritized":
        buffer = buffers.PrioritizedReplayBuffer(capacity, rows)
    elif kind == "shared":
        buffer = buffers.ReplayBuffer(
            capacity, rows, next_obs=kind, final_obs_capacity=capacity // 20
        )
    else:
        buffer = buffers.ReplayBuffer(capacity, rows)

    def run(state: Any, key: jax.Array, done: jax.Array, step: Any) -> Any:
        rows = {**step, "next_obs": step["obs"], "terminated": done}
        state = buffer.add(state, rows)
        if kind != "prioritized":
            return state, buffer.sample(state, key, SAMPLE)
        batch = buffer.sample(state, key, SAMPLE, beta=BETA)
        return buffer.update(state, batch.indices, batch.weights + 0.1), batch

    return buffer.init(step), run


def theirs(
    kind: str, capacity: int, rows: int, step: dict[str, jax.Array]
) -> tuple[Any, Callable]:
    """An empty state, and a step of flashbax."""
    options = {"add_sequences": False, "add_batch_size": rows}
    if kind == "flat":
        buffer = flashbax.make_flat_buffer(capacity, 1, SAMPLE, **options)
    elif kind == "prioritised flat":
        buffer = flashbax.make_prioritised_flat_buffer(capacity, 1, SAMPLE, **options)
    elif kind == "item":
        buffer = flashbax.make_item_buffer(
            capacity, 1, SAMPLE, add_sequences=False, add_batches=True
        )
    else:
        buffer = flashbax.make_trajectory_buffer(
            rows, SAMPLE, 2, 1, 2, max_size=capacity
        )
    both = kind == "item"
    example = {**step, "next_obs": step["obs"]} if both else step
    state = buffer.init(jax.tree.map(lambda x: x[0], example))

    def run(state: Any, key: jax.Array, done: jax.Array, step: Any) -> Any:
        rows = {**step, "terminated": done}
        rows = {**rows, "next_obs": step["obs"]} if both else rows
        if kind == "trajectory":
            rows = jax.tree.map(lambda x: x[:, None], rows)
        state = buffer.add(state, rows)
        batch = buffer.sample(state, key)
        if kind == "prioritised flat":
            priorities = batch.probabilities + 0.1
            state = buffer.set_priorities(state, batch.indices, priorities)
        return state, batch

    return state, run


class Program:
    """A compiled loop of steps, and the state that it goes on from."""

    def __init__(
        self, make_fn: Callable, kind: str, case: tuple, num_steps: int
    ) -> None:
        capacity, rows, obs = case
        self.num_steps, self.rows = num_steps, make_rows(rows, obs)
        self.state, step_fn = make_fn(kind, capacity, rows, self.rows)
        self.nbytes = sum(x.nbytes for x in jax.tree.leaves(self.state))
        self.done = jax.random.bernoulli(
            jax.random.key(1), DONE_RATE, (num_steps, rows)
        )
        # Two steps before, so that there are rows with a successor.
        for n in range(2):
            step = functools.partial(step_fn, key=jax.random.key(n), done=self.done[0])
            self.state, sample = jax.jit(step, donate_argnums=0)(
                self.state, step=self.rows
            )
        self.sample = sample
        self.loop = jax.jit(functools.partial(_loop, step_fn), donate_argnums=(0, 1))

    def run(self, seed: int) -> tuple[float, float]:
        """Runs the loop; wall and CPU seconds."""
        keys = jax.random.split(jax.random.key(seed), self.num_steps)
        jax.block_until_ready((keys, self.state))
        wall, cpu = time.perf_counter(), time.process_time()
        self.state, self.sample = self.loop(
            self.state, self.sample, keys, self.done, self.rows
        )
        jax.block_until_ready((self.state, self.sample))
        return time.perf_counter() - wall, time.process_time() - cpu


def _loop(
    step_fn: Callable, state: Any, sample: Any, keys: Any, done: Any, rows: Any
) -> Any:
    def body(carry: Any, step: Any) -> Any:
        state, sample = step_fn(carry[0], *step, rows)
        return (state, sample), None

    return jax.lax.scan(body, (state, sample), (keys, done))[0]


def measure(case: tuple, repeats: int) -> dict[str, Any]:
    """Times all programs of a case in turn."""
    capacity, rows, obs = case
    pixels = obs is PIXELS
    num_steps = 20 if pixels else 200
    makers = {
        "flat": theirs, "item": theirs, "shared": ours,
        **({} if pixels else {
            "stored": ours, "trajectory": theirs,
            "prioritised flat": theirs, "prioritized": ours}),
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = {
            kind: Program(make_fn, kind, case, num_steps)
            for kind, make_fn in makers.items()
        }
    wall, cpu = ({kind: [] for kind in programs} for _ in range(2))
    for repeat in range(repeats + 1):
        for kind, program in programs.items():
            times = program.run(repeat)
            if repeat:  # the first one compiles
                wall[kind].append(times[0] / num_steps * 1e6)
                cpu[kind].append(times[1] / num_steps * 1e6)
    median = {kind: statistics.median(times) for kind, times in wall.items()}
    median_cpu = {kind: statistics.median(times) for kind, times in cpu.items()}
    return {
        "capacity": capacity, "rows": rows, "obs": "pixels" if pixels else "4 floats",
        "wall_us": median, "cpu_us": median_cpu,
        "nbytes": {kind: program.nbytes for kind, program in programs.items()},
    }  # fmt: skip


def row_of(result: dict[str, Any]) -> str:
    """A line of the table."""
    wall, cpu, nbytes = (result[name] for name in ("wall_us", "cpu_us", "nbytes"))

    def number(kind: str) -> str:
        return f"{wall[kind]:.0f}" if kind in wall else ""

    def ratio(times: dict[str, float], a: str, b: str) -> str:
        return f"{times[a] / times[b]:.2f}" if a in times and b in times else ""

    ours = "stored" if "stored" in wall else "shared"
    kinds = ("flat", "trajectory", "item", "stored", "shared")
    cells = [
        f"{result['capacity']:,}", f"{result['rows']:,}", result["obs"],
        *map(number, kinds), ratio(wall, "flat", ours), ratio(cpu, "flat", ours),
        number("prioritised flat"), number("prioritized"),
        ratio(wall, "prioritised flat", "prioritized"),
        ratio(cpu, "prioritised flat", "prioritized"),
        ratio(nbytes, "shared", "item"),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| capacity | rows | obs | flat | trajectory | item | stored | shared "
    "| flat/ours | cpu | prioritised flat | prioritized | ratio | cpu | shared/item "
    "memory |\n|" + "---|" * 15
)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one case, few repeats")
    parser.add_argument("--json", help="also write the numbers here")
    parser.add_argument("--case", type=int, nargs="*", help="only these cases")
    arguments = parser.parse_args()
    cases = [CASES[1]] if arguments.quick else CASES
    if arguments.case:
        cases = [CASES[number] for number in arguments.case]
    print(machine(), flush=True)
    print(HEADER, flush=True)
    results = []
    for case in cases:
        results.append(measure(case, repeats=5 if arguments.quick else 11))
        print(row_of(results[-1]), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
