"""`from_xminigrid`: adapts any grid of XLand-MiniGrid to `Env`.

The discount at the end of an episode is 0 for a termination, and 1 for a truncation.
The suite's auto-reset wrappers are never used.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.envs.optional_import import load
from rollout.envs.spaces import Discrete, space_of
from rollout.envs.suites.convert import check_methods, check_no_reset, like
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep, strong


def from_xminigrid(env: Any, env_params: ArrayTree) -> Env:
    """Makes an `Env` of a grid of XLand-MiniGrid and its parameters.

    The key of a step takes the place of `state.key`.

    Args:
        env: the first result of `xminigrid.make`, or such an environment in a wrapper
            that changes the observation.
        env_params: the second result. Its leaves are the leaves of the `Env`: the rules
            of an XLand, `env_params.replace(ruleset=...)`, may vary from lane to lane.

    Returns:
        An `Env` whose state is that of the suite, without the key.

    Raises:
        TypeError: if `env` lacks the methods of a grid of XLand-MiniGrid.
        ValueError: if `env` resets itself.
    """
    check_methods(env, "XLand-MiniGrid", ("reset", "step", "num_actions"))
    check_no_reset(env)
    # Of what a reset returns: a wrapper of the suite may change it.
    key = jax.eval_shape(jax.random.key, 0)
    seen = jax.eval_shape(env.reset, env_params, key).observation
    return _XminigridEnv(
        env_params=env_params,
        env=env,
        observation_space=space_of(seen),
        action_space=Discrete(env.num_actions(env_params)),
    )


def ids() -> tuple[str, ...]:
    """Lists the ids of XLand-MiniGrid."""
    return tuple(load("xminigrid").registered_environments())


def make(name: str, **options: Any) -> Env:
    """Makes the grid of this id; options are fields of its parameters."""
    return from_xminigrid(*load("xminigrid").make(name, **options))


class _XminigridEnv(struct.PyTreeNode, kw_only=True):
    """An `Env` over a grid; the leaves are the parameters of the suite."""

    env_params: ArrayTree
    env: Any = struct.field(pytree_node=False)
    observation_space: AnySpace = struct.field(pytree_node=False)
    action_space: Discrete = struct.field(pytree_node=False)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        timestep = self.env.reset(self.env_params, key)
        return strong((timestep.state.replace(key=()), timestep.observation))

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: jax.Array) -> EnvStep:
        # Without the suite's auto-reset, this is the true successor, also at an ending.
        timestep = self.env.step(self.env_params, _timestep(state, key), action)
        is_terminal = timestep.discount == 0
        return EnvStep(
            state=jax.tree.map(like, timestep.state.replace(key=()), state),
            obs=timestep.observation,
            reward=jnp.asarray(timestep.reward, jnp.float32),
            terminated=timestep.last() & is_terminal,
            truncated=timestep.last() & ~is_terminal,
            info={},
        )

    def render_frames(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Draws states, `[H, W, 3]` uint8 each."""
        for state in states:
            yield self.env.render(self.env_params, _timestep(state, ()))


def _timestep(state: Any, key: chex.PRNGKey | tuple[()]) -> Any:
    """Makes a time step of the suite; only its state is read."""
    # The suite steps from one time step to the next; ours keeps the state alone.
    return load("xminigrid.types").TimeStep(
        state=state.replace(key=key),
        step_type=None,
        reward=None,
        discount=None,
        observation=None,
    )
