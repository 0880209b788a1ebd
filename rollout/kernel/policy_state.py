"""Resets the policy's recurrent state at episode boundaries."""

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
    """Returns the policy's state at the start of the episodes with these `[B]` keys."""

    def make(x: Any) -> ArrayTree:
        if isinstance(x, EpisodeKey):
            return EpisodeKey(prng.fold_in(episode_key, POLICY_EPISODE))
        # Strong types, like the policy's outputs: a carry whose types change is traced
        # twice.
        return jnp.asarray(x, jnp.result_type(x))

    initial = policy.init(episode_key.size)
    state = jax.tree.map(make, initial, is_leaf=lambda x: isinstance(x, EpisodeKey))
    checks.leading_axes("`policy.init` must return leaves", state, episode_key.shape)
    return state


def restart_policy_state(
    policy: Policy, state: ArrayTree, restarts: jax.Array, episode_key: chex.PRNGKey
) -> ArrayTree:
    """Resets the state in the lanes with `restarts`, except for `Persistent` parts."""
    return restart(restarts, init_policy_state(policy, episode_key), state)
