"""Validates host environments, calls, observations and actions.

`SpaceCheck` reports observations and actions that are not finite or outside their
space. `claim` and `is_claimed` record the collector that stepped an environment last.
"""

import inspect
import itertools
from typing import Any

import jax
import numpy as np

from rollout.base import checks
from rollout.envs.host.types import HostVectorEnv
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree, wrapped_env

_SPACES = {"obs": "observation_space", "action": "action_space"}
_NUMBERS = itertools.count(1)


def check_open(is_closed: bool) -> None:
    """Raises if an environment is used after `close`."""
    if is_closed:
        raise ValueError("`env` must be open, got a closed environment.")


def check_interface(env: Any) -> None:
    """Raises for an environment of PettingZoo or of gym before 0.26."""
    checks.check_not_pettingzoo(env)
    name = type(env).__name__
    # Inspect the signature: a call of `reset` may be slow or have side effects.
    try:
        inspect.signature(env.reset).bind(seed=0)
    except TypeError:
        if not hasattr(env, "seed"):
            return  # the first reset raises a specific error
        raise ValueError(
            f"`env` must have the methods of `gymnasium.Env`, got {name} of gym before "
            "0.26, whose `reset` takes no `seed`. Wrap it in a `gymnasium.Env` whose "
            "`reset(seed=, options=)` calls the old `seed` and returns (obs, {}). Its "
            '`step` must split `done` into two flags by `info["TimeLimit.truncated"]`.'
        ) from None
    except (AttributeError, ValueError):  # no `reset`, or a compiled one
        return


def find_method(env: Any, name: str) -> Any:
    """Returns a method of an environment inside wrappers, or None if there is none."""
    while env is not None:
        if (method := getattr(env, name, None)) is not None:
            return method
        env = wrapped_env(env)
    return None


def check_same_spaces(
    first: tuple[Any, Any], spaces: tuple[Any, Any], number: int
) -> None:
    """Raises if the spaces of an environment differ from the first environment."""
    for name, a, b in zip(("observation", "action"), first, spaces, strict=True):
        if a != b:
            raise ValueError(
                f"`make_fns` must create environments with the same {name} space, got "
                f"{a} and, for environment {number}, {b}."
            )


def render_frame(env: Any, number: int | None = None) -> np.ndarray:
    """Renders an environment, or one environment of a vector environment.

    Returns:
        `[H, W, 3]` uint8 frame.

    Raises:
        ValueError: if `env.render` does not return RGB frames.
    """
    try:
        pixels = env.render() if hasattr(env, "render") else None
    except NotImplementedError:  # raised by the base class `gymnasium.Env`
        raise ValueError(
            "`env` must have a method `render` that returns [H, W, 3] uint8, "
            f"{type(getattr(env, 'unwrapped', env)).__name__} has none."
        ) from None
    if number is not None and pixels is not None:
        pixels = pixels[number]
    hint = ""
    if getattr(env, "render_mode", None) != "rgb_array":
        hint = '. Create the environment with `render_mode="rgb_array"`'
    return check_frame(pixels, "`env.render()` must return", hint)


def check_frame(pixels: Any, requirement: str, hint: str = "") -> np.ndarray:
    """Validates a frame, `[H, W, 3]` or `[H, W, 4]` uint8; returns `[H, W, 3]`."""
    frame = np.asarray(pixels)
    if frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] in (3, 4):
        return frame[..., :3].copy()
    got = "None" if pixels is None else f"{frame.dtype} of shape {frame.shape}"
    raise ValueError(f"{requirement} [H, W, 3] uint8, got {got}{hint}.")


class SpaceCheck:
    """Finds observations or actions that are not finite or outside their space.

    Args:
        space: space of a single environment.
        name: "obs" or "action", for error messages.
        slack: tolerance for floats beyond a bound, relative to the bound.
    """

    def __init__(
        self, space: AnySpace, name: str = "obs", *, slack: float = 0.0
    ) -> None:
        space = as_space(space, f"env.{_SPACES[name]}")
        self._name = name
        self._bounds = [_finite_bounds(leaf, slack) for leaf in space.leaves()]

    def find_invalid(self, value: ArrayTree) -> dict[int, ValueError]:
        """Returns an error for each invalid row, by row index; empty if all are valid.

        Args:
            value: `[K, ...]` leaves, observations or actions of `K` environments.
        """
        leaves = [value] if isinstance(value, np.ndarray) else jax.tree.leaves(value)
        causes = {}
        if len(leaves) != len(self._bounds):
            return causes  # a user-defined space with unknown leaves
        for number, (leaf, bounds) in enumerate(zip(leaves, self._bounds, strict=True)):
            if bounds is None:  # every value of the dtype is valid
                continue
            # One test finds both errors: bounds are finite, and NaN compares as False.
            valid = (leaf >= bounds[0]) & (leaf <= bounds[1])
            if np.count_nonzero(valid) < valid.size:
                path, _ = jax.tree.leaves_with_path(value)[number]
                name = self._name + jax.tree_util.keystr(path)
                for row in np.unique(np.argwhere(~valid)[:, 0]).tolist():
                    cause = _explain(name, leaf[row], valid[row], bounds)
                    causes.setdefault(row, cause)
        return causes


def _explain(
    name: str, obs: np.ndarray, valid: np.ndarray, bounds: tuple[np.ndarray, ...]
) -> ValueError:
    """Returns an error that names the first invalid value of a row."""
    index = np.unravel_index(np.argmin(valid), valid.shape)
    position = [int(x) for x in index] if index else ""
    low, high = (np.broadcast_to(x, obs.shape)[index] for x in bounds)
    rule = f"in [{low:g}, {high:g}]" if np.isfinite(obs[index]) else "finite"
    return ValueError(f"`{name}{position}` must be {rule}, got {obs[index]:g}")


def _finite_bounds(
    space: AnySpace, slack: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the bounds clipped to the dtype, or None if every value is valid."""
    if space.bounds is None:
        return None
    dtype, (low, high) = np.dtype(space.dtype), map(np.asarray, space.bounds)
    if dtype.kind == "b":
        return None
    if dtype.kind == "f" and slack:
        low, high = low - slack * np.abs(low), high + slack * np.abs(high)
    # Replace infinite bounds by the largest finite number: infinity is then invalid.
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    if dtype.kind != "f" and (low <= limits.min).all() and (high >= limits.max).all():
        return None
    low = np.maximum(low.astype(np.float64), limits.min)
    high = np.minimum(high.astype(np.float64), limits.max)
    return low.astype(dtype), high.astype(dtype)


def new_user() -> int:
    """Returns the id of a new user, unique in this process."""
    return next(_NUMBERS)


def claim(env: Any, user: int) -> None:
    """Records `user` as the owner of the current episodes of these environments."""
    # `object.__setattr__` also works for frozen dataclasses.
    object.__setattr__(_innermost(env), "_rollout_user", user)


def is_claimed(env: Any, user: int) -> bool:
    """Returns whether `user` is the owner of the current episodes."""
    return getattr(_innermost(env), "_rollout_user", None) == user


def _innermost(env: Any) -> Any:
    """Returns the innermost environments, without wrappers."""
    # Collectors of a wrapper and of the wrapped object step the same environments.
    while isinstance(inner := wrapped_env(env), HostVectorEnv):
        env = inner
    return env
