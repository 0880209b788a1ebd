"""Derives every random key, and the id of every episode.

Keys come from counters, not from a chain of splits. Three streams derive from the root
key; with `fold_in` written as a product,

    root POLICY t      the policy's key at step t
    root ENV i n       lane i's n-th episode, from 0
    root QUEUE e       the e-th episode that `collect_episodes` serves, from 0

so the key of lane i's n-th episode is `fold_in(fold_in(fold_in(root, ENV), i), n)`. An
environment draws everything from the key of its episode: the reset, and step n from
`fold_in(episode_key, n)`, counted from 1. A policy's draws for the whole episode come
from `fold_in(episode_key, 2**32 - 1)`. No key is derived unless it is used, and a
lane's stream does not depend on the number of lanes.

Lane i's n-th episode has the id `n * B + i`, the e-th of the queue `-1 - e`. Lanes on
another device have the same ids and randomness as on one.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout.envs import prng, trees
from rollout.envs.types import RESET, LaneIndex, VectorEnv
from rollout.types import Carry

# Fixed for good: with other numbers every draw of a stored run would change.
_POLICY, _ENV, _QUEUE = 0, 1, 2
# Folded into an episode's key for a policy's draws; its reset has 0, step n has n.
POLICY_EPISODE = np.uint32(2**32 - 1)


class Roots(NamedTuple):
    """Keys that other keys derive from, the same at every step of a call.

    A fold hashes them once, before its loop over time.

    Attributes:
        policy: `()` key, `root POLICY`.
        lane: `[B]` keys, `root ENV i` of every lane.
    """

    policy: chex.PRNGKey  # ()
    lane: chex.PRNGKey  # [B]


class Start(NamedTuple):
    """The next episode of each lane; called with a lane index, it returns their keys.

    Attributes:
        stream: the key that the episodes' keys derive from: `()` for the queue, `[B]`
            for the lanes' own episodes.
        episode_id: `[B]` int32, ids of the episodes.
        total: total number of lanes; None for episodes of the queue.
    """

    stream: chex.PRNGKey  # () or [B]
    episode_id: jax.Array  # [B]
    total: Any  # (), also an int

    def __call__(self, at: LaneIndex) -> chex.PRNGKey:
        """Returns the keys of the episodes of these lanes."""
        episode_id = self.episode_id[at]
        # Undoes the numbering of ids: -1 - e in the queue, n * B + i of a lane.
        if self.total is None:
            return prng.fold_in(self.stream, -1 - episode_id)
        return prng.fold_in(self.stream[at], episode_id // self.total)

    def number(self, at: LaneIndex) -> jax.Array:
        """Returns the episodes' numbers, for `Env.at_episode`.

        They are int32 from 0: in the queue, or over lanes.
        """
        episode_id = self.episode_id[at]
        return jnp.where(episode_id < 0, -1 - episode_id, episode_id)


def roots(root: chex.PRNGKey, num_envs: int) -> Roots:
    """Hashes the keys that those of all steps derive from."""
    lane = jnp.arange(num_envs, dtype=jnp.int32)
    return Roots(
        policy=policy_root(root), lane=prng.fold_in(prng.fold_in(root, _ENV), lane)
    )


def next_episodes(env: VectorEnv, carry: Carry, roots: Roots) -> Start:
    """Returns the lanes' own next episodes."""
    return Start(roots.lane, carry.episode.episode_id + env.num_envs, env.num_envs)


def policy_root(root: chex.PRNGKey) -> chex.PRNGKey:
    """Returns the key that the policy's keys derive from."""
    return prng.fold_in(root, _POLICY)


def at_step(root: chex.PRNGKey, step: jax.Array) -> chex.PRNGKey:
    """Returns the policy's key at a step, from `Roots.policy`; `[T]` of `[T]` steps."""
    if step.ndim and jax.random.key_impl(root) == "unsafe_rbg":
        # A batched `fold_in` of this generator makes other keys than single ones.
        return lax.map(lambda t: prng.fold_in(root, t), step)
    return prng.fold_in(root, step)


def seeds(episode_key: chex.PRNGKey) -> jax.Array:
    """Draws `[...]` uint32 seeds, with which host environments reset.

    They come from the key that a reset in JAX draws from.
    """
    reset_key = prng.fold_in(episode_key, RESET)
    words = jax.vmap(lambda key: prng.bits(key, ()))(reset_key.reshape(-1))
    return words.reshape(episode_key.shape)


def queue(root: chex.PRNGKey) -> chex.PRNGKey:
    """Returns the key that the keys of the queue's episodes derive from."""
    return prng.fold_in(root, _QUEUE)


def keys_of(root: chex.PRNGKey, episode_id: jax.Array) -> chex.PRNGKey:
    """Returns the keys of all lanes' episodes by id, `[B]`: their own, or queued."""
    num_envs = episode_id.size
    own = prng.fold_in(roots(root, num_envs).lane, episode_id // num_envs)
    queued = prng.fold_in(queue(root), -1 - episode_id)
    return trees.select(episode_id < 0, queued, own)
