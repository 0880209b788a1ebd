"""Which lane plays which episode: settled before any of them ends.

The episodes of a call are numbered in the order in which they start, so that short ones
are not favoured, as they are where those count that end first.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rollout import kernel
from rollout.types import Carry


class Plan(NamedTuple):
    """Which lane plays which of the `N` episodes.

    Attributes:
        num_episodes: N.
        next_fn: `(index, over, num_started)` to the `[B]` index of the episode that
            each lane plays next, N or more for none, and the new `num_started`.
        start_fn: `[B]` index of an episode to what starts it.
        num_queued: episodes that the call takes from the queue.
        next_id: `[B]` int32, ids of the episodes of their own that the lanes start
            when the call is over.
    """

    num_episodes: int
    next_fn: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    start_fn: Callable[[jax.Array], kernel.Start]
    num_queued: int
    next_id: jax.Array  # [B]


def queue(carry: Carry, num_episodes: int) -> Plan:
    """All lanes serve one queue: whoever is free takes the next episode."""
    own_id = carry.episode.episode_id

    def take_next(
        index: jax.Array, over: jax.Array, num_started: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        rank = jnp.cumsum(over, dtype=jnp.int32)
        taken = jnp.where(over, num_started + rank - 1, index)
        return taken, num_started + rank[-1]

    def start(index: jax.Array) -> kernel.Start:
        return kernel.queued_episodes(carry.key, carry.next_episode + index)

    next_id = own_id + own_id.shape[0]
    return Plan(num_episodes, take_next, start, num_episodes, next_id)


def per_env(carry: Carry, episodes_per_env: int) -> Plan:
    """Every lane plays the next `episodes_per_env` episodes of its own."""
    num_envs = carry.episode.episode_id.shape[0]
    first_id = carry.episode.episode_id + num_envs
    lane = jnp.arange(num_envs, dtype=jnp.int32)
    num_episodes = episodes_per_env * num_envs

    def take_next(
        index: jax.Array, over: jax.Array, num_started: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return jnp.where(over, index + num_envs, index), num_started

    def start(index: jax.Array) -> kernel.Start:
        return kernel.own_episodes(carry.key, first_id + (index - lane))

    return Plan(num_episodes, take_next, start, 0, first_id + num_episodes)
