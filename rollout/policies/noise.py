"""Wraps policies of continuous actions to explore with noise.

Keys, extras and schedules work as in `exploration`.
"""

import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks, programs
from rollout.envs import prng
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree
from rollout.policies import schedules
from rollout.policies.schedules import Schedule
from rollout.types import ActionT, ObsT, ParamsT, Policy, PolicyStep


class _Noisy(struct.PyTreeNode, kw_only=True):
    """State of a policy with correlated noise."""

    inner: ArrayTree  # [B, ...]
    noise: jax.Array  # [B, ...]


@programs.shared
def gaussian_noise(
    policy: Policy[ParamsT, ObsT, ActionT],
    action_space: AnySpace,
    scale: float | Schedule,
) -> Policy[ParamsT, ObsT, ActionT]:
    """Adds independent Gaussian noise to the action and clips to the space's bounds.

        a_t + ε_t,  ε_t ~ N(0, scale²)  in every entry

    Args:
        policy: the policy to explore around.
        action_space: a space of floats; without bounds nothing is clipped.
        scale: standard deviation, in the unit of the action: a number of at least 0,
            or a schedule over the steps of the lane.

    Returns:
        A policy with the state of `policy`, and a step count in it if `scale` is a
        schedule. The extras are those of `policy`, for its action without the noise.

    Raises:
        ValueError: if `scale` is a number below 0 or not finite, or a schedule that
            does not return a scalar; if the space is not one of floats. While tracing:
            if the action does not fit the space.

    Source:
        "Addressing Function Approximation Error in Actor-Critic Methods" (TD3),
        arXiv:1802.09477, algorithm 1.
    """
    checks.policy(policy)
    schedules.check_scheduled("scale", scale)
    action_space = as_space(action_space, "action_space")
    add = _adder(action_space)

    def act(
        policy: Policy,
        scale: jax.typing.ArrayLike,
        params: Any,
        obs: ArrayTree,
        state: ArrayTree,
        key: chex.PRNGKey,
    ) -> PolicyStep:
        inner_key, noise_key = schedules.derive(key, 2)
        decision = schedules.decide(policy, action_space, params, obs, state, inner_key)
        noise = _normal(scale, decision.action, noise_key)
        return decision._replace(action=add(decision.action, noise))

    return schedules.scheduled(scale, policy, act, policy.init, policy.value)


@programs.shared
def ornstein_uhlenbeck(
    policy: Policy[ParamsT, ObsT, ActionT],
    action_space: AnySpace,
    scale: float | Schedule,
    *,
    theta: float = 0.15,
    dt: float = 0.01,
) -> Policy[ParamsT, ObsT, ActionT]:
    """Adds noise that is correlated over time, and clips to the space's bounds.

        x_t = x_{t-1} - θ x_{t-1} dt + scale √dt N(0, 1),  a_t + x_t  in every entry

    The noise x starts at 0 with every episode. Its standard deviation tends to
    scale / √(2θ - θ² dt), within some 1 / (θ dt) steps.

    Args:
        policy: the policy to explore around.
        action_space: a space of floats; without bounds nothing is clipped.
        scale: standard deviation that the noise gains per unit of time without
            reversion, in the unit of the action: a number of at least 0, or a
            schedule over the steps of the lane.
        theta: rate of the reversion to 0, per unit of time, at least 0.
        dt: time of one step, above 0; theta * dt must be below 2.

    Returns:
        A policy whose state is that of `policy`, the noise, and a step count if `scale`
        is a schedule. The extras are those of `policy`, for its action without the
        noise.

    Raises:
        ValueError: if `scale`, `theta` or `dt` is a number outside its range, or
            `scale` a schedule that does not return a scalar; if the space is not one
            of floats. While tracing: if the action does not fit the space.

    Source:
        "On the Theory of the Brownian Motion" (Uhlenbeck & Ornstein, Physical Review
        36, 1930), by the Euler-Maruyama step; as exploration in "Continuous control
        with deep reinforcement learning" (DDPG), arXiv:1509.02971, section 3.
    """
    checks.policy(policy)
    schedules.check_scheduled("scale", scale)
    _check_process(theta, dt)
    action_space = as_space(action_space, "action_space")
    add = _adder(action_space)

    def init(num_envs: int) -> _Noisy:
        noise = jnp.zeros((num_envs, *action_space.shape), action_space.dtype)
        return _Noisy(inner=policy.init(num_envs), noise=noise)

    def act(
        policy: Policy,
        scale: jax.typing.ArrayLike,
        params: Any,
        obs: ArrayTree,
        state: _Noisy,
        key: chex.PRNGKey,
    ) -> PolicyStep:
        inner_key, noise_key = schedules.derive(key, 2)
        decision = schedules.decide(
            policy, action_space, params, obs, state.inner, inner_key
        )
        noise = jnp.zeros_like(state.noise)
        if not _is_zero(scale):
            normal = _normal(scale, decision.action, noise_key)
            noise = state.noise - theta * dt * state.noise + math.sqrt(dt) * normal
        return decision._replace(
            action=add(decision.action, noise),
            state=_Noisy(inner=decision.state, noise=noise),
        )

    value_fn = schedules.of_inner(policy.value)
    return schedules.scheduled(scale, policy, act, init, value_fn)


def _adder(space: AnySpace) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Makes the function that adds noise and clips to the bounds of the space."""
    dtype = space.dtype
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            "`action_space` must be one of floats to add noise to, got "
            f"{type(space).__name__} with dtype {dtype}."
        )
    if space.bounds is None:
        return jnp.add

    def add(action: jax.Array, noise: jax.Array) -> jax.Array:
        low, high = (
            jnp.broadcast_to(jnp.asarray(bound, dtype), space.shape)[None]
            for bound in space.bounds
        )
        return jnp.clip(action + noise, low, high)

    return add


def _is_zero(scale: jax.typing.ArrayLike) -> bool:
    """Returns whether the scale is the Python number 0, as in the mode."""
    return isinstance(scale, float) and scale == 0.0


def _normal(
    scale: jax.typing.ArrayLike, action: jax.Array, key: chex.PRNGKey
) -> jax.Array:
    """Draws noise like `action`, with standard deviation `scale`, `[B]` or `()`."""
    if _is_zero(scale):
        return jnp.zeros_like(action)
    scale = jnp.asarray(scale, action.dtype)
    column = scale.reshape(scale.shape + (1,) * (action.ndim - scale.ndim))
    return column * jax.random.normal(prng.inline(key), action.shape, action.dtype)


def _check_process(theta: float, dt: float) -> None:
    if not schedules.is_number(theta) or theta < 0.0:
        raise ValueError(f"`theta` must be at least 0 and finite, got {theta!r}.")
    if not schedules.is_number(dt) or dt <= 0.0:
        raise ValueError(f"`dt` must be above 0 and finite, got {dt!r}.")
    if theta * dt >= 2.0:
        raise ValueError(
            "`theta` * `dt` must be below 2, or the noise grows without bound, got "
            f"{theta} * {dt}."
        )
