"""Uniform draws of actions from a whole space; `masks` draws of those allowed.

Every draw takes one key for all lanes, and lane i draws the same whatever their number.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from envs import keys
from envs.types import Space

_LARGEST_N = 1 << 16  # so that the product of two 16-bit halves fits 32 bits


def uniform(action_space: Space) -> Callable[[int, chex.PRNGKey], chex.ArrayTree]:
    """Makes the function `(num_envs, key)` to actions, drawn from the whole space."""
    if is_discrete(action_space):
        return functools.partial(discrete, describe(action_space))
    if isinstance(getattr(action_space, "spaces", None), Mapping):
        return _draw_each(action_space.spaces)
    if hasattr(action_space, "num"):
        return _draw_repeated(action_space)
    bounds = _bounds(action_space)
    if bounds is None:
        return functools.partial(_draw_any, action_space)
    _check_bounds(*bounds)

    def draw(num_envs: int, key: chex.PRNGKey) -> jax.Array:
        shape = (num_envs, *action_space.shape)
        return keys.draw(key, *bounds, shape, action_space.dtype)

    return draw


class Choice(NamedTuple):
    """What is read of a discrete space; hashable."""

    n: int
    dtype: jnp.dtype
    start: int  # the smallest action


def is_discrete(space: Space) -> bool:
    """Tells whether a space has `n` actions, numbers that follow each other."""
    return hasattr(space, "n") and getattr(space, "shape", ()) == ()


def describe(space: Space) -> Choice:
    """Reads a discrete space, ours or another library's."""
    dtype, start = jnp.dtype(space.dtype), int(getattr(space, "start", 0))
    return Choice(int(space.n), dtype, start)


def discrete(choice: Choice, num_envs: int, key: chex.PRNGKey) -> jax.Array:
    """Draws `[B]` actions."""
    action = below(choice.n, choice.n, (num_envs,), key).astype(choice.dtype)
    return action + jnp.asarray(choice.start, choice.dtype)


def num_lanes(obs: chex.ArrayTree) -> int:
    """Length of the leading axis, B."""
    return jax.tree.leaves(obs)[0].shape[0]


def _bounds(space: Space) -> tuple[jax.Array, jax.Array] | None:
    """The lowest and the highest value of each entry; None if a space has no such."""
    if hasattr(space, "low") and hasattr(space, "high"):
        return space.low, space.high
    if hasattr(space, "nvec"):  # Gymnasium's MultiDiscrete
        low = np.asarray(getattr(space, "start", 0))
        return low, low + np.asarray(space.nvec) - 1
    if hasattr(space, "n"):  # Gymnasium's MultiBinary
        return np.asarray(0), np.asarray(1)
    return None


def _check_bounds(low: jax.typing.ArrayLike, high: jax.typing.ArrayLike) -> None:
    if any(isinstance(bound, jax.core.Tracer) for bound in (low, high)):
        return  # the values are not known while tracing
    if not all(np.all(np.isfinite(np.asarray(bound))) for bound in (low, high)):
        raise ValueError(
            "`action_space` must have finite bounds to draw from, got "
            f"low={low}, high={high}."
        )


def below(
    n: jax.typing.ArrayLike, largest: int, shape: tuple[int, ...], key: chex.PRNGKey
) -> jax.Array:
    """Draws int32 below `n`, from one word each: the high half of word * n.

    `n` is at most `largest`, a Python int. The bias of an integer is below n / 2**32.
    """
    if largest > _LARGEST_N:
        return keys.draw(key, 0, jnp.asarray(n, jnp.int32) - 1, shape, jnp.int32)
    word = keys.bits(key, shape)
    n, half = jnp.asarray(n, jnp.uint32), jnp.uint32(16)
    low = ((word & jnp.uint32(0xFFFF)) * n) >> half
    return (((word >> half) * n + low) >> half).astype(jnp.int32)


def _draw_each(spaces: Mapping[str, Space]) -> Callable[..., dict[str, Any]]:
    """Makes the draw from several spaces by name, each from a key of its own."""
    draw_fns = {name: uniform(spaces[name]) for name in sorted(spaces)}

    def draw(num_envs: int, key: chex.PRNGKey) -> dict[str, Any]:
        return {
            name: draw_fn(num_envs, keys.fold_in(key, number))
            for number, (name, draw_fn) in enumerate(draw_fns.items())
        }

    return draw


def _draw_repeated(space: Space) -> Callable[[int, chex.PRNGKey], chex.ArrayTree]:
    """Makes the draw of `space.num` elements per lane, all in one."""
    draw_fn = uniform(space.space)

    def draw(num_envs: int, key: chex.PRNGKey) -> chex.ArrayTree:
        every = draw_fn(num_envs * space.num, key)
        return jax.tree.map(
            lambda x: x.reshape(num_envs, space.num, *x.shape[1:]), every
        )

    return draw


def _draw_any(space: Space, num_envs: int, key: chex.PRNGKey) -> chex.ArrayTree:
    lane = jnp.arange(num_envs, dtype=jnp.int32)
    return jax.vmap(space.sample)(keys.fold_in(key, lane))
