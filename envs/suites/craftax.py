"""`from_craftax`: adapts Craftax and Craftax-Classic to `Env`.

Craftax has the methods of gymnax and merges termination and truncation into `done`. The
adapter calls `is_terminal` without a time limit to determine whether the task ended.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from rollout.base.checks import import_optional
from rollout.envs.suites.convert import check_methods
from rollout.envs.suites.gymnax import GymnaxEnv
from rollout.envs.types import ArrayTree, Env

_IDS = (
    "Craftax-Symbolic-v1",
    "Craftax-Pixels-v1",
    "Craftax-Classic-Symbolic-v1",
    "Craftax-Classic-Pixels-v1",
)
_NO_LIMIT = np.iinfo(np.int32).max
_PIXELS = 16  # size of a block in rendered frames


def from_craftax(env: Any, env_params: ArrayTree | None = None) -> Env:
    """Adapts an environment of Craftax or Craftax-Classic to `Env`.

    `info` contains the discount and the achievements of the episode at its last step,
    which are zero at all other steps.

    Args:
        env: Craftax environment. It may reset automatically, because its `step` is not
            called.
        env_params: parameters of `env`, by default `env.default_params`. They become
            the leaves of the `Env`. `env_params.max_timesteps` is the time limit.

    Returns:
        An `Env` with the state of `env`.

    Raises:
        TypeError: if `env` lacks the methods of a Craftax environment.
    """
    methods = ("reset_env", "step_env", "is_terminal", "action_space", "default_params")
    check_methods(env, "Craftax", methods)
    env_params = env.default_params if env_params is None else env_params
    return _CraftaxEnv(env_params=env_params, env=env)


def ids() -> tuple[str, ...]:
    """Lists the ids of Craftax."""
    import_optional("craftax")  # raises if Craftax is not installed
    return _IDS


def make(name: str, **options: Any) -> Env:
    """Creates an environment by id; `options` are fields of the parameters."""
    suite = import_optional("craftax.craftax_env")
    env = suite.make_craftax_env_from_name(name, auto_reset=False)
    return from_craftax(env, env.default_params.replace(**options))


class _CraftaxEnv(GymnaxEnv, kw_only=True):
    """An `Env` over Craftax; the leaves are the parameters."""

    @property
    def draws(self) -> bool:
        return True

    def _endings(
        self, done: jax.Array, state: ArrayTree
    ) -> tuple[jax.Array, jax.Array]:
        """Splits `done` into termination and truncation."""
        # Remove the limit, so that only the end of the task is terminal. This also
        # separates the flags at the limit: an agent may die in the last step.
        unlimited = self.env_params.replace(max_timesteps=_NO_LIMIT)
        terminated = self.env.is_terminal(state, unlimited)
        return terminated, done & ~terminated

    def render_frames(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Renders states as Craftax does for human players, `[H, W, 3]` uint8 each."""
        if ".craftax_classic." in type(self.env).__module__:
            from craftax.craftax_classic.renderer import make_craftax_pixel_renderer
        else:
            from craftax.craftax.renderer import make_craftax_pixel_renderer
        render = jax.jit(make_craftax_pixel_renderer(_PIXELS))
        for state in states:
            yield np.asarray(render(state)).astype(np.uint8)
