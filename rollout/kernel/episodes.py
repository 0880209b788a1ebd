"""Exactly N episodes: which lane plays which, and the loop that plays them.

Which episodes count is settled by the order in which they start, so that short ones are
not favoured, as they are where those count that end first. A lane whose episode is over
takes the next one of the plan; a lane without one is idle. An idle lane plays on, so
that its environment state stays valid, but its rows are void and counted nowhere.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from envs import keys
from envs.types import VectorEnv
from rollout.kernel import episode_keys, transition
from rollout.kernel.episode_keys import LaneIds, Start
from rollout.types import (
    Accumulators,
    Carry,
    Episode,
    Episodes,
    Policy,
    Transition,
)

Acc = TypeVar("Acc")

_COLUMNS = 3  # of the table of results: length, flags, lane


class Plan(NamedTuple):
    """Which lane plays which of the `N` episodes, numbered as they start."""

    num_episodes: int  # N
    first: jax.Array  # [B] int32, the episodes that the lanes play first
    # Those that they play, where these are over, and how many have started, to those
    # that they play next, and how many have started then.
    next_fn: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    start_fn: Callable[[jax.Array], Start]
    num_queued: int  # how many the call takes from the queue
    after: Start  # the episodes of their own that lanes start when the call is over


def queue(carry: Carry, lanes: LaneIds, num_episodes: int) -> Plan:
    """All lanes serve one queue: whoever is free takes the next episode."""
    own_id = carry.episode.episode_id

    def take_next(
        index: jax.Array, over: jax.Array, num_started: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        rank = jnp.cumsum(over, dtype=jnp.int32)
        taken = jnp.where(over, num_started + rank - 1, index)
        return taken, num_started + rank[-1]

    return Plan(
        num_episodes=num_episodes,
        next_fn=take_next,
        start_fn=lambda index: episode_keys.queued_episodes(
            carry.key, carry.next_episode + index
        ),
        first=lanes.number,
        num_queued=num_episodes,
        after=episode_keys.own_episodes(carry.key, lanes, own_id + lanes.total),
    )


def per_env(carry: Carry, lanes: LaneIds, episodes_per_env: int) -> Plan:
    """Every lane plays the next `episodes_per_env` episodes of its own."""
    num_episodes = episodes_per_env * lanes.total
    first_id = carry.episode.episode_id + lanes.total
    return Plan(
        num_episodes=num_episodes,
        next_fn=lambda index, over, num_started: (
            jnp.where(over, index + lanes.total, index),
            num_started,
        ),
        start_fn=lambda index: episode_keys.own_episodes(
            carry.key, lanes, first_id + (index - lanes.number)
        ),
        first=lanes.number,
        num_queued=0,
        after=episode_keys.own_episodes(carry.key, lanes, first_id + num_episodes),
    )


@struct.dataclass(kw_only=True)
class _Run:
    """The state of the loop."""

    carry: Carry
    acc: Any
    index: jax.Array  # [B] int32, the episode that the lane plays next; idle from N on
    over: jax.Array  # [B] bool, the lane starts that episode with the coming step
    num_started: jax.Array  # () int32
    table: jax.Array  # [N, 3] int32, one row per episode that is over
    figures: chex.ArrayTree  # [N, ...], its return and what was accumulated
    num_steps: jax.Array  # () int32


def play(
    env: VectorEnv,
    policy: Policy,
    carry: Carry,
    params: Any,
    fn: Callable[[Acc, Transition], Acc],
    acc: Acc,
    *,
    plan: Plan,
    max_steps: jax.Array,
    min_steps: jax.Array | None = None,
    accumulators: Accumulators = (),
) -> tuple[Carry, Acc, Episodes]:
    """Plays the episodes of a plan; see `Collector.fold_episodes`."""
    figures = {"accumulators": accumulators}

    # Restart, then step: the other way round the restart of all lanes before the first
    # step would be compiled apart.
    def step(run: _Run) -> _Run:
        start = plan.start_fn(run.index)
        carry = transition.restart(env, policy, run.carry, run.over, start, **figures)
        carry, row, cut = transition.advance(
            env, policy, carry, params, limit=max_steps, **figures
        )
        mask = run.index < plan.num_episodes
        index, num_started = plan.next_fn(run.index, row.done, run.num_started)
        num_steps = run.num_steps + jnp.sum(mask, dtype=jnp.int32)
        if min_steps is not None:  # once there are enough, no episode starts
            is_over = row.done & (num_steps >= min_steps)
            index = jnp.where(is_over, plan.num_episodes, index)
        return _Run(
            carry=carry,
            acc=fn(run.acc, _void(row, mask, cut)),
            index=index,
            over=row.done,
            num_started=num_started,
            table=_note(run.table, plan.first, run.index, row, cut),
            figures=_note_figures(run.figures, run.index, row),
            num_steps=num_steps,
        )

    run = _before_the_first(plan, carry, acc)
    # Of words, for under `vmap` the loop selects between old and new, which jax's
    # checker of key reuse takes for a use of a key.
    words = lax.while_loop(
        lambda words: jnp.any(words.index < plan.num_episodes),
        lambda words: keys.words(step(keys.like(words, run))),
        keys.words(run),
    )
    run = keys.like(words, run)
    everywhere = jnp.ones((env.num_envs,), bool)
    end = transition.restart(env, policy, run.carry, everywhere, plan.after, **figures)
    played = _read(run.table, run.figures, run.num_steps)
    num_queued = plan.num_queued
    if min_steps is not None:
        played = _first(played, min_steps)
        num_queued = jnp.sum(played.mask, dtype=jnp.int32)
    end = end.replace(next_episode=end.next_episode + num_queued)
    return end, run.acc, played


def pad(
    row: Transition, carry: Carry, num_episodes: int, max_length: int
) -> tuple[chex.ArrayTree, Callable[[chex.ArrayTree, Transition], chex.ArrayTree]]:
    """What `play` folds with to get the episodes of the queue whole.

    A trajectory `[L, N, ...]` of the kind of `row`, all zero, and the function that
    writes a transition to its words.
    """

    def write(padded: chex.ArrayTree, row: Transition) -> chex.ArrayTree:
        index = -1 - row.episode_id - carry.next_episode
        # A lane that is idle writes to a column that is not there.
        place = (row.episode_length - 1, jnp.where(row.mask, index, num_episodes))
        return jax.tree.map(
            lambda old, new: old.at[place].set(new, mode="drop"),
            padded,
            keys.words(row),
        )

    return keys.blank(row, carry.key, (max_length, num_episodes), skip=1), write


def _before_the_first(plan: Plan, carry: Carry, acc: Any) -> _Run:
    """The loop before its first step: every lane starts an episode with it."""
    return _Run(
        carry=carry,
        acc=acc,
        index=plan.first,
        over=jnp.ones(plan.first.shape, bool),
        num_started=jnp.int32(plan.first.size),
        table=jnp.zeros((plan.num_episodes, _COLUMNS), jnp.int32),
        figures=jax.tree.map(
            lambda x: jnp.zeros((plan.num_episodes, *x.shape[1:]), x.dtype),
            _figures(carry.episode),
        ),
        num_steps=jnp.zeros((), jnp.int32),
    )


def _void(row: Transition, mask: jax.Array, cut: jax.Array) -> Transition:
    """The transition for the fold: idle lanes void, truncated only what goes on."""
    return row.replace(
        mask=mask,
        reward=jnp.where(mask, row.reward, 0.0),
        terminated=row.terminated & mask,
        truncated=row.truncated & ~(cut & row.terminated) & mask,
    )


def _note(
    table: jax.Array,
    lane: jax.Array,
    index: jax.Array,
    row: Transition,
    cut: jax.Array,
) -> jax.Array:
    """Writes the row of each episode that is over: one scatter for all integers."""
    truncated = row.truncated & ~cut  # by the environment itself
    flags = transition.pack_flags(row.terminated, truncated, row.terminated | truncated)
    figures = (row.episode_length, flags.astype(jnp.int32), lane)
    # Idle lanes, whose index is N or more, write to rows that are not there.
    where = jnp.where(row.done, index, table.shape[0])
    return table.at[where].set(jnp.stack(figures, axis=1), mode="drop")


def _note_figures(
    table: chex.ArrayTree, index: jax.Array, row: Transition
) -> chex.ArrayTree:
    """Writes the figures of each episode that is over; they may be differentiated."""
    return jax.tree.map(
        lambda old, new: old.at[jnp.where(row.done, index, old.shape[0])].set(
            new, mode="drop"
        ),
        table,
        _figures(row),
    )


def _figures(of: Episode | Transition) -> chex.ArrayTree:
    return of.episode_return, of.accumulated


def _read(table: jax.Array, figures: chex.ArrayTree, num_steps: jax.Array) -> Episodes:
    length, flags, lane = table.T
    terminated, truncated, finished = transition.unpack_flags(flags, 3)
    return Episodes(
        episode_return=figures[0],
        episode_length=length,
        terminated=terminated,
        truncated=truncated,
        finished=finished,
        lane=lane,
        num_steps=num_steps,
        mask=jnp.ones(length.shape, bool),
        accumulated=figures[1],
    )


def _first(played: Episodes, min_steps: jax.Array) -> Episodes:
    """The episodes, in the order of their start, that have so many steps together.

    Which they are depends on no lane: others that were started do not count.
    """
    length = played.episode_length
    mask = jnp.cumsum(length) - length < min_steps
    void = played.replace(mask=mask, num_steps=())
    first = keys.select(mask, void, jax.tree.map(jnp.zeros_like, void))
    return first.replace(num_steps=jnp.sum(first.episode_length))
