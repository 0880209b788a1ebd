"""`from_craftax`: adapts Craftax or Craftax-Classic to `Env`.

Craftax merges its time limit into one flag. Its `is_terminal` without a limit says
whether the task itself ended.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.envs.optional_import import load
from rollout.envs.spaces import as_space
from rollout.envs.suites.convert import check_methods, like
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep, strong

_IDS = (
    "Craftax-Symbolic-v1",
    "Craftax-Pixels-v1",
    "Craftax-Classic-Symbolic-v1",
    "Craftax-Classic-Pixels-v1",
)
_NO_LIMIT = np.iinfo(np.int32).max
_PIXELS = 16  # of a block in a drawing


def from_craftax(env: Any, env_params: ArrayTree | None = None) -> Env:
    """Makes an `Env` of Craftax or Craftax-Classic and its parameters.

    `info` is Craftax's own: the achievements of an episode where it ends, zero
    elsewhere, and the discount.

    Args:
        env: an environment of Craftax. Its `step` is not called, so it may reset
            itself.
        env_params: its parameters, by default `env.default_params`: they become the
            leaves of the `Env`. `env_params.max_timesteps` is the time limit.

    Returns:
        An `Env` whose state is Craftax's own.

    Raises:
        TypeError: if `env` lacks the methods of an environment of Craftax.
    """
    needed = ("reset_env", "step_env", "is_terminal", "action_space", "default_params")
    check_methods(env, "Craftax", needed)
    env_params = env.default_params if env_params is None else env_params
    return _CraftaxEnv(env_params=env_params, env=env)


def ids() -> tuple[str, ...]:
    """Lists the ids of Craftax."""
    load("craftax")  # raises if it is not installed
    return _IDS


def make(name: str, **options: Any) -> Env:
    """Makes the environment of this id; options are fields of its parameters."""
    suite = load("craftax.craftax_env")
    env = suite.make_craftax_env_from_name(name, auto_reset=False)
    return from_craftax(env, env.default_params.replace(**options))


class _CraftaxEnv(struct.PyTreeNode, kw_only=True):
    """An `Env` over Craftax; the leaves are its parameters."""

    env_params: ArrayTree
    env: Any = struct.field(pytree_node=False)

    @property
    def observation_space(self) -> AnySpace:
        return as_space(self.env.observation_space(self.env_params))

    @property
    def action_space(self) -> AnySpace:
        return as_space(self.env.action_space(self.env_params))

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        obs, state = self.env.reset_env(key, self.env_params)
        return strong((state, obs))

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: jax.Array) -> EnvStep:
        # `step_env` returns the true successor; `step` may replace it by a reset.
        obs, next_state, reward, done, info = self.env.step_env(
            key, state, action, self.env_params
        )
        # `done` merges both endings: without a limit, only the task's own end is left.
        unlimited = self.env_params.replace(max_timesteps=_NO_LIMIT)
        terminated = self.env.is_terminal(next_state, unlimited)
        return EnvStep(
            state=jax.tree.map(like, next_state, state),
            obs=obs,
            reward=jnp.asarray(reward, jnp.float32),
            terminated=terminated,
            truncated=done & ~terminated,
            info=jax.tree.map(jnp.asarray, info),
        )

    def render_frames(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Draws states as Craftax does for human players, `[H, W, 3]` uint8 each."""
        if ".craftax_classic." in type(self.env).__module__:
            from craftax.craftax_classic.renderer import make_craftax_pixel_renderer
        else:
            from craftax.craftax.renderer import make_craftax_pixel_renderer
        draw = jax.jit(make_craftax_pixel_renderer(_PIXELS))
        for state in states:
            yield np.asarray(draw(state)).astype(np.uint8)
