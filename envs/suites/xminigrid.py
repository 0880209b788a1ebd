"""`from_xminigrid`: adapts XLand-MiniGrid environments to `Env`.

The discount at the end of an episode is 0 for termination and 1 for truncation. The
adapter does not use the auto-reset wrappers of XLand-MiniGrid.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.base.checks import import_optional
from rollout.envs.spaces import Discrete, space_of
from rollout.envs.suites.convert import (
    check_methods,
    check_no_reset,
    keep_dtypes,
    promote,
    shapes_of_reset,
)
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep


def from_xminigrid(env: Any, env_params: ArrayTree) -> Env:
    """Adapts an XLand-MiniGrid environment to `Env`.

    The key of each step replaces `state.key`.

    Args:
        env: first result of `xminigrid.make`, possibly inside a wrapper that changes
            the observation.
        env_params: second result of `xminigrid.make`. Its leaves are the leaves of the
            `Env`, so the rules of XLand, `env_params.replace(ruleset=...)`, may vary
            between lanes.

    Returns:
        An `Env` whose state is the state of `env` without the key.

    Raises:
        TypeError: if `env` lacks the methods of an XLand-MiniGrid environment.
        ValueError: if `env` resets automatically.
    """
    check_methods(env, "XLand-MiniGrid", ("reset", "step", "num_actions"))
    check_no_reset(env)
    return _XminigridEnv(
        env_params=env_params,
        env=env,
        action_space=Discrete(env.num_actions(env_params)),
    )


def ids() -> tuple[str, ...]:
    """Lists the ids of XLand-MiniGrid."""
    return tuple(import_optional("xminigrid").registered_environments())


def make(name: str, **options: Any) -> Env:
    """Creates an environment by id; `options` are fields of the parameters."""
    return from_xminigrid(*import_optional("xminigrid").make(name, **options))


class _XminigridEnv(struct.PyTreeNode, kw_only=True):
    """An `Env` over an XLand-MiniGrid environment; the leaves are the parameters."""

    env_params: ArrayTree
    env: Any = struct.field(pytree_node=False)
    action_space: Discrete = struct.field(pytree_node=False)

    @property
    def observation_space(self) -> AnySpace:
        # Infer the space from `reset`, because a wrapper may change the observation.
        return space_of(shapes_of_reset(self)[1])

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        timestep = self.env.reset(self.env_params, key)
        state = timestep.state.replace(key=())
        return promote(self, key, state, timestep.observation)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: jax.Array) -> EnvStep:
        # `timestep` contains the true successor, because no wrapper resets.
        timestep = self.env.step(self.env_params, _timestep(state, key), action)
        is_terminal = timestep.discount == 0
        return EnvStep(
            state=keep_dtypes(timestep.state.replace(key=()), state),
            obs=timestep.observation,
            reward=jnp.asarray(timestep.reward, jnp.float32),
            terminated=timestep.last() & is_terminal,
            truncated=timestep.last() & ~is_terminal,
            info={},
        )

    def render_frames(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Renders states, `[H, W, 3]` uint8 each."""
        for state in states:
            yield self.env.render(self.env_params, _timestep(state, ()))


def _timestep(state: Any, key: chex.PRNGKey | tuple[()]) -> Any:
    """Wraps a state in a `TimeStep`, as `env.step` expects it."""
    # `env.step` reads only the state, so all other fields are None.
    return import_optional("xminigrid.types").TimeStep(
        state=state.replace(key=key),
        step_type=None,
        reward=None,
        discount=None,
        observation=None,
    )
