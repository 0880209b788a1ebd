"""Plays exactly N episodes: assigns them to lanes, and loops until all are over.

Episodes count in the order in which they start. To count those that end first would
favour short ones. A lane whose episode is over takes the next one of the plan; a lane
without one is idle. An idle lane plays on, so that its environment state stays valid,
but its rows are masked out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from rollout import platform
from rollout.envs import prng
from rollout.envs.types import ArrayTree, sharding_of
from rollout.kernel import episode_keys
from rollout.kernel.episode_keys import Roots, Start
from rollout.kernel.step import (
    advance,
    apply_record_fn,
    pack_flags,
    restart,
    roots_of,
    unpack_flags,
)
from rollout.types import (
    Carry,
    Episode,
    Episodes,
    Transition,
)

Acc = TypeVar("Acc")

_COLUMNS = 3  # of the table of results: length, flags, lane
_MOST = 2**31 - 1  # the largest int32, at which counts of steps stop


class Plan(NamedTuple):
    """Assignment of the `N` episodes to lanes; episodes are numbered as they start."""

    num_episodes: int  # N
    first: jax.Array  # [B] int32, the first episode of each lane
    # `(index, over, first_free)` to the next `index`: the episode of each lane, `[B]`;
    # where it is over, `[B]`; the first episode that each device may take, `[D]`.
    next_fn: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    start_fn: Callable[[jax.Array], Start]
    num_queued: int  # episodes that the call takes from the queue
    after: Start  # the lanes' own episodes, which they start after the call


def queue(carry: Carry, roots: Roots, num_episodes: int) -> Plan:
    """Plans one queue for all lanes: a free lane takes the next episode."""
    next_id, num_envs = _next_id(carry)
    queue_key = episode_keys.queue(carry.key)

    def take_next(index: jax.Array, over: jax.Array, before: jax.Array) -> jax.Array:
        # Free lanes take episodes in the order of their numbers: the k-th of a device
        # takes the k-th after those that earlier devices take. That may be N or more.
        rank = jnp.cumsum(_parts(over, before.size), axis=1, dtype=jnp.int32)
        taken = (before[:, None] + rank - 1).reshape(over.shape)
        return jnp.where(over, taken, index)

    return Plan(
        num_episodes=num_episodes,
        next_fn=take_next,
        start_fn=lambda index: episode_keys.queued_episodes(
            queue_key, carry.next_episode + index
        ),
        first=jnp.arange(num_envs, dtype=jnp.int32),
        num_queued=num_episodes,
        after=episode_keys.own_episodes(roots, num_envs, next_id),
    )


def per_env(carry: Carry, roots: Roots, episodes_per_env: int) -> Plan:
    """Plans the next `episodes_per_env` own episodes of every lane."""
    first_id, num_envs = _next_id(carry)
    num_episodes = episodes_per_env * num_envs
    lane = jnp.arange(num_envs, dtype=jnp.int32)
    return Plan(
        num_episodes=num_episodes,
        next_fn=lambda index, over, _: jnp.where(over, index + num_envs, index),
        start_fn=lambda index: episode_keys.own_episodes(
            roots, num_envs, first_id + (index - lane)
        ),
        first=lane,
        num_queued=0,
        after=episode_keys.own_episodes(roots, num_envs, first_id + num_episodes),
    )


def _next_id(carry: Carry) -> tuple[jax.Array, int]:
    """Returns the ids of the lanes' own next episodes, `[B]`, and B."""
    episode_id = carry.episode.episode_id
    return episode_id + episode_id.size, episode_id.size


class _Run(struct.PyTreeNode, kw_only=True):
    """The state of the loop."""

    carry: Carry
    acc: Any
    index: jax.Array  # [B] int32, the lane's episode in the next step; idle from N on
    over: jax.Array  # [B] bool, that episode starts with the next step
    num_started: jax.Array  # () int32
    num_over: jax.Array  # () int32, of the episodes that count
    num_wanted: jax.Array  # () int32, episodes to play
    table: jax.Array  # [D, N, 3] int32, results of the episodes over on each device
    values: ArrayTree  # [D, N, ...], their returns and accumulated values
    num_steps: jax.Array  # () int32, counted with `min_steps`


def play(
    collector: Any,
    carry: Carry,
    params: Any,
    fn: Callable[[Acc, Transition], Acc],
    acc: Acc,
    *,
    make_plan: Callable[[Carry, Roots, int], Plan],
    number: int,
    max_steps: int,
    min_steps: int | None = None,
    holds: bool = True,
) -> tuple[Carry, Acc, Episodes]:
    """Plays the episodes of a plan; see `Collector.fold_episodes`.

    Args:
        collector: environments, policy, accumulators, and what is recorded.
        carry: as there.
        params: as there.
        fn: as there; it receives recorded transitions.
        acc: as there.
        make_plan: `queue` or `per_env`.
        number: of episodes in the queue, or of each lane.
        max_steps: as there.
        min_steps: as in `Collector.collect_episodes`.
        holds: False if `fn` ignores lanes where `mask` is False: then `acc` need not be
            held in the steps beyond the end.
    """
    env = collector.env
    sharding, roots = sharding_of(env), roots_of(env, carry)
    plan = make_plan(carry, roots, number)

    # Restart, then step: the other way round XLA would compile another restart, of all
    # lanes, before the first step.
    # Beyond the end every lane is idle, so tables and counts do not change.
    def step(run: _Run, go: jax.Array) -> _Run:
        start = plan.start_fn(run.index)
        carry = restart(collector, run.carry, run.over, start)
        carry, row, cut = advance(
            collector, carry, params, roots=roots, limit=max_steps
        )
        mask = run.index < plan.num_episodes
        played = _mask_idle(row, mask, cut)
        acc = fn(run.acc, apply_record_fn(collector.record_fn, played))
        return run.replace(
            carry=platform.hold(go, carry, run.carry),
            acc=platform.hold(go, acc, run.acc) if holds else acc,
            over=row.done,
            table=_write_results(run.table, plan.first, run.index, row, cut),
            values=_write_values(run.values, run.index, row),
            **_assign_next(plan, run, row.done, mask, sharding, min_steps),
        )

    run = _initial_run(plan, carry, acc, sharding)
    run = platform.steps_while(lambda run: run.num_over < run.num_wanted, step, run)
    # Afterwards every lane starts its own next episode, wherever the plan has left it.
    everywhere = jnp.ones((env.num_envs,), bool)
    end = restart(collector, run.carry, everywhere, plan.after)
    played = _read(run.table, run.values)
    num_queued = plan.num_queued
    if min_steps is not None:
        played = first_of(played, min_steps)
        num_queued = jnp.sum(played.mask, dtype=jnp.int32)
    end = end.replace(next_episode=end.next_episode + num_queued)
    return end, run.acc, played


def pad(
    row: Transition, carry: Carry, num_episodes: int, max_length: int
) -> tuple[ArrayTree, Callable[[ArrayTree, Transition], ArrayTree]]:
    """Makes the accumulator and the fold with which `play` records whole episodes.

    Returns:
        A zero trajectory `[L, N, ...]` with the dtypes of `row`, and a function that
        writes a transition to it.
    """

    def write(padded: ArrayTree, row: Transition) -> ArrayTree:
        index = -1 - row.episode_id - carry.next_episode
        # An idle lane writes to column N, out of bounds, which is dropped.
        place = (row.episode_length - 1, jnp.where(row.mask, index, num_episodes))
        return jax.tree.map(
            lambda old, new: old.at[place].set(new, mode="drop"), padded, row
        )

    return prng.blank(row, (max_length, num_episodes), skip=1), write


def _initial_run(plan: Plan, carry: Carry, acc: Any, sharding: Any) -> _Run:
    """Makes the state before the first step, which starts an episode in every lane."""
    num_parts = sharding.num_devices if sharding else 1

    def make(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        table = jnp.zeros((num_parts, plan.num_episodes, *shape), dtype)
        return sharding.place(table) if sharding else table

    return _Run(
        carry=carry,
        acc=acc,
        index=plan.first,
        over=jnp.ones(plan.first.shape, bool),
        num_started=jnp.int32(plan.first.size),
        num_over=jnp.int32(0),
        num_wanted=jnp.int32(plan.num_episodes),
        table=make((_COLUMNS,), jnp.int32),
        values=jax.tree.map(
            lambda x: make(x.shape[1:], x.dtype), _values(carry.episode)
        ),
        num_steps=jnp.zeros((), jnp.int32),
    )


def _assign_next(
    plan: Plan,
    run: _Run,
    done: jax.Array,
    mask: jax.Array,
    sharding: Any,
    min_steps: int | None,
) -> dict[str, jax.Array]:
    """Assigns the next episodes, and updates the counts of the loop."""
    # All flags share one exchange between devices. `done` counts idle lanes too, which
    # take numbers beyond N and so stay idle; `done & mask` counts episodes of the plan.
    flags = (done, done & mask) if min_steps is None else (done, done & mask, mask)
    before, total = _count(sharding, *flags)
    index = plan.next_fn(run.index, done, run.num_started + before[:, 0])
    num_steps, num_wanted = run.num_steps, run.num_wanted
    if min_steps is not None:  # once there are enough steps, no episode starts
        num_steps += jnp.minimum(total[2], _MOST - num_steps)  # without overflow
        is_enough = num_steps >= min_steps
        # Those that started before still play to their end: `first_of` may keep them.
        index = jnp.where(done & is_enough, plan.num_episodes, index)
        started = jnp.minimum(num_wanted, run.num_started)
        num_wanted = jnp.where(is_enough, started, num_wanted)
    return {
        "index": index,
        "num_started": run.num_started + total[0],
        "num_over": run.num_over + total[1],
        "num_wanted": num_wanted,
        "num_steps": num_steps,
    }


def _parts(lanes: jax.Array, num_parts: int) -> jax.Array:
    """Splits lanes by device, `[D, B / D, ...]`."""
    return lanes.reshape(num_parts, -1, *lanes.shape[1:])


def _count(sharding: Any, *flags: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Counts the lanes where a flag is set: the only exchange between devices.

    Returns:
        `[D, len(flags)]` int32, the counts on the devices before each, and
        `[len(flags)]` int32, the totals.
    """
    num_parts = sharding.num_devices if sharding else 1
    replicate = sharding.replicate if sharding else lambda x: x
    counts = [jnp.sum(_parts(x, num_parts), axis=1, dtype=jnp.int32) for x in flags]
    counts = replicate(jnp.stack(counts, axis=1))
    so_far = replicate(jnp.cumsum(counts, axis=0))
    return so_far - counts, so_far[-1]


def _mask_idle(row: Transition, mask: jax.Array, cut: jax.Array) -> Transition:
    """Masks out idle lanes, and drops a `max_steps` truncation where the task ended."""
    return row.replace(
        mask=mask,
        reward=jnp.where(mask, row.reward, 0.0),
        terminated=row.terminated & mask,
        truncated=row.truncated & ~(cut & row.terminated) & mask,
        final_value=jax.tree.map(lambda x: jnp.where(mask, x, 0.0), row.final_value),
    )


def _write_results(
    table: jax.Array,
    lane: jax.Array,
    index: jax.Array,
    row: Transition,
    cut: jax.Array,
) -> jax.Array:
    """Writes the results of each episode that is over: one scatter for all integers."""
    truncated = row.truncated & ~cut  # by the environment itself
    flags = pack_flags(row.terminated, truncated, row.terminated | truncated)
    results = (row.episode_length, flags.astype(jnp.int32), lane)
    return _write(table, index, row.done, jnp.stack(results, axis=1))


def _write_values(table: ArrayTree, index: jax.Array, row: Transition) -> ArrayTree:
    """Writes the values of each episode that is over; gradients pass through them."""
    # Not in the table of integers, which would cut the gradients.
    return jax.tree.map(
        lambda old, new: _write(old, index, row.done, new), table, _values(row)
    )


def _write(
    table: jax.Array, index: jax.Array, done: jax.Array, new: jax.Array
) -> jax.Array:
    """Writes the results of the lanes where `done` into the table of their device."""
    num_parts, num_episodes = table.shape[:2]
    # Idle lanes, whose index is N or more, write out of bounds, which is dropped.
    where = jnp.where(done, index, num_episodes)
    return jax.vmap(lambda old, where, new: old.at[where].set(new, mode="drop"))(
        table, _parts(where, num_parts), _parts(new, num_parts)
    )


def _values(of: Episode | Transition) -> ArrayTree:
    return of.episode_return, of.accumulated


def _read(table: jax.Array, values: ArrayTree) -> Episodes:
    # Each episode was written on one device, and is zero on the others.
    table, values = jax.tree.map(
        lambda x: x[0] if len(x) == 1 else jnp.sum(x, axis=0, dtype=x.dtype),
        (table, values),
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
        num_steps=count_steps(length),
        mask=jnp.ones(length.shape, bool),
        accumulated=values[1],
    )


def count_steps(length: jax.Array) -> jax.Array:
    """Adds lengths, `[N]` int32; 2^31 - 1 stands for that many steps or more."""
    # Two sums: int32 is exact but wraps around, float32 is rough but shows that it did.
    return _saturated(jnp.sum(length), jnp.sum(length.astype(jnp.float32)))


def _saturated(total: jax.Array, rough: jax.Array) -> jax.Array:
    """Saturates an int32 sum that may have overflowed; `rough` is the sum of floats."""
    # An overflowed sum below 2^32 is negative; above that, `rough` is far too large.
    # From 1.5 * 2^31 to 2^32 both tests hold, so the rounding of `rough` is harmless.
    return jnp.where((total < 0) | (rough > 1.5 * _MOST), _MOST, total)


def first_of(played: Episodes, min_steps: int) -> Episodes:
    """Keeps the first episodes, in the order of their start, with `min_steps` together.

    Which ones does not depend on the lanes: others that were started do not count.
    """
    length = played.episode_length
    before, rough = (jnp.cumsum(x) - x for x in (length, length.astype(jnp.float32)))
    mask = _saturated(before, rough) < min_steps
    kept = played.replace(mask=mask, num_steps=())
    first = prng.select(mask, kept, prng.blank(kept))
    return first.replace(num_steps=count_steps(first.episode_length))
