"""Builds a batch of a stream: collection, truncation, fault detection, statistics.

`make_batch` implements all steps for environments in JAX. For host environments,
`complete` implements the steps after the collection. Both functions are pure.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rollout.envs.types import ArrayTree
from rollout.kernel import keys, scan, step
from rollout.kernel.state import mask_out, roots_of
from rollout.logs import EpisodeWindow
from rollout.stats import (
    CollectStats,
    count_nonfinite,
    is_nonfinite,
    nonfinite,
    summarize,
)
from rollout.stream.options import Options
from rollout.types import Carry, Episodes, Transition

NO_FAULT = 2**31 - 1  # larger than every entry number of a batch


class BatchResult(NamedTuple):
    """Outputs of the compiled program for one batch."""

    carry: Any  # after the batch
    output: ArrayTree  # the trajectory, or the result of `postprocess`
    episodes: Episodes | None
    stats: CollectStats
    window: EpisodeWindow  # after the batch
    num_faulty: jax.Array  # () int32, number of dropped episodes
    # First nonfinite entry of each checked field, or `NO_FAULT`.
    faults: dict[str, jax.Array]  # () int32
    fault_step: Any  # () int32, episode step of the first fault, or () if unchecked


def make_batch(
    options: Options,
    num_rows: int,
    collector: Any,  # a `Collector`
    carry: Carry,
    params: Any,
    window: EpisodeWindow,
    memory: ArrayTree,
) -> BatchResult:
    """Collects a batch of `num_rows` rows, or of complete episodes.

    `memory` is an obsolete `output` of an earlier batch. It is donated but not
    read, so that XLA reuses its memory for the new output: the first write to newly
    allocated memory is slow.
    """
    del memory  # donated, not read
    episodes, num_faulty = None, jnp.int32(0)
    if options.episodes_per_batch is None:
        if options.at_batch_end == "reset":
            # An episode without any step so far is already new: keep it.
            restarts = carry.episode.episode_length > 0
            roots = roots_of(collector, carry)
            start = keys.next_episodes(collector.env, carry, roots)
            carry = step.restart(collector, carry, restarts, start)
        is_faulty = is_nonfinite if options.on_fault == "drop" else None
        carry, trajectory = scan.collect_steps(
            collector,
            carry,
            params,
            num_rows,
            limit=options.max_episode_steps,
            cut_last=options.at_batch_end == "truncate",
            drop_fn=is_faulty,
        )
        if options.on_fault == "drop":
            trajectory, num_faulty = _drop(trajectory)
    else:
        assert options.max_episode_steps is not None  # validated by `Options`
        carry, episodes = collector.collect_episodes(
            carry,
            params,
            options.episodes_per_batch,
            max_episode_steps=options.max_episode_steps,
            return_trajectory=True,
        )
        trajectory, episodes = episodes.trajectory, episodes.replace(trajectory=())
    result = complete(options, carry, window, trajectory, episodes, num_faulty)
    if (sharding := collector.env.sharding) and options.postprocess is None:
        # Use the sharding of `memory`, so that a later batch can reuse the memory.
        result = result._replace(output=sharding.place(result.output, lane_axis=1))
    return result


def complete(
    options: Options,
    carry: Any,
    window: EpisodeWindow,
    trajectory: Transition,
    episodes: Episodes | None,
    num_faulty: jax.Array,
) -> BatchResult:
    """Detects faults, and computes the statistics and the output of a batch."""
    faults, fault_step = {}, ()
    if options.check_finite and options.on_fault != "drop":
        size = trajectory.mask.size
        # Number the entries row by row, so that the smallest number is the first fault.
        number = jnp.arange(size, dtype=jnp.int32).reshape(trajectory.mask.shape)
        faults = {
            name: jnp.where(bad & trajectory.mask, number, NO_FAULT).min()
            for name, bad in nonfinite(trajectory).items()
        }
        # Several fields can be nonfinite in one entry; the message names all of them.
        first: Any = functools.reduce(jnp.minimum, faults.values(), NO_FAULT)
        fault_step = jnp.max(
            trajectory.episode_length, where=number == first, initial=0
        )
    if episodes is None:
        stats = summarize(trajectory)
    else:
        num_nonfinite = count_nonfinite(trajectory)
        stats = summarize(episodes).replace(num_nonfinite=num_nonfinite)
    return BatchResult(
        carry=carry,
        output=options.postprocess(trajectory) if options.postprocess else trajectory,
        episodes=episodes,
        stats=stats,
        window=window.add(trajectory if episodes is None else episodes),
        num_faulty=num_faulty,
        faults=faults,
        fault_step=fault_step,
    )


def _drop(trajectory: Transition) -> tuple[Transition, jax.Array]:
    """Masks out faulty episodes; returns the trajectory and the number of faults.

    A faulty episode ends at its nonfinite row. Its rows in the batch are this row and
    all earlier rows with the same id.
    """
    faulty = is_nonfinite(trajectory)

    # Scan backward in time: drop a row if the next row of its episode is dropped.
    def mark(carry: tuple, row: tuple) -> tuple[tuple, jax.Array]:
        faulty, episode_id = row
        faulty = faulty | (carry[0] & (carry[1] == episode_id))
        return (faulty, episode_id), faulty

    rows = faulty, trajectory.episode_id
    start = jnp.zeros_like(faulty[0]), trajectory.episode_id[-1]
    dropped = lax.scan(mark, start, rows, reverse=True)[1]
    masked = trajectory.replace(mask=~dropped)
    return mask_out(masked), jnp.sum(faulty, dtype=jnp.int32)
