"""`from_navix`: adapts environments of navix 0.7 and 4 to `Env`.

navix distinguishes termination from truncation. The adapter calls navix's `_step`,
which is `step` without the auto-reset.
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
    Held,
    check_methods,
    keep_dtypes,
    promote,
    shapes_of_reset,
)
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep


def from_navix(env: Any) -> Env:
    """Adapts a navix environment to `Env`.

    The key of each step replaces `state.key`. Every adapter is compiled separately,
    because navix environments do not support comparison. `rollout.envs.make` returns
    the same adapter for the same arguments.

    Args:
        env: result of `navix.make`, or another `navix.Environment`.

    Returns:
        An `Env` whose state is navix's `Timestep` without observation, reward, `info`
        and key. It has no parameters.

    Raises:
        TypeError: if `env` lacks the methods of a navix environment.
    """
    check_methods(env, "navix", ("reset", "_step", "action_space"))
    actions = env.action_space
    return _NavixEnv(
        held=Held(env),
        action_space=Discrete(int(actions.maximum) + 1, jnp.dtype(actions.dtype)),
    )


def ids() -> tuple[str, ...]:
    """Lists the ids of navix."""
    return tuple(import_optional("navix").registry())


def make(name: str, **options: Any) -> Env:
    """Creates an environment by id; `options` are arguments of `navix.make`."""
    return from_navix(import_optional("navix").make(name, **options))


class _NavixEnv(struct.PyTreeNode, kw_only=True):
    """An `Env` over a navix environment."""

    held: Held = struct.field(pytree_node=False)
    action_space: Discrete = struct.field(pytree_node=False)

    @property
    def observation_space(self) -> AnySpace:
        # Infer the space from shapes: navix 0.7 declares bounds that are too narrow.
        return space_of(shapes_of_reset(self)[1])

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        timestep = self.held.value.reset(key)
        return promote(self, key, _slim(timestep), timestep.observation)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: jax.Array) -> EnvStep:
        old_timestep = state.replace(state=state.state.replace(key=key))
        # Do not call `step`, which resets instead of stepping after an episode end.
        timestep = self.held.value._step(old_timestep, action)
        return EnvStep(
            state=keep_dtypes(_slim(timestep), state),
            obs=timestep.observation,
            reward=jnp.asarray(timestep.reward, jnp.float32),
            terminated=timestep.is_termination(),
            truncated=timestep.is_truncation(),
            info={},
        )

    def render_frames(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Renders states, `[H, W, 3]` uint8 each."""
        from navix.observations import rgb

        render = jax.jit(rgb)
        for state in states:
            yield np.asarray(render(state.state))


def _slim(timestep: Any) -> Any:
    """Removes all fields of a timestep that the next step does not read."""
    # The state is part of a scan carry: unused fields would be copied at every step.
    return timestep.replace(observation=(), action=(), reward=(), step_type=(), info={})
