"""Any gymnax-style environment, seen through the `Env` contract.

Three kinds of environments are told apart by what they return and define:

- gymnax 1.x: `step_env` returns `(obs, state, reward, terminated, info)` and
  `is_truncated` says whether the time limit was reached.
- Written for gymnax before 1.0: the fourth value merges the time limit into `done`.
  Where `params.max_steps_in_episode` and `state.time` exist, reaching the limit
  counts as truncation, and `done` before it as termination.
- `step_env` returns six values, including both flags.

gymnax's own `step` is never called: it computes a reset at every step.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from envs import keys, spaces
from envs.types import Env, EnvStep, Space


def from_gymnax(env: Any, env_params: chex.ArrayTree) -> Env:
    """Makes an `Env` of a gymnax-style environment and its parameters.

    Args:
        env: an object with `reset_env(key, params)`, `step_env(key, state, action,
            params)`, `action_space(params)` and `observation_space(params)`.
        env_params: its parameters, a pytree: they become the leaves of the `Env`.

    Returns:
        An `Env` that returns the true successor and keeps the two endings apart.

    Raises:
        TypeError: if `env` lacks one of these methods.
    """
    needed = ("reset_env", "step_env", "action_space", "observation_space")
    missing = [name for name in needed if not callable(getattr(env, name, None))]
    if missing:
        raise TypeError(
            f"`env` must have the gymnax methods {', '.join(needed)}, got "
            f"{type(env).__name__} without {', '.join(missing)}."
        )
    return _GymnaxEnv(env_params=env_params, env=env)


@struct.dataclass(kw_only=True)
class _GymnaxEnv:
    """An `Env` over a gymnax environment; the leaves are the gymnax parameters."""

    env_params: chex.ArrayTree
    env: Any = struct.field(pytree_node=False)

    @property
    def observation_space(self) -> Space:
        return _to_space(self.env.observation_space(self.env_params))

    @property
    def action_space(self) -> Space:
        return _to_space(self.env.action_space(self.env_params))

    def reset(self, key: chex.PRNGKey) -> tuple[chex.ArrayTree, chex.ArrayTree]:
        obs, state = self.env.reset_env(self._own(key), self.env_params)
        return jax.tree.map(jnp.asarray, (state, obs))

    def step(
        self, key: chex.PRNGKey, state: chex.ArrayTree, action: chex.ArrayTree
    ) -> EnvStep:
        result = self.env.step_env(self._own(key), state, action, self.env_params)
        obs, next_state, reward, *flags, info = result
        if len(flags) == 2:
            terminated, truncated = flags
        elif len(flags) == 1:
            terminated, truncated = self._endings(flags[0], next_state)
        else:
            raise ValueError(
                "`step_env` must return (obs, state, reward, terminated, info) or "
                "(obs, state, reward, terminated, truncated, info), got "
                f"{len(result)} values."
            )
        return EnvStep(
            state=jax.tree.map(jnp.asarray, next_state),
            obs=jax.tree.map(jnp.asarray, obs),
            reward=jnp.asarray(reward, jnp.float32),
            terminated=jnp.asarray(terminated, bool),
            truncated=jnp.asarray(truncated, bool),
            info=jax.tree.map(jnp.asarray, info),
        )

    def _endings(
        self, done: jax.Array, state: chex.ArrayTree
    ) -> tuple[jax.Array, jax.Array]:
        """Tells termination and truncation apart from one flag and the new state."""
        if not _merges_time_limit(self.env):
            return done, self.env.is_truncated(state, self.env_params)
        time = getattr(state, "time", None)
        limit = getattr(self.env_params, "max_steps_in_episode", None)
        if time is None or limit is None:
            return done, jnp.zeros((), bool)
        truncated = jnp.asarray(time >= limit)
        return done & ~truncated, truncated

    def _own(self, key: chex.PRNGKey) -> chex.PRNGKey:
        # gymnax's own environments draw nothing that inline keys are bad at; the
        # draws of other environments are not known.
        own = type(self.env).__module__.startswith("gymnax.")
        return keys.inline(key) if own else key


def _merges_time_limit(env: Any) -> bool:
    """Tells whether `env` follows the gymnax API from before 1.0."""
    if not callable(getattr(env, "is_truncated", None)):
        return True
    # Old code on the new base class: it overrides the method that was renamed.
    overridden = {
        name
        for cls in type(env).__mro__[:-1]
        for name in vars(cls)
        if not cls.__module__.startswith("gymnax.environments.environment")
    }
    return "is_terminal" in overridden and not (
        overridden & {"is_terminated", "is_truncated"}
    )


def _to_space(space: Any) -> Space:
    """Turns a gymnax `Discrete` or `Box` into one of ours; other spaces stay."""
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n), jnp.dtype(space.dtype))
    if hasattr(space, "low") and hasattr(space, "high"):
        dtype = jnp.dtype(space.dtype)
        return spaces.Box(space.low, space.high, tuple(space.shape), dtype)
    return space
