"""Makes a batch of a stream: collects, cuts episodes, finds faults, summarizes.

One program makes a batch of environments in JAX, by `make_batch`; a loop in Python
collects from others, by `make_host_batch`, and one program does the rest. Streams of
equal options share them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout import kernel, nonfinite, programs
from rollout.collector import Collector
from rollout.envs.types import ArrayTree, sharding_of
from rollout.host.host_collector import HostCollector
from rollout.stats import CollectStats, summarize
from rollout.stream.options import Options
from rollout.types import Carry, Episodes, Transition

NO_FAULT = 2**31 - 1  # no step of a batch has this number
_UNCOUNTED = "obs", "action", "reward", "next_obs", "extras", "info", "final_value"


class BatchResult(NamedTuple):
    """A batch as the program returns it."""

    carry: Any  # after the batch
    output: ArrayTree  # the trajectory, or the result of `postprocess`
    episodes: Episodes | None
    stats: CollectStats
    num_faulty: jax.Array  # () int32, episodes that were dropped
    counted: Any  # what an `EpisodeWindow` reads, or None without one
    # For each checked field, the first step that is not finite, or `NO_FAULT`.
    faults: dict[str, jax.Array]  # () int32


def make_batch(
    options: Options,
    num_rows: int,
    collector: Collector,
    carry: Carry,
    params: Any,
    memory: ArrayTree,
) -> BatchResult:
    """Makes a batch of `num_rows` rows, or of whole episodes.

    `memory` is an earlier `output` that is no longer needed. It is donated and not
    read, so that XLA writes the new one there: fresh memory is slow to touch for the
    first time.
    """
    del memory  # only donated
    episodes, num_faulty = None, jnp.int32(0)
    if options.episodes_per_batch is None:
        if options.at_batch_end == "reset":
            carry = _restart_all(collector, carry)
        is_faulty = nonfinite.is_nonfinite if options.on_fault == "drop" else None
        carry, trajectory = kernel.collect_steps(
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
        assert options.max_episode_steps is not None  # `Options` has checked it
        carry, trajectory, episodes = collector.collect_padded_episodes(
            carry,
            params,
            options.episodes_per_batch,
            max_episode_steps=options.max_episode_steps,
        )
    result = complete(options, carry, trajectory, episodes, num_faulty)
    if (sharding := sharding_of(collector.env)) and options.postprocess is None:
        # Placed as `memory` is, so that a later batch can be written there.
        result = result._replace(output=sharding.place(result.output, lane_axis=1))
    return result


def blank_memory(output: ArrayTree, collector: Collector) -> ArrayTree:
    """Makes memory for the first batch, whose `output` is known by its shapes."""
    sharding, where = sharding_of(collector.env), None
    if sharding and not isinstance(output, Transition):
        return ()  # where XLA puts the result of a `postprocess` is its choice
    if sharding:
        where = sharding.shardings(output, lane_axis=1)
    return programs.blank(output, where)()


@programs.shared
def batch_program(options: Options) -> Any:
    """Jits `make_batch` for the options that it reads, those `of_program`."""
    make = functools.partial(make_batch, options)
    return jax.jit(make, static_argnums=0, donate_argnums=4, keep_unused=True)


def make_host_batch(
    options: Options,
    num_rows: int,
    collector: HostCollector,
    carry: Carry,
    params: Any,
    complete: Any,
) -> BatchResult:
    """Does what `make_batch` does, for environments that are not JAX.

    `complete` is the `host_program` of the options.
    """
    episodes, before = None, collector.fault_stats.faulty_episodes
    if options.episodes_per_batch is None:
        carry, trajectory = collector.collect_batch(
            carry,
            params,
            num_rows,
            limit=options.max_episode_steps,
            at_end=options.at_batch_end,
        )
    else:
        assert options.max_episode_steps is not None  # `Options` has checked it
        carry, trajectory, episodes = collector.collect_padded_episodes(
            collector.resumed(carry),  # an interrupted batch starts again
            params,
            options.episodes_per_batch,
            max_episode_steps=options.max_episode_steps,
        )
    num_faulty = np.int32(collector.fault_stats.faulty_episodes - before)
    result = complete((), trajectory, episodes, num_faulty)
    return result._replace(carry=carry)


@programs.shared
def host_program(options: Options) -> Any:
    """Jits `complete` for the options that it reads, those `of_program`."""
    return jax.jit(functools.partial(complete, options))


def complete(
    options: Options,
    carry: Any,
    trajectory: Transition,
    episodes: Episodes | None,
    num_faulty: jax.Array,
) -> BatchResult:
    """Finds faults and computes the statistics of a batch, and its output."""
    faults = {}
    if options.check_finite and options.on_fault != "drop":
        size = trajectory.mask.size
        number = jnp.arange(size, dtype=jnp.int32).reshape(trajectory.mask.shape)
        faults = {
            name: jnp.where(bad & trajectory.mask, number, NO_FAULT).min()
            for name, bad in nonfinite.nonfinite(trajectory).items()
        }
    if episodes is None:
        stats = summarize(trajectory)
    else:
        num_nonfinite = nonfinite.count_nonfinite(trajectory)
        stats = summarize(episodes).replace(num_nonfinite=num_nonfinite)
    counted = None
    if options.window_episodes:
        counted = episodes or trajectory.replace(**dict.fromkeys(_UNCOUNTED, ()))
    return BatchResult(
        carry=carry,
        output=options.postprocess(trajectory) if options.postprocess else trajectory,
        episodes=episodes,
        stats=stats,
        num_faulty=num_faulty,
        counted=counted,
        faults=faults,
    )


def _restart_all(collector: Collector, carry: Carry) -> Carry:
    """Starts a new episode in every lane that is inside one."""
    restarts, env = carry.episode.episode_length > 0, collector.env
    start = kernel.next_episodes(env, carry, kernel.roots_of(collector, carry))
    return kernel.restart(collector, carry, restarts, start)


def _drop(trajectory: Transition) -> tuple[Transition, jax.Array]:
    """Masks out faulty episodes; returns the trajectory, and the number of them.

    A faulty episode ends at the row that is not finite, so its rows in the batch are
    that row and those before with the same id.
    """
    faulty = nonfinite.is_nonfinite(trajectory)

    # Backwards in time: a row is dropped if the one after it, of the same episode, is.
    def mark(later: tuple, row: tuple) -> tuple[tuple, jax.Array]:
        faulty, episode_id = row
        faulty = faulty | (later[0] & (later[1] == episode_id))
        return (faulty, episode_id), faulty

    rows = faulty, trajectory.episode_id
    start = jnp.zeros_like(faulty[0]), trajectory.episode_id[-1]
    dropped = lax.scan(mark, start, rows, reverse=True)[1]
    kept = trajectory.replace(mask=~dropped)
    return kernel.mask_out(kept), jnp.sum(faulty, dtype=jnp.int32)
