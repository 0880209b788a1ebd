"""How fast are add and sample inside a compiled loop, compared with flashbax?

A step adds `rows` transitions and samples 256. A step with priorities also updates the
priorities of the sample. The loop is a `lax.scan` with a donated state. Its carry holds
the sample, so that XLA cannot eliminate any part of it. Times are medians of
interleaved runs in one process, in microseconds per step.

- flashbax `flat`, `trajectory` (sequences of two) and `prioritised flat`: these buffers
  store no `next_obs` and use the next row, even if it begins a new episode;
- flashbax `item`: stores `obs` and `next_obs`;
- `stored`, `shared` and `prioritized`: `ReplayBuffer` with `next_obs="stored"` or
  `"shared"`, and `PrioritizedReplayBuffer`. `shared` has capacity for the final
  observations of 5 % of the rows.

    pip install ".[bench]"
    python benchmarks/buffer_speed.py
    python benchmarks/buffer_speed.py --cases 1 --repeats 5
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
from harness import Timing, arguments, measure, report

from rollout import buffers

SAMPLE = 256
DONE_RATE = 0.02  # episodes of 50 steps on average
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
    """Creates the transitions of one step, `[B, ...]`."""
    return {
        "obs": jnp.ones((rows, *obs.shape), obs.dtype),
        "action": jnp.zeros((rows,), jnp.int32),
        "reward": jnp.zeros((rows,), jnp.float32),
        "terminated": jnp.zeros((rows,), bool),
        "truncated": jnp.zeros((rows,), bool),
    }


def make_rollout(
    name: str, capacity: int, rows: int, step: dict[str, jax.Array]
) -> tuple[Any, Callable]:
    """Creates an empty state and a step function for a buffer of this library."""
    step = {**step, "next_obs": step["obs"]}
    if name == "prioritized":
        buffer = buffers.PrioritizedReplayBuffer(capacity, rows)
    elif name == "shared":
        buffer = buffers.ReplayBuffer(
            capacity, rows, next_obs=name, final_obs_capacity=capacity // 20
        )
    else:
        buffer = buffers.ReplayBuffer(capacity, rows)

    def run(state: Any, key: jax.Array, done: jax.Array, step: Any) -> Any:
        rows = {**step, "next_obs": step["obs"], "terminated": done}
        state = buffer.add(state, rows)
        if not isinstance(buffer, buffers.PrioritizedReplayBuffer):
            return state, buffer.sample(state, key, SAMPLE)
        batch = buffer.sample(state, key, SAMPLE, beta=BETA)
        return buffer.update_priorities(
            state, batch.indices, batch.weights + 0.1
        ), batch

    return buffer.init(step), run


def make_flashbax(
    name: str, capacity: int, rows: int, step: dict[str, jax.Array]
) -> tuple[Any, Callable]:
    """Creates an empty state and a step function for a buffer of flashbax."""
    options = {"add_sequences": False, "add_batch_size": rows}
    if name == "flat":
        buffer = flashbax.make_flat_buffer(capacity, 1, SAMPLE, **options)
    elif name == "prioritised flat":
        buffer = flashbax.make_prioritised_flat_buffer(capacity, 1, SAMPLE, **options)
    elif name == "item":
        buffer = flashbax.make_item_buffer(
            capacity, 1, SAMPLE, add_sequences=False, add_batches=True
        )
    else:
        buffer = flashbax.make_trajectory_buffer(
            rows, SAMPLE, 2, 1, 2, max_size=capacity
        )
    has_next_obs = name == "item"
    example = {**step, "next_obs": step["obs"]} if has_next_obs else step
    state = buffer.init(jax.tree.map(lambda x: x[0], example))

    def run(state: Any, key: jax.Array, done: jax.Array, step: Any) -> Any:
        rows = {**step, "terminated": done}
        rows = {**rows, "next_obs": step["obs"]} if has_next_obs else rows
        if name == "trajectory":
            rows = jax.tree.map(lambda x: x[:, None], rows)
        state = buffer.add(state, rows)
        batch = buffer.sample(state, key)
        if name == "prioritised flat":
            priorities = batch.probabilities + 0.1
            state = buffer.set_priorities(state, batch.indices, priorities)
        return state, batch

    return state, run


def make_program(
    make_fn: Callable, name: str, case: tuple, num_steps: int
) -> tuple[Callable[[], Any], int]:
    """Returns a compiled loop that continues from the last state, and its bytes."""
    capacity, rows, obs = case
    step = make_rows(rows, obs)
    state, step_fn = make_fn(name, capacity, rows, step)
    nbytes = sum(x.nbytes for x in jax.tree.leaves(state))
    done = jax.random.bernoulli(jax.random.key(1), DONE_RATE, (num_steps, rows))
    keys = jax.random.split(jax.random.key(0), num_steps)
    sample = jax.eval_shape(step_fn, state, keys[0], done[0], step)[1]
    sample = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sample)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def loop(state: Any, sample: Any, keys: jax.Array) -> Any:
        def body(carry: Any, inputs: Any) -> Any:
            return step_fn(carry[0], *inputs, step), None

        return jax.lax.scan(body, (state, sample), (keys, done))[0]

    def run() -> Any:
        nonlocal state, sample
        state, sample = loop(state, sample, keys)
        return state, sample

    return run, nbytes


def measure_case(case: tuple, repeats: int) -> tuple[dict[str, str], dict[str, str]]:
    """Times all programs of a case; returns a row of each table."""
    capacity, num_rows, obs = case
    pixels = obs is PIXELS
    num_steps = 20 if pixels else 200
    makers = {"flat": make_flashbax, "item": make_flashbax, "shared": make_rollout}
    if not pixels:
        makers |= {"stored": make_rollout, "trajectory": make_flashbax}
        makers |= {"prioritised flat": make_flashbax, "prioritized": make_rollout}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loops = {x: make_program(fn, x, case, num_steps) for x, fn in makers.items()}
        timing = measure({name: run for name, (run, _) in loops.items()}, repeats)

    def us(name: str) -> str:
        return f"{timing[name].wall / num_steps * 1e6:.0f}" if name in timing else ""

    def ratios(peer: Timing, buffer: Timing) -> list[str]:
        return [f"{peer.wall / buffer.wall:.2f}", f"{peer.cpu / buffer.cpu:.2f}"]

    best = "shared" if pixels else "stored"
    ratio, ratio_cpu = ratios(timing["flat"], timing[best])
    setting = {"capacity": f"{capacity:,}", "rows per step": f"{num_rows:,}"}
    plain = {
        **setting,
        "observation": "pixels" if pixels else "4 floats",
        **{f"flashbax `{x}`, us": us(x) for x in ("flat", "trajectory", "item")},
        **{f"`{x}`, us": us(x) for x in ("stored", "shared")},
        "flashbax `flat` / ours": ratio,
        "the same in CPU time": ratio_cpu,
        "memory, `shared` / `item`": f"{loops['shared'][1] / loops['item'][1]:.2f}",
    }
    if pixels:
        return plain, {}
    ratio, ratio_cpu = ratios(timing["prioritised flat"], timing["prioritized"])
    return plain, {
        **setting,
        "flashbax `prioritised flat`, us": us("prioritised flat"),
        "`prioritized`, us": us("prioritized"),
        "flashbax / ours": ratio,
        "the same in CPU time": ratio_cpu,
    }


def main() -> None:
    """Prints both tables."""
    args = arguments(__doc__, 11, cases=tuple(range(len(CASES))))
    rows = [measure_case(CASES[number], args.repeats) for number in args.cases]
    report(args, "buffers", [plain for plain, _ in rows])
    report(args, "prioritised buffers", [row for _, row in rows if row])


if __name__ == "__main__":
    main()
