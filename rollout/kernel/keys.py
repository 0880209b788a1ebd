"""Derives every random key, and the id of every episode.

Keys derive from counters, without a chain of splits. With `fold_in` written as a
product, three streams derive from the root key:

    root POLICY t      the policy's key at step t
    root ENV i n       lane i's n-th episode, from 0
    root QUEUE e       the e-th episode in the queue of `collect_episodes`, from 0

So the key of lane i's n-th episode is `fold_in(fold_in(fold_in(root, ENV), i), n)`. An
environment derives all randomness from the key of the episode: step n, counted from 1,
uses `fold_in(episode_key, n)`, and the reset uses n = 0. A policy's randomness for a
whole episode comes from `fold_in(episode_key, 2**32 - 1)`. Keys are derived only when
they are used, and the stream of a lane does not depend on the number of lanes.

Lane i's n-th episode has the id `n * B + i`, and the e-th episode of the queue has the
id `-1 - e`. Ids and randomness do not depend on the number of devices.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout.base import prng, trees
from rollout.envs.types import RESET, LaneIndex, VectorEnv
from rollout.types import Carry

# Never change these numbers: the randomness of every stored run would change.
_POLICY, _ENV, _QUEUE = 0, 1, 2
# Folded into an episode's key for the policy; the reset uses 0, and step n uses n.
POLICY_EPISODE = np.uint32(2**32 - 1)


class Roots(NamedTuple):
    """Root keys of a call, the same at every step, hashed once before the loop.

    Attributes:
        policy: `()` key, `root POLICY`.
        lane: `[B]` keys, `root ENV i` of every lane.
    """

    policy: chex.PRNGKey  # ()
    lane: chex.PRNGKey  # [B]


class Start(NamedTuple):
    """The next episode of each lane. Call it with lane indices to get episode keys.

    Attributes:
        stream: key that the episodes' keys derive from: `()` for the queue, `[B]` for
            the streams of the lanes.
        episode_id: `[B]` int32, ids of the episodes.
        total: total number of lanes; None for episodes of the queue.
    """

    stream: chex.PRNGKey  # () or [B]
    episode_id: jax.Array  # [B]
    total: Any  # (), also an int

    def __call__(self, lane_index: LaneIndex) -> chex.PRNGKey:
        """Returns the keys of the episodes of these lanes."""
        episode_id = self.episode_id[lane_index]
        # Invert the ids: -1 - e in the queue, n * B + i in a lane.
        if self.total is None:
            return prng.fold_in(self.stream, -1 - episode_id)
        return prng.fold_in(self.stream[lane_index], episode_id // self.total)

    def number(self, lane_index: LaneIndex) -> jax.Array:
        """Returns the episodes' numbers, for `Env.at_episode`.

        The numbers are int32 and count from 0, in the queue or over all lanes.
        """
        episode_id = self.episode_id[lane_index]
        return jnp.where(episode_id < 0, -1 - episode_id, episode_id)


def roots(root: chex.PRNGKey, num_envs: int) -> Roots:
    """Hashes the root keys of a call."""
    lane = jnp.arange(num_envs, dtype=jnp.int32)
    return Roots(
        policy=policy_root(root), lane=prng.fold_in(prng.fold_in(root, _ENV), lane)
    )


def next_episodes(env: VectorEnv, carry: Carry, roots: Roots) -> Start:
    """Returns the next episode of every lane's stream."""
    return Start(roots.lane, carry.episode.episode_id + env.num_envs, env.num_envs)


def policy_root(root: chex.PRNGKey) -> chex.PRNGKey:
    """Returns the key that the policy's keys derive from."""
    return prng.fold_in(root, _POLICY)


def at_step(root: chex.PRNGKey, step: jax.Array) -> chex.PRNGKey:
    """Returns the policy's key at a step from `Roots.policy`; `[T]` for `[T]` steps."""
    if step.ndim and jax.random.key_impl(root) == "unsafe_rbg":
        # This generator's batched `fold_in` returns other keys than single calls.
        return lax.map(lambda t: prng.fold_in(root, t), step)
    return prng.fold_in(root, step)


def seeds(episode_key: chex.PRNGKey) -> jax.Array:
    """Samples `[...]` uint32 seeds for the resets of host environments.

    The seeds come from the key that a reset in JAX samples from.
    """
    reset_key = prng.fold_in(episode_key, RESET)
    words = jax.vmap(lambda key: prng.bits(key, ()))(reset_key.reshape(-1))
    return words.reshape(episode_key.shape)


def queue(root: chex.PRNGKey) -> chex.PRNGKey:
    """Returns the key that the keys of the queue's episodes derive from."""
    return prng.fold_in(root, _QUEUE)


def keys_of(root: chex.PRNGKey, episode_id: jax.Array) -> chex.PRNGKey:
    """Returns the keys of episodes by id, `[B]`, from lane streams or the queue."""
    num_envs = episode_id.size
    lane_keys = prng.fold_in(roots(root, num_envs).lane, episode_id // num_envs)
    queue_keys = prng.fold_in(queue(root), -1 - episode_id)
    return trees.select(episode_id < 0, queue_keys, lane_keys)
