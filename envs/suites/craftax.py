"""`from_craftax`: adapts Craftax or Craftax-Classic to `Env`.

Craftax has the methods of gymnax, and merges its time limit into one flag. Its
`is_terminal` without a limit says whether the task itself ended.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from rollout.envs.optional_import import load
from rollout.envs.suites.convert import check_methods
from rollout.envs.suites.gymnax import _GymnaxEnv
from rollout.envs.types import ArrayTree, Env

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


class _CraftaxEnv(_GymnaxEnv, kw_only=True):
    """An `Env` over Craftax; the leaves are its parameters."""

    @property
    def draws(self) -> bool:
        return True

    def _endings(
        self, done: jax.Array, state: ArrayTree
    ) -> tuple[jax.Array, jax.Array]:
        """Splits Craftax's flag: without a limit, only the task's own end is left."""
        # Both flags stay apart at the limit itself: an agent may die in its last step.
        unlimited = self.env_params.replace(max_timesteps=_NO_LIMIT)
        terminated = self.env.is_terminal(state, unlimited)
        return terminated, done & ~terminated

    def render_frames(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Draws states as Craftax does for human players, `[H, W, 3]` uint8 each."""
        if ".craftax_classic." in type(self.env).__module__:
            from craftax.craftax_classic.renderer import make_craftax_pixel_renderer
        else:
            from craftax.craftax.renderer import make_craftax_pixel_renderer
        draw = jax.jit(make_craftax_pixel_renderer(_PIXELS))
        for state in states:
            yield np.asarray(draw(state)).astype(np.uint8)
