"""Plays exactly N episodes: assigns them to lanes, and loops until all have ended.

The N episodes are the first to start. The first N episodes to end would be biased
toward short episodes. A lane whose episode ended takes the next episode of the queue; a
lane without an episode is idle. An idle lane keeps stepping, so that its environment
state stays valid, but its rows are masked out.

The loop calls the two halves of `step` separately, since the next episode of a lane
depends on how many other lanes have finished. Each iteration calls `restart`, which
also starts the first episodes, then `advance`, and then counts finished lanes.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from rollout.base import platform, trees
from rollout.envs.types import ArrayTree
from rollout.kernel import keys
from rollout.kernel.keys import Start
from rollout.kernel.state import pack_flags, record, roots_of, unpack_flags
from rollout.kernel.step import advance, restart
from rollout.types import Carry, Episode, Episodes, KernelSpec, Transition

Acc = TypeVar("Acc")


class _Run(struct.PyTreeNode, kw_only=True):
    """State of the loop; episodes are numbered in the order of their start."""

    carry: Carry
    acc: Any
    index: jax.Array  # [B] int32, episode of each lane in the next step; idle from N on
    restarts: jax.Array  # [B] bool, True if that episode starts with the next step
    num_started: jax.Array  # () int32
    num_done: jax.Array  # () int32, only episodes that count
    num_wanted: jax.Array  # () int32, episodes to play
    # Results of the episodes that ended on each of D devices: length, flags and lane,
    # [D, N, 3] int32; return and accumulated values, [D, N, ...].
    results: tuple[jax.Array, ArrayTree]
    num_steps: jax.Array  # () int32, counted only with `min_steps`


def play(
    spec: KernelSpec,
    carry: Carry,
    params: Any,
    fn: Callable[[Acc, Transition, jax.Array], Acc],
    acc: Acc,
    *,
    num_episodes: int,
    per_env: bool = False,
    max_episode_steps: int,
    min_steps: int | None = None,
    holds: bool = True,
) -> tuple[Carry, Acc, Episodes]:
    """Plays episodes from the queue, or from every lane's stream.

    The arguments match `Collector.fold_episodes` and `collect_episodes`, except that
    `fn` receives recorded transitions and a third argument, `[B]` int32: the number of
    each lane's episode among the N, at least N in an idle lane. `holds` may be False if
    `fn` ignores masked-out lanes: then steps after the last episode do not change
    `acc`, and the loop need not restore it.
    """
    env = spec.env
    num_envs, sharding = env.num_envs, env.sharding
    roots = roots_of(spec, carry)
    lane = jnp.arange(num_envs, dtype=jnp.int32)
    number = num_episodes * num_envs if per_env else num_episodes
    start_fn, next_start = _starts(carry, roots.lane, number, lane, per_env)

    def at_limit(row: Transition) -> jax.Array:
        return row.episode_length >= max_episode_steps

    # Restart, then advance: in the other order XLA would compile a second restart, of
    # all lanes, before the first step.
    # After the last episode every lane is idle, so results and counts do not change.
    def step(run: _Run, go: jax.Array) -> _Run:
        carry = restart(spec, run.carry, run.restarts & go, start_fn(run.index))
        policy_key = keys.at_step(roots.policy, carry.step)
        carry, row, hit_limit = advance(spec, carry, params, policy_key, at_limit)
        mask = run.index < number
        masked_row = _mask_idle(row, mask, hit_limit)
        acc = fn(run.acc, record(spec.record_fn, masked_row), run.index)
        next_run = run.replace(
            carry=platform.where_active(go, carry, run.carry),
            acc=platform.where_active(go, acc, run.acc) if holds else acc,
            restarts=row.done,
            results=_write_results(run, row, hit_limit, lane),
        )
        return _assign(next_run, row.done, mask, per_env, min_steps, sharding)

    run = _init_run(carry, acc, number, lane, sharding)
    run = platform.steps_while(lambda run: run.num_done < run.num_wanted, step, run)
    # After the loop, every lane starts the next episode of its stream.
    all_lanes = jnp.ones((num_envs,), bool)
    end = restart(spec, run.carry, all_lanes, next_start)
    episodes, num_queued = _read(run.results), 0 if per_env else number
    if min_steps is not None:
        episodes = keep_first(episodes, min_steps)
        num_queued = jnp.sum(episodes.mask, dtype=jnp.int32)
    return end.replace(next_episode=end.next_episode + num_queued), run.acc, episodes


def pad(
    row: Transition, num_episodes: int, max_length: int
) -> tuple[ArrayTree, Callable[[ArrayTree, Transition, jax.Array], ArrayTree]]:
    """Returns the accumulator and the `fn` with which `play` records whole episodes.

    Returns:
        A zero trajectory `[L, N, ...]` with the dtypes of `row`, and a function that
        writes a transition to it.
    """

    def write(padded: ArrayTree, row: Transition, index: jax.Array) -> ArrayTree:
        # An idle lane writes to column N or beyond: XLA drops writes out of bounds.
        position = row.episode_length - 1, index
        # Scatter raw key data: the key-reuse checker treats a scatter as using keys.
        written = jax.tree.map(
            lambda old, new: old.at[position].set(new, mode="drop"),
            trees.unwrap_keys(padded),
            trees.unwrap_keys(row),
        )
        return trees.wrap_keys(written, padded)

    return trees.blank(row, (max_length, num_episodes), skip=1), write


def _starts(
    carry: Carry, lane_roots: jax.Array, number: int, lane: jax.Array, per_env: bool
) -> tuple[Callable[[jax.Array], Start], Start]:
    """Returns the starts of the episodes that count, and of the episodes after them.

    Returns:
        A function from the number of each lane's episode, `[B]`, to the starts of these
        episodes, and the starts of the episodes with which the lanes resume.
    """
    num_envs = lane.size
    # Skip the ids of discarded episodes: no id is used twice.
    new_id = carry.episode.episode_id + num_envs  # of the next episodes
    if not per_env:
        queue = keys.queue(carry.key)
        return (
            lambda index: Start(queue, -1 - (carry.next_episode + index), None),
            Start(lane_roots, new_id, num_envs),
        )
    # If the current episode has no step, play it as the first episode.
    first_id = jnp.where(carry.episode.episode_length > 0, new_id, new_id - num_envs)
    return (
        lambda index: Start(lane_roots, first_id + (index - lane), num_envs),
        Start(lane_roots, first_id + number, num_envs),
    )


def _init_run(
    carry: Carry, acc: Any, number: int, lane: jax.Array, sharding: Any
) -> _Run:
    """Initializes the loop: assigns the first of N = `number` episodes to the lanes."""
    num_envs = lane.size
    row = jnp.zeros((num_envs, 3), jnp.int32), _values(carry.episode)
    num_parts = sharding.num_devices if sharding else 1
    # One table per device, so that writes need no exchange; `_read` sums the tables.
    results = trees.blank(row, (num_parts, number), skip=1)
    return _Run(
        carry=carry,
        acc=acc,
        # Assign episodes to lanes in order; if N < B the last lanes are idle.
        index=lane,
        restarts=jnp.ones((num_envs,), bool),
        num_started=jnp.int32(num_envs),
        num_done=jnp.int32(0),
        num_wanted=jnp.int32(number),
        results=jax.tree.map(sharding.place, results) if sharding else results,
        num_steps=jnp.int32(0),
    )


def _assign(
    run: _Run,
    done: jax.Array,
    mask: jax.Array,
    per_env: bool,
    min_steps: int | None,
    sharding: Any,
) -> _Run:
    """Assigns the next episodes to the lanes whose episode ended, and counts episodes.

    Args:
        run: the state before the step, except for `carry`, `acc` and `results`.
        done: `[B]` bool, True if the lane's episode ended.
        mask: `[B]` bool, False for idle lanes.
        per_env: whether each lane plays N / B episodes, from the stream of the lane.
        min_steps: number of steps after which no episode starts, or None.
        sharding: sharding of the lanes, or None.
    """
    # All flags share one exchange between devices. `done` also counts idle lanes, which
    # take numbers of at least N and stay idle; `done & mask` counts episodes.
    flags = (done, done & mask) + (() if min_steps is None else (mask,))
    offsets, totals = _count(sharding, *flags)
    if per_env:
        index = jnp.where(done, run.index + done.size, run.index)
    else:
        # Free lanes take episodes in numerical order: the k-th free lane of a device
        # takes the k-th episode after the episodes of earlier devices.
        first = run.num_started + offsets[:, 0]
        rank = jnp.cumsum(_parts(done, first.size), axis=1, dtype=jnp.int32)
        # The barrier keeps XLA from fusing the sum into its consumers, which takes a
        # minute to compile for a GPU with 2,048 lanes.
        rank = trees.barrier(rank)
        next_index = (first[:, None] + rank - 1).reshape(done.shape)
        index = jnp.where(done, next_index, run.index)
    next_run = run.replace(
        index=index,
        num_started=run.num_started + totals[0],
        num_done=run.num_done + totals[1],
    )
    if min_steps is None:
        return next_run
    # Once there are enough steps, no episode starts. Running episodes continue to their
    # end, since `keep_first` may select them.
    num_steps = run.num_steps + totals[2]
    is_enough = num_steps >= min_steps
    num_started = jnp.minimum(run.num_wanted, run.num_started)
    number = run.results[0].shape[1]
    return next_run.replace(
        index=jnp.where(done & is_enough, number, index),
        num_wanted=jnp.where(is_enough, num_started, run.num_wanted),
        num_steps=num_steps,
    )


def _parts(lanes: jax.Array, num_parts: int) -> jax.Array:
    """Splits lanes by device, `[D, B / D, ...]`."""
    return lanes.reshape(num_parts, -1, *lanes.shape[1:])


def _count(sharding: Any, *flags: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Counts the lanes with each flag: the only exchange between devices.

    Returns:
        `[D, len(flags)]` int32, the counts on all earlier devices, and `[len(flags)]`
        int32, the totals.
    """
    num_parts = sharding.num_devices if sharding else 1
    replicate = sharding.replicate if sharding else lambda x: x
    counts = [jnp.sum(_parts(x, num_parts), axis=1, dtype=jnp.int32) for x in flags]
    counts = replicate(jnp.stack(counts, axis=1))
    so_far = replicate(jnp.cumsum(counts, axis=0))
    return so_far - counts, so_far[-1]


def _mask_idle(row: Transition, mask: jax.Array, hit_limit: jax.Array) -> Transition:
    """Masks out idle lanes; removes the limit's flag from terminated episodes."""
    return row.replace(
        mask=mask,
        reward=jnp.where(mask, row.reward, 0.0),
        terminated=row.terminated & mask,
        truncated=row.truncated & ~(hit_limit & row.terminated) & mask,
        final_value=trees.select(mask, row.final_value, trees.blank(row.final_value)),
    )


def _write_results(
    run: _Run, row: Transition, hit_limit: jax.Array, lane: jax.Array
) -> tuple[jax.Array, ArrayTree]:
    """Writes the results of each episode that ended, for `_read`."""
    truncated = row.truncated & ~hit_limit  # by the environment
    flags = pack_flags(row.terminated, truncated, row.terminated | truncated)
    # One scatter for all integers. Values are separate, since gradients pass through.
    integers = row.episode_length, flags.astype(jnp.int32), lane
    num_parts, num_episodes = run.results[0].shape[:2]
    # Idle lanes have an index of at least N: XLA drops their writes out of bounds.
    index = _parts(jnp.where(row.done, run.index, num_episodes), num_parts)

    def write(table: jax.Array, new: jax.Array) -> jax.Array:
        return jax.vmap(lambda old, index, new: old.at[index].set(new, mode="drop"))(
            table, index, _parts(new, num_parts)
        )

    new = jnp.stack(integers, axis=1), _values(row)
    return jax.tree.map(write, run.results, new)


def _values(source: Episode | Transition) -> ArrayTree:
    return source.episode_return, source.accumulated


def _read(results: tuple[jax.Array, ArrayTree]) -> Episodes:
    # Each episode was written on one device and is zero on all other devices.
    table, values = jax.tree.map(
        lambda x: x[0] if len(x) == 1 else jnp.sum(x, axis=0, dtype=x.dtype), results
    )
    length, flags, lane = table.T
    terminated, truncated, finished = unpack_flags(flags, 3)
    return Episodes(
        episode_return=values[0],
        episode_length=length,
        terminated=terminated,
        truncated=truncated,
        finished=finished,
        lane=lane,
        num_steps=jnp.sum(length, dtype=jnp.int32),
        mask=jnp.ones(length.shape, bool),
        accumulated=values[1],
    )


def keep_first(episodes: Episodes, min_steps: int) -> Episodes:
    """Selects the first episodes that have `min_steps` steps together.

    Episodes are in the order of their start, so the selection does not depend on the
    lanes. Later episodes are set to zero, even if they were started.
    """
    length = episodes.episode_length
    mask = jnp.cumsum(length) - length < min_steps
    counted = episodes.replace(mask=mask, num_steps=())
    first = trees.select(mask, counted, trees.blank(counted))
    return first.replace(num_steps=jnp.sum(first.episode_length, dtype=jnp.int32))
