"""`TransformReward`: applies a function to every reward."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs.multi_agent import MultiAgentStep
from rollout.envs.types import ArrayTree
from rollout.envs.wrappers.wrapper import Wrapper


class TransformReward(Wrapper):
    """Replaces every reward with `fn(reward)`, for several agents the reward of each.

    Attributes:
        env: the environment.
        fn: pure function that maps a reward, `()` float32, to a scalar, which is cast
            to float32.
    """

    fn: Callable[[jax.Array], jax.Array] = struct.field(pytree_node=False)

    for_agents = "all"

    def _check(self) -> None:
        checks.function("fn", self.fn)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> Any:
        """Takes one step."""
        result = self.env.step(key, state, action)
        # `fn` takes a single reward, so map it over the rewards of several agents.
        fn = jax.vmap(self.fn) if isinstance(result, MultiAgentStep) else self.fn
        reward = fn(jnp.asarray(result.reward, jnp.float32))
        return result.replace(reward=jnp.asarray(reward, jnp.float32))
