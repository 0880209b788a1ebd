"""`from_navix`: adapts any grid of navix 0.7 or 4 to `Env`.

navix itself distinguishes termination from truncation. Its `_step` is `step` without
the auto-reset.
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
from rollout.envs.suites.convert import Held, check_methods, like
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep, strong


def from_navix(env: Any) -> Env:
    """Makes an `Env` of a grid of navix.

    The key of a step takes the place of `state.key`. Each adapter compiles its own
    program, since navix's grids cannot be compared; `rollout.envs.make` returns the
    same adapter again.

    Args:
        env: the result of `navix.make`, or another `navix.Environment`.

    Returns:
        An `Env` whose state is navix's `Timestep`, without observation, reward,
        `info` and key. It has no parameters.

    Raises:
        TypeError: if `env` lacks the methods of a grid of navix.
    """
    check_methods(env, "navix", ("reset", "_step", "action_space"))
    # navix 0.7 declares fewer values than occur.
    seen = jax.eval_shape(env.reset, jax.eval_shape(jax.random.key, 0)).observation
    actions = env.action_space
    return _NavixEnv(
        held=Held(env),
        observation_space=space_of(seen),
        action_space=Discrete(int(actions.maximum) + 1, jnp.dtype(actions.dtype)),
    )


def ids() -> tuple[str, ...]:
    """Lists the ids of navix."""
    return tuple(load("navix").registry())


def make(name: str, **options: Any) -> Env:
    """Makes the grid of this id; options are those of `navix.make`."""
    return from_navix(load("navix").make(name, **options))


class _NavixEnv(struct.PyTreeNode, kw_only=True):
    """An `Env` over a grid of navix."""

    held: Held = struct.field(pytree_node=False)
    observation_space: AnySpace = struct.field(pytree_node=False)
    action_space: Discrete = struct.field(pytree_node=False)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        timestep = self.held.value.reset(key)
        return strong((_slim(timestep), timestep.observation))

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: jax.Array) -> EnvStep:
        keyed = state.replace(state=state.state.replace(key=key))
        # Not `step`: that resets, instead of stepping, after an ending.
        timestep = self.held.value._step(keyed, action)
        return EnvStep(
            state=jax.tree.map(like, _slim(timestep), state),
            obs=timestep.observation,
            reward=jnp.asarray(timestep.reward, jnp.float32),
            terminated=timestep.is_termination(),
            truncated=timestep.is_truncation(),
            info={},
        )

    def render_frames(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Draws states, `[H, W, 3]` uint8 each."""
        from navix.observations import rgb

        draw = jax.jit(rgb)
        for state in states:
            yield np.asarray(draw(state.state))


def _slim(timestep: Any) -> Any:
    """Keeps the part of a timestep that the next step reads."""
    # The carry of a scan holds the state: the rest would only be copied.
    return timestep.replace(observation=(), action=(), reward=(), step_type=(), info={})
