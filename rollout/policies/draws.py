"""Uniform draws of actions: from a whole space, or from those that a mask allows.

Every draw takes one key for all lanes, and lane i draws the same whatever their number.
"""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from envs import keys
from envs.types import Space

MaskFn = Callable[[chex.ArrayTree], jax.Array]  # obs to `[B, n]` bool, True: allowed

_LARGEST_N = 1 << 16  # so that the product of two 16-bit halves fits 32 bits
_UNROLL = 32  # columns of a mask per iteration: straight-line for few actions


def uniform(action_space: Space) -> Callable[[int, chex.PRNGKey], chex.ArrayTree]:
    """Makes the function `(num_envs, key)` to actions, drawn from the whole space."""
    if hasattr(action_space, "n"):
        n, dtype = int(action_space.n), jnp.dtype(action_space.dtype)
        return functools.partial(discrete, n, dtype)
    if hasattr(action_space, "low") and hasattr(action_space, "high"):
        _check_bounds(action_space)
        return functools.partial(_draw_box, action_space)
    return functools.partial(_draw_any, action_space)


def discrete(n: int, dtype: jnp.dtype, num_envs: int, key: chex.PRNGKey) -> jax.Array:
    """Draws `[B]` integers below `n`."""
    return _below(n, n, (num_envs,), dtype, key)


def allowed(mask: jax.Array, dtype: jnp.dtype, key: chex.PRNGKey) -> jax.Array:
    """Draws `[B]` actions evenly among those where `mask`, `[B, n]` bool.

    Where nothing is allowed, the action is drawn from all.
    """
    mask = mask | none_allowed(mask)[:, None]
    num_envs, n = mask.shape
    mask = mask.astype(jnp.int32)
    rank = _below(mask.sum(axis=-1), n, (num_envs,), jnp.int32, key)

    # The allowed action of that rank comes after all those up to which at most `rank`
    # are allowed. `jnp.cumsum` would do, but is ten times slower on CPU.
    def count(
        carry: tuple[jax.Array, jax.Array], column: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        so_far, action = carry
        so_far = so_far + column
        return (so_far, action + (so_far <= rank).astype(dtype)), None

    zero = jnp.zeros_like(rank)
    carry = zero, zero.astype(dtype)
    return lax.scan(count, carry, mask.T, unroll=_UNROLL)[0][1]


def is_allowed(mask: jax.Array, action: jax.Array) -> jax.Array:
    """Tells where `mask`, `[B, n]` bool, allows `action`, `[B]`; `[B]` bool."""
    choice = jnp.arange(mask.shape[-1], dtype=action.dtype)
    return (mask & (action[:, None] == choice[None])).any(axis=-1)


def none_allowed(mask: jax.Array) -> jax.Array:
    """Tells where `mask`, `[B, n]` bool, allows nothing; `[B]` bool."""
    return ~mask.any(axis=-1)


def make_mask(mask_fn: MaskFn, obs: chex.ArrayTree, n: int) -> jax.Array:
    """Calls `mask_fn` and refuses what is not `[B, n]` bool."""
    mask, shape = mask_fn(obs), (num_lanes(obs), n)
    if not hasattr(mask, "dtype") or not hasattr(mask, "shape"):
        got = type(mask).__name__
    elif mask.shape != shape or mask.dtype != jnp.bool_:
        got = f"{mask.dtype} of shape {mask.shape}"
    else:
        return jnp.asarray(mask)
    raise ValueError(
        "`mask_fn` must return one bool per lane and action, bool of shape "
        f"{shape}, got {got}."
    )


def check_mask_fn(mask_fn: MaskFn | None, action_space: Space) -> None:
    """Refuses a mask of anything but the actions of a discrete space."""
    if mask_fn is not None and not hasattr(action_space, "n"):
        raise ValueError(
            "`action_space` must be discrete (have `n`) where `mask_fn` is given, got "
            f"{type(action_space).__name__}."
        )


def num_lanes(obs: chex.ArrayTree) -> int:
    """Length of the leading axis, B."""
    return jax.tree.leaves(obs)[0].shape[0]


def _check_bounds(space: Space) -> None:
    bounds = (space.low, space.high)
    if any(isinstance(bound, jax.core.Tracer) for bound in bounds):
        return  # the values are not known while tracing
    if not all(np.all(np.isfinite(np.asarray(bound))) for bound in bounds):
        raise ValueError(
            "`action_space` must have finite bounds to draw from, got "
            f"low={space.low}, high={space.high}."
        )


def _below(
    n: jax.typing.ArrayLike,
    largest: int,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    key: chex.PRNGKey,
) -> jax.Array:
    """Draws integers below `n`, from one word each: the high half of word * n.

    `n` is at most `largest`, a Python int.

    The bias of an integer is below n / 2**32, that of `jax.random.randint` likewise,
    which draws two words and divides.
    """
    if largest > _LARGEST_N:
        return jax.random.randint(keys.inline(key), shape, 0, n, dtype)
    word = jax.random.bits(keys.inline(key), shape, jnp.uint32)
    n, half = jnp.asarray(n, jnp.uint32), jnp.uint32(16)
    low = ((word & jnp.uint32(0xFFFF)) * n) >> half
    return (((word >> half) * n + low) >> half).astype(dtype)


def _draw_box(space: Space, num_envs: int, key: chex.PRNGKey) -> jax.Array:
    shape = (num_envs, *space.shape)
    low, high = (
        jnp.broadcast_to(jnp.asarray(bound, jnp.float32), space.shape)[None]
        for bound in (space.low, space.high)
    )
    uniform = jax.random.uniform(keys.inline(key), shape, minval=low, maxval=high)
    return uniform.astype(space.dtype)


def _draw_any(space: Space, num_envs: int, key: chex.PRNGKey) -> chex.ArrayTree:
    lane = jnp.arange(num_envs, dtype=jnp.int32)
    return jax.vmap(space.sample)(keys.fold_in(key, lane))
