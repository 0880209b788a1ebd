"""Every key that something random is drawn from, and the number of every episode.

Randomness comes from counters, not from a chain of splits. Four streams hang under the
root key; with `fold_in` written as a product,

    root POLICY t      the policy's key at step t
    root ENV i n       lane i's n-th episode, from 0
    root QUEUE e       the e-th episode that `collect_episodes` serves, from 0
    root WARMUP t      the random actions of a warm-up at step t

so the key of lane i's n-th episode is `fold_in(fold_in(fold_in(root, ENV), i), n)`. All
that is random inside an environment comes from the key of its episode: the reset, and
step n by `fold_in(episode_key, n)`, counted from 1. What a policy draws once for the
whole episode comes from `fold_in(episode_key, 2**32 - 1)`. Nothing is drawn that is not
read, and a lane's stream does not depend on the number of lanes.

Lane i's n-th episode has the id `n * B + i`, the e-th of the queue `-1 - e`. Which
lanes these are is data, never a shape: some of the lanes on another device have the
ids and the randomness that they would have on one.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from envs import keys
from envs.types import RESET, ArrayTree, LaneIndex
from rollout.types import Episode

_POLICY, _ENV, _QUEUE, _WARMUP = 0, 1, 2, 3
_ONCE = np.uint32(2**32 - 1)  # under the key of an episode; steps count from 1


class LaneIds(NamedTuple):
    """Numbers of some lanes, and how many lanes there are.

    Attributes:
        number: `[B]` int32, the number of each lane among all lanes.
        total: `()` int32, how many lanes there are in all, on this device or another.
    """

    number: jax.Array  # [B]
    total: Any  # (), also an int


class Roots(NamedTuple):
    """Keys that other keys hang under, the same at every step of a call.

    A fold hashes them once, before its loop over time.

    Attributes:
        policy: `()` key, `root POLICY`.
        warmup: `()` key, `root WARMUP`.
        lane: `[B]` keys, `root ENV i` of every lane.
    """

    policy: chex.PRNGKey  # ()
    warmup: chex.PRNGKey  # ()
    lane: chex.PRNGKey  # [B]


class Start(NamedTuple):
    """The episodes that lanes start next: lanes, as an index into `[B]`, to their keys.

    Attributes:
        stream: the key that those of the episodes hang under: `()` for the queue,
            `[B]` for the lanes' own.
        episode_id: `[B]` int32, their ids.
        total: how many lanes there are in all; None for episodes of the queue.
    """

    stream: chex.PRNGKey  # () or [B]
    episode_id: jax.Array  # [B]
    total: Any  # (), also an int

    def __call__(self, at: LaneIndex) -> chex.PRNGKey:
        """The keys of the episodes of these lanes."""
        episode_id = self.episode_id[at]
        if self.total is None:
            return keys.fold_in(self.stream, -1 - episode_id)
        return keys.fold_in(self.stream[at], episode_id // self.total)

    def number(self, at: LaneIndex) -> jax.Array:
        """Their numbers, int32 from 0: of the queue, or those of the lanes' own."""
        episode_id = self.episode_id[at]
        return jnp.where(episode_id < 0, -1 - episode_id, episode_id)


def all_lanes(num_envs: int) -> LaneIds:
    """The lanes of a collector that has all of them."""
    return LaneIds(jnp.arange(num_envs, dtype=jnp.int32), num_envs)


def roots(root: chex.PRNGKey, lanes: LaneIds) -> Roots:
    """Hashes what the keys of all steps hang under."""
    return Roots(
        policy=policy_root(root),
        warmup=warmup_root(root),
        lane=keys.fold_in(keys.fold_in(root, _ENV), lanes.number),
    )


def policy_root(root: chex.PRNGKey) -> chex.PRNGKey:
    """The key that the policy's keys hang under."""
    return keys.fold_in(root, _POLICY)


def warmup_root(root: chex.PRNGKey) -> chex.PRNGKey:
    """The key that those of the random actions of a warm-up hang under."""
    return keys.fold_in(root, _WARMUP)


def at_step(root: chex.PRNGKey, step: jax.Array) -> chex.PRNGKey:
    """The key of all lanes at a step, under one of `Roots`.

    That of the policy hangs under `Roots.policy`, that of the random actions of a
    warm-up under `Roots.warmup`. With `[T]` steps these are `[T]` keys.
    """
    if step.ndim and jax.random.key_impl(root) == "unsafe_rbg":
        # Its keys are not those of one step each if they are made side by side.
        return lax.map(lambda t: keys.fold_in(root, t), step)
    return keys.fold_in(root, step)


def reset_keys(episode: Episode) -> chex.PRNGKey:
    """`[B]` keys of the resets that the episodes begin with."""
    return keys.fold_in(episode.key, RESET)


def step_keys(episode: Episode) -> chex.PRNGKey:
    """`[B]` keys of the environments' next steps."""
    return keys.fold_in(episode.key, episode.episode_length + 1)


def seeds(episode_key: chex.PRNGKey) -> jax.Array:
    """`[...]` uint32, what environments that are not JAX begin these episodes with.

    It is drawn from the key that a reset in JAX draws from.
    """
    reset_key = keys.fold_in(episode_key, RESET)
    words = jax.vmap(lambda key: keys.bits(key, ()))(reset_key.reshape(-1))
    return words.reshape(episode_key.shape)


def policy_episode_keys(episode_key: chex.PRNGKey) -> chex.PRNGKey:
    """`[B]` keys of what a policy draws once for each of these episodes."""
    return keys.fold_in(episode_key, _ONCE)


def first_episodes(
    root: chex.PRNGKey, lanes: LaneIds, accumulated: ArrayTree
) -> Episode:
    """The first episode of every lane, before its first step."""
    return Episode(
        key=_own_key(keys.fold_in(root, _ENV), lanes.number, 0),
        episode_return=jnp.zeros(lanes.number.shape, jnp.float32),
        episode_length=jnp.zeros(lanes.number.shape, jnp.int32),
        episode_id=lanes.number,
        accumulated=accumulated,
    )


def own_episodes(roots: Roots, total: int, episode_id: jax.Array) -> Start:
    """The lanes' own episodes with these ids, `[B]`."""
    return Start(roots.lane, episode_id, total)


def queue(root: chex.PRNGKey) -> chex.PRNGKey:
    """The key that those of the queue's episodes hang under."""
    return keys.fold_in(root, _QUEUE)


def queued_episodes(queue: chex.PRNGKey, position: jax.Array) -> Start:
    """The episodes at `position`, `[B]` int32, of the queue that all lanes serve."""
    return Start(queue, -1 - position, None)


def keys_of(root: chex.PRNGKey, lanes: LaneIds, episode_id: jax.Array) -> chex.PRNGKey:
    """The keys of episodes by their ids, `[B]`: of the lanes' own, or of the queue."""
    own = _own_key(keys.fold_in(root, _ENV), lanes.number, episode_id // lanes.total)
    queued = keys.fold_in(queue(root), -1 - episode_id)
    return keys.select(episode_id < 0, queued, own)


def _own_key(
    env_key: chex.PRNGKey, lane: jax.Array, number: jax.typing.ArrayLike
) -> chex.PRNGKey:
    """The key of the lane's n-th episode, from 0."""
    return keys.fold_in(keys.fold_in(env_key, lane), number)
