"""A run of `--num-steps`: compile, collect batch by batch, profile."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rollout.cli import agents
from rollout.cli.arguments import is_on_host, naming_parameters
from rollout.cli.collector import make_collector
from rollout.cli.types import Ended, Result
from rollout.collector import Collector
from rollout.profiling import Profile
from rollout.profiling import profile as time_parts
from rollout.stream.stream import Stream
from rollout.types import Transition

_NUM_BATCHES = 20
_MAX_ROWS = 1 << 22  # of a batch, so that its memory does not grow with the run
_MAX_HOST_ROWS = 1 << 10  # where a loop in Python steps, so that Ctrl-C waits for less
_ENDING_FIELDS = ("terminated", "truncated", "episode_return", "episode_length")


def collect(args: argparse.Namespace) -> Result:
    """Collects `num_steps` steps of every lane, with a bar if stderr is a terminal.

    After Ctrl-C the result is what was collected until then.
    """
    start, is_interrupted = time.perf_counter(), False
    num_steps = num_void = 0
    with naming_parameters(args):
        collector, params = make_collector(args)
        total_steps = args.num_steps * args.num_envs
        stream = _make_stream(args, collector, params, total_steps=total_steps)
        stream.compile()
    compiled = time.perf_counter()
    layout = agents.layout_of(collector)
    parts: list[tuple[int, Ended, dict[str, np.ndarray], dict]] = []
    try:
        with stream:
            for batch in stream:
                size = batch.steps // args.num_envs  # rows that are not void
                fields, of_agents = jax.tree.map(np.asarray, batch.trajectory)
                fields = {name: x[:size] for name, x in fields.items()}
                ended, done = _find_ended(fields, num_steps), _find_done(fields)
                num_steps += size
                num_void += int(np.count_nonzero(~fields.get("mask", np.True_)))
                of_agents = agents.at_endings(of_agents, done)
                parts.append((num_steps, ended, fields if args.save else {}, of_agents))
    except KeyboardInterrupt:
        if not parts:
            raise
        is_interrupted = True
    counts, ended, rows, of_agents = zip(*parts, strict=True)
    return Result(
        num_steps=counts[-1],
        num_void=num_void,
        ended=Ended(*map(np.concatenate, zip(*ended, strict=True))),
        trajectory={x: np.concatenate([row[x] for row in rows]) for x in rows[0]},
        compile_time=compiled - start,
        run_time=time.perf_counter() - compiled,
        is_interrupted=is_interrupted,
        agents=agents.join(layout, of_agents) if layout else None,
    )


def profile(args: argparse.Namespace) -> tuple[Profile, Path]:
    """Seconds per part of a batch, and where the trace of one more lies."""
    collector, params = make_collector(args)
    seconds = time_parts(collector, params, _num_rows(args))
    stream = _make_stream(args, collector, params, total_steps=None)
    next(stream)
    with jax.profiler.trace(args.profile):
        next(stream)
    # The profiler names its folders by the time.
    return seconds, max(args.profile.glob("plugins/profile/*"), default=args.profile)


def _make_stream(
    args: argparse.Namespace,
    collector: Collector,
    params: Any,
    *,
    total_steps: int | None,
) -> Stream:
    has_agents = agents.layout_of(collector) is not None
    fields_of = _all_fields if args.save else _ending_fields
    if not args.save and is_on_host(args.env):
        fields_of = _ending_fields_and_mask

    def read(trajectory: Transition) -> tuple[dict[str, jax.Array], dict]:
        if not has_agents:
            return fields_of(trajectory), {}
        return fields_of(agents.unpack(trajectory)), agents.read(trajectory)

    return Stream(
        collector,
        key=jax.random.key(args.seed),
        params=params,
        steps_per_batch=_num_rows(args) * args.num_envs,
        total_steps=total_steps,
        postprocess=read,
        prefetch=1,
        progress=total_steps is not None and sys.stderr.isatty(),
    )


def _all_fields(trajectory: Transition) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(trajectory)
    }


def _ending_fields(trajectory: Transition) -> dict[str, jax.Array]:
    """Keeps the fields that the table reads; the others get no buffer."""
    return {name: getattr(trajectory, name) for name in _ENDING_FIELDS}


def _ending_fields_and_mask(trajectory: Transition) -> dict[str, jax.Array]:
    return {**_ending_fields(trajectory), "mask": trajectory.mask}


def _num_rows(args: argparse.Namespace) -> int:
    """Steps of every lane in a batch."""
    most_rows = _MAX_HOST_ROWS if is_on_host(args.env) else _MAX_ROWS
    most = max(1, most_rows // args.num_envs)
    return min(-(-args.num_steps // _NUM_BATCHES), most)


def _find_ended(fields: dict[str, np.ndarray], first: int) -> Ended:
    done = _find_done(fields)
    return Ended(
        step=first + np.nonzero(done)[0] + 1,
        terminated=fields["terminated"][done],
        episode_return=fields["episode_return"][done],
        episode_length=fields["episode_length"][done],
    )


def _find_done(fields: dict[str, np.ndarray]) -> np.ndarray:
    return fields["terminated"] | fields["truncated"]
