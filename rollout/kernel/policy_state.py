"""Starts the policy's state anew with every episode."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from rollout import checks
from rollout.envs import prng
from rollout.envs.types import ArrayTree
from rollout.kernel.episode_keys import POLICY_EPISODE
from rollout.policies.memory import restart
from rollout.types import EpisodeKey, Policy


def init_policy_state(policy: Policy, episode_key: chex.PRNGKey) -> ArrayTree:
    """Makes the state at the start of the episodes with these keys, `[B]`."""

    def make(x: Any) -> ArrayTree:
        if isinstance(x, EpisodeKey):
            return EpisodeKey(prng.fold_in(episode_key, POLICY_EPISODE))
        # Not weakly typed: the policy returns strong types, and a carry whose types
        # change is traced twice.
        return jnp.asarray(x, jnp.result_type(x))

    made = policy.init(episode_key.size)
    state = jax.tree.map(make, made, is_leaf=lambda x: isinstance(x, EpisodeKey))
    checks.leading_axes("`policy.init` must return leaves", state, episode_key.shape)
    return state


def restart_policy_state(
    policy: Policy, state: ArrayTree, restarts: jax.Array, episode_key: chex.PRNGKey
) -> ArrayTree:
    """Resets the state where `restarts`, except for its `Persistent` parts."""
    return restart(restarts, init_policy_state(policy, episode_key), state)
