"""Policies from plain functions, and the random one."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from envs import keys
from envs.types import Space
from rollout.types import Policy, PolicyStep

_LARGEST_N = 1 << 16  # so that the product of two 16-bit halves fits 32 bits


def random_policy(action_space: Space) -> Policy:
    """Makes the policy that draws every action uniformly from the action space.

    Lane i draws the same actions whatever the number of lanes.

    Args:
        action_space: a space with `n` (discrete), with `low` and `high` (box), or any
            other with `sample(key)`.

    Returns:
        A policy without parameters, state and extras; its `params` are not read.

    Raises:
        ValueError: if a bound of the box is not finite.
    """
    if hasattr(action_space, "n"):
        return _discrete_policy(int(action_space.n), jnp.dtype(action_space.dtype))
    if hasattr(action_space, "low") and hasattr(action_space, "high"):
        _check_bounds(action_space)
        draw = _draw_box
    else:
        draw = _draw_any
    return _drawing_policy(functools.partial(draw, action_space))


def stateless_policy(fn: Callable[..., Any]) -> Policy:
    """Makes a policy of a function without memory.

    Args:
        fn: `(params, obs, key)` to `action`, or to the tuple `(action, extras)`; all
            are batched, `[B, ...]`. An action that is itself a tuple must come with
            extras, if only `()`.

    Returns:
        A policy whose state is `()`.
    """

    def apply(
        params: chex.ArrayTree,
        obs: chex.ArrayTree,
        state: chex.ArrayTree,
        key: chex.PRNGKey,
    ) -> PolicyStep:
        result = fn(params, obs, key)
        action, extras = result if isinstance(result, tuple) else (result, ())
        return PolicyStep(action, state, extras)

    return Policy(init=_no_state, apply=apply)


def recurrent_policy(
    fn: Callable[..., Any], init: Callable[[int], chex.ArrayTree]
) -> Policy:
    """Makes a policy of a function with memory.

    Args:
        fn: `(params, obs, state, key)` to `(action, state)` or `(action, state,
            extras)`; all are batched, `[B, ...]`.
        init: `num_envs` to the `[B, ...]` state at the start of an episode, any pytree.

    Returns:
        A policy whose state goes back to `init` at every episode boundary, lane by
        lane.
    """

    def apply(
        params: chex.ArrayTree,
        obs: chex.ArrayTree,
        state: chex.ArrayTree,
        key: chex.PRNGKey,
    ) -> PolicyStep:
        result = fn(params, obs, state, key)
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            got = f"{len(result)} values" if isinstance(result, tuple) else "no tuple"
            raise ValueError(
                "A recurrent policy's `fn` must return (action, state) or (action, "
                f"state, extras), got {got}."
            )
        return PolicyStep(*result)

    return Policy(init=init, apply=apply)


# The same object again, since a policy is a static part of every trace.
@functools.cache
def _discrete_policy(n: int, dtype: jnp.dtype) -> Policy:
    return _drawing_policy(functools.partial(_draw_discrete, n, dtype))


def _drawing_policy(draw: Callable[[int, chex.PRNGKey], chex.ArrayTree]) -> Policy:
    """Makes a policy of `(num_envs, key)` to actions."""

    def apply(
        params: Any, obs: chex.ArrayTree, state: chex.ArrayTree, key: chex.PRNGKey
    ) -> PolicyStep:
        del params  # unused
        return PolicyStep(draw(jax.tree.leaves(obs)[0].shape[0], key), state)

    return Policy(init=_no_state, apply=apply)


def _no_state(num_envs: int) -> tuple[()]:
    del num_envs  # unused
    return ()


def _check_bounds(space: Space) -> None:
    bounds = (space.low, space.high)
    if any(isinstance(bound, jax.core.Tracer) for bound in bounds):
        return  # the values are not known while tracing
    if not all(np.all(np.isfinite(np.asarray(bound))) for bound in bounds):
        raise ValueError(
            "`action_space` must have finite bounds to draw from, got "
            f"low={space.low}, high={space.high}."
        )


def _draw_discrete(
    n: int, dtype: jnp.dtype, num_envs: int, key: chex.PRNGKey
) -> jax.Array:
    """Draws `[B]` integers below n from one word each: the high half of word * n.

    The bias of an integer is below n / 2**32, that of `jax.random.randint` likewise,
    which draws two words and divides.
    """
    if n > _LARGEST_N:
        return jax.random.randint(keys.inline(key), (num_envs,), 0, n, dtype)
    word = jax.random.bits(keys.inline(key), (num_envs,), jnp.uint32)
    n, half = jnp.uint32(n), jnp.uint32(16)
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
