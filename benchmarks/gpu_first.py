"""Checks and times the library on a machine with a GPU, in at most eight minutes.

    python benchmarks/gpu_first.py --json docs/gpu.json
    JAX_PLATFORMS=cpu python benchmarks/gpu_first.py --num-envs 64 --episodes 64

The checks compare results bit for bit: with a split call, with a restored stream, with
a CPU device, and with the hashes in `tests/bits.json`, which a CPU computed. Breakout
computes with small integers only, so all of its fields must be equal. The second
command is a trial of the script on a CPU.
"""

import functools
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
from gymnax_loops import Case, make_policy, our_loop
from harness import lanes, measure, run
from recipes import PPOSettings, make_lanes, make_ppo
from rollout_speed import compile_loop, purejaxrl_loop, recorded_fields

import rollout
from rollout import buffers, checkpoint

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import bits  # noqa: E402

KEY = jax.random.key(0)
CASES = ("CartPole-v1", "random"), ("CartPole-v1", "mlp"), ("Breakout-MinAtar", "mlp")


def check_split_call() -> None:
    """One call of 64 steps equals two calls of 32 steps."""
    collector = lanes("CartPole-v1", 128)
    carry, t = collector.collect_steps(collector.init(KEY), None, 64)
    half, first = collector.collect_steps(collector.init(KEY), None, 32)
    half, second = collector.collect_steps(half, None, 32)
    t_halves = jax.tree.map(lambda *x: jnp.concatenate(x), first, second)
    chex.assert_trees_all_equal((half, t_halves), (carry, t))


def check_restored_stream() -> None:
    """A stream that a checkpoint restored continues with the same batch."""
    make = functools.partial(
        rollout.Stream, lanes("CartPole-v1", 128), params=None, steps_per_batch=4096
    )
    with make(key=KEY) as stream, make(key=jax.random.key(1)) as restored:
        next(stream)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(folder, stream.state())
            restored.restore(checkpoint.restore(folder, restored.state()))
        batches = next(stream).trajectory, next(restored).trajectory
    chex.assert_trees_all_equal(*batches)


def check_buffer() -> None:
    """A replay buffer samples the same rows as on a CPU device."""

    def sample(device: Any) -> Any:
        with jax.default_device(device):
            collector = lanes("Breakout-MinAtar", 32)
            carry = collector.init(jax.device_put(KEY, device))
            buffer = buffers.ReplayBuffer(1024, 32, n_step=3, gamma=0.5)
            state = buffer.init(collector)
            state = buffer.add(state, collector.collect_steps(carry, None, 40)[1])
            return jax.device_get(buffer.sample(state, KEY, 256).experience)

    devices = jax.devices()[0], jax.devices("cpu")[0]
    chex.assert_trees_all_equal(*map(sample, devices))


def check_hashes() -> None:
    """Every field of Breakout has the hash that a CPU computed."""
    env_name, policy_name = "Breakout-MinAtar", "random"
    hashes_by_version = json.loads(bits.FILE.read_text())
    assert jax.__version__ in hashes_by_version, f"no hashes for jax {jax.__version__}"
    expected = hashes_by_version[jax.__version__][f"{env_name} {policy_name}"]
    streams = [x.partition(" ")[2] for x in expected if x.startswith("stream ")]
    hashes = bits.hash_all(env_name, policy_name, streams)
    assert hashes == expected, [x for x in expected if hashes[x] != expected[x]]


def check_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Runs the checks; a failed check does not stop the script."""
    del args
    for check in (check_split_call, check_restored_stream, check_buffer, check_hashes):
        start = time.perf_counter()
        try:
            check()
            result = "equal"
        except Exception as error:  # a GPU may fail in any way
            message = str(error).strip().partition("\n")[0]
            result = f"{type(error).__name__}: {message}"
        seconds = time.perf_counter() - start
        yield {"check": f"{check.__doc__}", "result": result, "s": f"{seconds:.0f}"}


def step_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times `collect_steps` of 128 steps per lane against PureJaxRL's loop."""
    for env_id, policy in CASES:
        for num_envs in args.num_envs if policy == "random" else args.num_envs[:1]:
            case = Case(env_id, num_envs, policy)
            params = make_policy(case)[1](KEY)
            loops = {
                "rollout": our_loop(case, recorded_fields),
                "theirs": purejaxrl_loop(case),
            }
            compiled = {x: compile_loop(case, y, params) for x, y in loops.items()}
            times = measure({x: y[0] for x, y in compiled.items()}, args.repeats)
            ours, theirs = times["rollout"].wall, times["theirs"].wall
            yield {
                "environment": f"`{env_id}`, {policy}",
                "lanes": f"{num_envs:,}",
                "`collect_steps`, ms": f"{1e3 * ours:.2f}",
                "PureJaxRL's loop, ms": f"{1e3 * theirs:.2f}",
                "ratio": f"{theirs / ours:.2f}",
                "million steps/s": f"{num_envs * case.num_steps / ours / 1e6:.3g}",
                "compiling, s": f"{compiled['rollout'][2]:.0f}",
            }


def training_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times an update of PPO in CartPole, and an evaluation."""
    for num_envs in args.num_envs[:2]:
        config = PPOSettings(num_updates=10, num_minibatches=4, num_envs=num_envs)
        learner = make_ppo(make_lanes("CartPole-v1", config), config)
        program = functools.partial(jax.jit(learner.train), KEY)
        timing = measure({"": program}, args.repeats)[""]
        yield row(f"update of PPO, {num_envs:,} lanes", timing, config.num_updates)
    collector, num_episodes = lanes("CartPole-v1", args.num_envs[0]), args.episodes[0]
    program = functools.partial(rollout.evaluate, collector, None, KEY, num_episodes)
    timing = measure({"": program}, args.repeats)[""]
    yield row(f"`evaluate`, {num_episodes:,} episodes", timing, 1)


def row(name: str, timing: Any, num_calls: int) -> dict[str, str]:
    """Formats the time of a call, and of the first run, which compiles."""
    ms = 1e3 * timing.wall / num_calls
    return {"program": name, "ms": f"{ms:.2f}", "first run, s": f"{timing.first:.1f}"}


if __name__ == "__main__":
    tables = {"checks": check_rows, "steps": step_rows, "training": training_rows}
    run(__doc__, 5, tables, num_envs=(2048, 32768, 262144), episodes=(4096,))
