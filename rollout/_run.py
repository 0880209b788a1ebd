"""A run of `--num-steps`: compile, collect chunk by chunk, profile."""

import argparse
import contextlib
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from tqdm import tqdm

import envs
from rollout.collector import Collector
from rollout.policies import random_policy
from rollout.types import Carry

XLA_CPU_LOOP = (
    "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
)

_NUM_CHUNKS = 20
_MAX_ROWS = 1 << 22  # of a chunk, so that its memory does not grow with the run
_ENDING_FIELDS = ("terminated", "truncated", "episode_return", "episode_length")


class InputError(Exception):
    """What was asked for cannot be done; the message says why."""


class Program(NamedTuple):
    """A compiled collection, ready to run."""

    collector: Collector
    carry: Carry
    chunks: dict[int, jax.stages.Compiled]  # by their number of steps
    compile_time: float  # s


class Ended(NamedTuple):
    """The `E` episodes that ended, in the order in which they did."""

    step: np.ndarray  # [E] int, steps of each lane until then, the last one included
    terminated: np.ndarray  # [E] bool, False where it was only truncated
    episode_return: np.ndarray  # [E] float32
    episode_length: np.ndarray  # [E] int32


class Result(NamedTuple):
    """What was collected."""

    carry: Carry
    ended: Ended
    trajectory: dict[str, np.ndarray]  # [T, B, ...] by name, {} unless it is saved
    run_time: float  # s


def prepare(args: argparse.Namespace) -> Program:
    """Makes the environments, starts them, and compiles the chunks ahead of time.

    Raises:
        InputError: if there is no such environment, or not with these parameters.
    """
    with naming_parameters(args):
        env = envs.make_vec(args.env, args.num_envs, **dict(args.env_param))
        collector = Collector(env=env, policy=random_policy(env.action_space))
        start = time.perf_counter()
        carry = collector.init(jax.random.key(args.seed))
        compile_chunk = functools.partial(_chunk.lower, collector, carry)
        chunks = {
            size: compile_chunk(num_steps=size, whole=bool(args.save)).compile()
            for size in {stop - first for first, stop in _windows(args)}
        }
    return Program(collector, carry, chunks, time.perf_counter() - start)


@contextlib.contextmanager
def naming_parameters(args: argparse.Namespace) -> Iterator[None]:
    """Makes an error of the environment an `InputError` that names its parameters."""
    params = dict(args.env_param)
    try:
        yield
    except ValueError as error:
        raise InputError(str(error)) from error
    except Exception as error:
        if not params:
            raise
        # A wrong value breaks whatever in the environment first meets it.
        given = ", ".join(f"{name}={value!r}" for name, value in params.items())
        raise InputError(f"{args.env} with {given} fails: {error}") from error


def collect(program: Program, args: argparse.Namespace) -> Result:
    """Collects `num_steps` steps of every lane, with a bar if stderr is a terminal."""
    trajectory = _allocate(program, args) if args.save else {}
    carry, ended = program.carry, []
    num_rows = args.num_steps * args.num_envs
    start = time.perf_counter()
    with tqdm(total=num_rows, unit="step", unit_scale=True, disable=None) as bar:
        for first, stop in _windows(args):
            carry, fields = program.chunks[stop - first](program.collector, carry)
            fields = {name: np.asarray(field) for name, field in fields.items()}
            for name, rows in trajectory.items():
                rows[first:stop] = fields[name]
            ended.append(_find_ended(fields, first))
            bar.update((stop - first) * args.num_envs)
    run_time = time.perf_counter() - start
    parts = zip(*ended, strict=True)
    return Result(carry, Ended(*map(np.concatenate, parts)), trajectory, run_time)


def profile(program: Program, carry: Carry, folder: Path) -> Path:
    """Runs one more chunk under the profiler; returns where its trace lies."""
    chunk = program.chunks[max(program.chunks)]
    with jax.profiler.trace(folder):
        jax.block_until_ready(chunk(program.collector, carry))
    # The profiler names its folders by the time.
    return max(folder.glob("plugins/profile/*"), default=folder)


@functools.partial(jax.jit, static_argnames=("num_steps", "whole"))
def _chunk(
    collector: Collector, carry: Carry, *, num_steps: int, whole: bool
) -> tuple[Carry, dict[str, jax.Array]]:
    """Collects, and hands out what is read: the rest leaves no buffer."""
    carry, trajectory = collector.collect_steps(carry, None, num_steps)
    fields = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(trajectory)
    }
    return carry, fields if whole else {name: fields[name] for name in _ENDING_FIELDS}


def _windows(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """First step and stop of each chunk: of equal size, the last one may be shorter."""
    most = min(-(-args.num_steps // _NUM_CHUNKS), max(1, _MAX_ROWS // args.num_envs))
    # A shorter last chunk is a second program to compile: avoid it where that is easy.
    sizes = range(most, most // 2, -1)
    size = next((size for size in sizes if args.num_steps % size == 0), most)
    for first in range(0, args.num_steps, size):
        yield first, min(first + size, args.num_steps)


def _allocate(program: Program, args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Makes room for the trajectory: joining chunks afterwards would take it twice."""
    _, fields = next(iter(program.chunks.values())).out_info
    return {
        name: np.empty((args.num_steps, *field.shape[1:]), field.dtype)
        for name, field in fields.items()
    }


def _find_ended(fields: dict[str, np.ndarray], first: int) -> Ended:
    done = fields["terminated"] | fields["truncated"]
    return Ended(
        step=first + np.nonzero(done)[0] + 1,
        terminated=fields["terminated"][done],
        episode_return=fields["episode_return"][done],
        episode_length=fields["episode_length"][done],
    )
