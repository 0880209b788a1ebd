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
    """Returns `fn(reward)` instead of `reward`, with several agents of each.

    Attributes:
        env: the environment.
        fn: a pure function of the reward, `()` float32, that returns a scalar; cast to
            float32.
    """

    fn: Callable[[jax.Array], jax.Array] = struct.field(pytree_node=False)

    for_agents = "all"

    def _check(self) -> None:
        checks.function("fn", self.fn)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> Any:
        """Takes one step."""
        result = self.env.step(key, state, action)
        # `fn` is of one reward; several agents have one each.
        fn = jax.vmap(self.fn) if isinstance(result, MultiAgentStep) else self.fn
        reward = fn(jnp.asarray(result.reward, jnp.float32))
        return result.replace(reward=jnp.asarray(reward, jnp.float32))
