"""Exactly N episodes: the loop that plays them, and what is made of their rows.

A lane whose episode is over takes the next one of the plan; a lane without one is idle.
An idle lane plays on, so that its environment state stays valid, but its rows are void
and counted nowhere.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from envs import keys
from rollout import kernel
from rollout.kernel import plans
from rollout.types import Carry, Episodes, Transition

if TYPE_CHECKING:
    from rollout.collector import Collector

Acc = TypeVar("Acc")

_COLUMNS = 4  # of the table of results: return, length, flags, lane
_TERMINATED, _TRUNCATED, _FINISHED = 1, 2, 4


@struct.dataclass(kw_only=True)
class _Run:
    """The state of the loop."""

    carry: Carry
    acc: Any
    index: jax.Array  # [B] int32, the episode that the lane plays next; idle from N on
    over: jax.Array  # [B] bool, the lane starts that episode with the coming step
    num_started: jax.Array  # () int32
    table: jax.Array  # [N, 4] int32, one row per episode that is over
    num_steps: jax.Array  # () int32


def play(
    collector: "Collector",
    carry: Carry,
    params: Any,
    fn: Callable[[Acc, Transition], Acc],
    acc: Acc,
    plan: plans.Plan,
    max_steps: jax.Array,
) -> tuple[Carry, Acc, Episodes]:
    """Plays the episodes of `plan`; see `Collector.fold_episodes`."""
    env, policy = keys.barrier(collector.env), collector.policy  # see `kernel.step`
    everywhere = jnp.ones((env.num_envs,), bool)
    run = _Run(
        carry=carry,
        acc=acc,
        index=jnp.arange(env.num_envs, dtype=jnp.int32),
        over=everywhere,
        num_started=jnp.int32(env.num_envs),
        table=jnp.zeros((plan.num_episodes, _COLUMNS), jnp.int32),
        num_steps=jnp.zeros((), jnp.int32),
    )

    def is_playing(run: _Run) -> jax.Array:
        return jnp.any(run.index < plan.num_episodes)

    def step(run: _Run) -> _Run:
        start = plan.start_fn(run.index)
        carry = kernel.restart(env, policy, run.carry, run.over, start)
        carry, transition = kernel.advance(env, policy, carry, params)
        mask = run.index < plan.num_episodes
        over = transition.done | (transition.episode_length >= max_steps)
        seen = kernel.record(collector.record_fn, _as_seen(transition, mask, over))
        index, num_started = plan.next_fn(run.index, over, run.num_started)
        return _Run(
            carry=carry,
            acc=fn(run.acc, seen),
            index=index,
            over=over,
            num_started=num_started,
            table=_note(run.table, run.index, over, transition),
            num_steps=run.num_steps + jnp.sum(mask, dtype=jnp.int32),
        )

    run = _while(is_playing, step, run)
    start = kernel.own_episodes(carry.key, plan.next_id)
    end = kernel.restart(env, policy, run.carry, everywhere, start)
    end = end.replace(next_episode=end.next_episode + plan.num_queued)
    return end, run.acc, _read(run.table, run.num_steps)


def _while(
    is_playing: Callable[[_Run], jax.Array], step: Callable[[_Run], _Run], run: _Run
) -> _Run:
    """`lax.while_loop`, with words for the keys.

    Under `vmap` the loop selects between old and new, which jax's checker of key reuse
    takes for a use of a key.
    """
    words = lax.while_loop(
        lambda words: is_playing(keys.like(words, run)),
        lambda words: keys.words(step(keys.like(words, run))),
        keys.words(run),
    )
    return keys.like(words, run)


@functools.partial(jax.jit, static_argnames="num_episodes")
def collect(
    collector: "Collector",
    carry: Carry,
    params: Any,
    num_episodes: int,
    max_steps: jax.Array,
) -> tuple[Carry, Episodes]:
    """See `Collector.collect_episodes`."""
    plan = plans.queue(carry, num_episodes)
    carry, _, episodes = play(collector, carry, params, _ignore, (), plan, max_steps)
    return carry, episodes


@functools.partial(jax.jit, static_argnames="episodes_per_env")
def collect_per_env(
    collector: "Collector",
    carry: Carry,
    params: Any,
    episodes_per_env: int,
    max_steps: jax.Array,
) -> tuple[Carry, Episodes]:
    """See `Collector.collect_episodes_per_env`."""
    plan = plans.per_env(carry, episodes_per_env)
    carry, _, episodes = play(collector, carry, params, _ignore, (), plan, max_steps)
    return carry, episodes


@functools.partial(jax.jit, static_argnames=("num_episodes", "max_length"))
def collect_padded(
    collector: "Collector",
    carry: Carry,
    params: Any,
    num_episodes: int,
    max_length: int,
) -> tuple[Carry, Transition, Episodes]:
    """See `Collector.collect_padded_episodes`."""
    row = jax.eval_shape(collector.step, carry, params)[1]
    blank = jax.tree.map(
        lambda x: keys.blank((max_length, num_episodes, *x.shape[1:]), x, carry.key),
        row,
    )

    def write(padded: Transition, transition: Transition) -> Transition:
        index = -1 - transition.episode_id - carry.next_episode
        # A lane that is idle writes to a column that is not there.
        column = jnp.where(transition.mask, index, num_episodes)
        place = (transition.episode_length - 1, column)
        return jax.tree.map(
            lambda old, new: old.at[place].set(new, mode="drop"),
            padded,
            keys.words(transition),
        )

    plan, limit = plans.queue(carry, num_episodes), jnp.int32(max_length)
    padded = keys.words(blank)
    carry, padded, episodes = play(collector, carry, params, write, padded, plan, limit)
    return carry, keys.like(padded, blank), episodes


def _ignore(acc: Acc, transition: Transition) -> Acc:
    del transition  # unused
    return acc


def _as_seen(transition: Transition, mask: jax.Array, over: jax.Array) -> Transition:
    """The transition for the fold: idle lanes void, a cut by `max_steps` truncated."""
    truncated = transition.truncated | (over & ~transition.terminated)
    return transition.replace(
        mask=mask,
        reward=jnp.where(mask, transition.reward, 0.0),
        terminated=transition.terminated & mask,
        truncated=truncated & mask,
    )


def _note(
    table: jax.Array, index: jax.Array, over: jax.Array, transition: Transition
) -> jax.Array:
    """Writes the row of each episode that is over: one scatter for all its figures."""
    flags = (
        jnp.where(transition.terminated, _TERMINATED, 0)
        | jnp.where(transition.truncated, _TRUNCATED, 0)
        | jnp.where(transition.done, _FINISHED, 0)
    )
    lane = jnp.arange(index.shape[0], dtype=jnp.int32)
    total = lax.bitcast_convert_type(transition.episode_return, jnp.int32)
    row = jnp.stack([total, transition.episode_length, flags, lane], axis=1)
    # Idle lanes, whose index is N or more, write to rows that are not there.
    where = jnp.where(over, index, table.shape[0])
    return table.at[where].set(row, mode="drop")


def _read(table: jax.Array, num_steps: jax.Array) -> Episodes:
    total, length, flags, lane = table.T
    return Episodes(
        episode_return=lax.bitcast_convert_type(total, jnp.float32),
        episode_length=length,
        terminated=flags & _TERMINATED != 0,
        truncated=flags & _TRUNCATED != 0,
        finished=flags & _FINISHED != 0,
        env_id=lane,
        num_steps=num_steps,
    )
