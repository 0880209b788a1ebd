"""Wraps policies to explore: epsilon-greedy actions, a random warm-up, and noise.

Each wrapper is a *transform* of the wrapped policy's decision, made a policy by
`explore`. That applies the wrapped policy at every step, with a key of its own, and
passes on its critic and its extras unchanged: they belong to the wrapped policy's
action (a `log_prob`, say, is not that of the action sent). Draws for lane i do not
depend on the number of lanes. Equal arguments make the same policy, so that jax does
not trace again.

The mode of an exploring policy is the mode of the wrapped one, without exploration.
With an `action_mask_fn` its action is still an allowed one.

A schedule, as in optax, maps the number of steps that the lane has taken so far, `()`
int32 from 0, to a scalar. Each lane counts its own steps, over episode ends too, in a
`Persistent` part of the policy's state.

An `action_mask_fn` maps the batched `obs` to the allowed actions, `[B, n]` bool. Where
the environment has a mask in `info`, `rollout.envs.ObserveInfo(env, fn, initial)` adds
it to `obs`, and `action_mask_fn` reads `obs["info"]`. Where nothing is allowed, the
action is drawn from all, since one must be sent, and `extras["no_valid_action"]` is
True.
"""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from rollout import checks, programs
from rollout.envs import prng, trees
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree
from rollout.policies import masks, outputs, uniform
from rollout.policies.masks import ActionMaskFn
from rollout.types import (
    ActionT,
    Key,
    Obs,
    ObsT,
    Params,
    ParamsT,
    Persistent,
    Policy,
    PolicyState,
    PolicyStep,
    check_policy,
)

Schedule = Callable[[jax.Array], jax.Array]  # steps taken, `()` int32, to `()` float

# `(decision, obs, value, keys)` to the decision to take: `value` is the number, or
# `[B]` float32 of the schedule, 0.0 in the mode; `keys` are two typed keys.
Transform = Callable[[PolicyStep, Obs, Any, list[Key]], PolicyStep]


class Exploring(struct.PyTreeNode, kw_only=True):
    """State of an exploring policy that remembers something itself."""

    inner: ArrayTree  # [B, ...], of the wrapped policy
    step: Any = ()  # Persistent [B] int32, steps taken so far; () without a schedule
    noise: Any = ()  # [B, ...], noise that is correlated over time


def explore(
    policy: Policy,
    action_space: AnySpace,
    transform: Transform,
    value: Any,
    *,
    init_noise: Callable[[int], jax.Array] | None = None,
) -> Policy:
    """Makes the policy whose decisions are those of another, transformed.

    Args:
        policy: the policy to explore around.
        action_space: the space that its actions must fit.
        transform: changes a decision; the state in it is an `Exploring` if the policy
            counts steps or has noise.
        value: what `transform` gets: a number, or a schedule over the lane's steps.
        init_noise: `num_envs` to the noise at the start of an episode, `[B, ...]`.
    """
    check_policy(policy)
    schedule: Any = value if callable(value) else None
    number: Any = value if schedule is None else 0
    # Only then is the state wrapped: else that of the policy stays as it is, and so
    # does what a recurrent policy records of it.
    has_state = schedule is not None or init_noise is not None

    def init(num_envs: int) -> PolicyState:
        inner = policy.init(num_envs)
        if not has_state:
            return inner
        steps = jnp.zeros((num_envs,), jnp.int32)
        return Exploring(
            inner=inner,
            step=Persistent(steps) if schedule else (),
            noise=init_noise(num_envs) if init_noise else (),
        )

    def act(
        use_mode: bool, params: Params, obs: Obs, state: PolicyState, key: Key
    ) -> PolicyStep:
        # The wrapped policy has a key of its own: no draw of a transform is also one of
        # the policy's.
        inner_key, *keys = prng.fold_in(key, jnp.arange(3, dtype=jnp.int32))
        apply: Any = policy.mode if use_mode else policy.apply
        decision = apply(params, obs, state.inner if has_state else state, inner_key)
        who = "The wrapped `policy.apply`"
        num_lanes = uniform.num_lanes(obs)
        decision = outputs.decision(who, decision, action_space, num_lanes, obs)
        now: Any = float(number)
        if schedule:
            step = state.step.value
            now = jax.vmap(schedule)(step).astype(jnp.float32)
            # The count stays at the largest integer, so that no schedule restarts.
            step = step + (step < jnp.iinfo(jnp.int32).max).astype(jnp.int32)
            state = state.replace(step=Persistent(step))
        if has_state:
            decision = decision._replace(state=state.replace(inner=decision.state))
        # The mode explores by 0, but a mask still forbids actions in it.
        return transform(decision, obs, 0.0 if use_mode else now, keys)

    def critic(params: Params, obs: Obs, state: PolicyState) -> ArrayTree:
        assert policy.value is not None
        return policy.value(params, obs, state.inner if has_state else state)

    return Policy(
        init=init,
        apply=functools.partial(act, False),
        mode=functools.partial(act, True) if policy.mode else None,
        value=critic if policy.value else None,
    )


@programs.shared
def epsilon_greedy(
    policy: Policy[ParamsT, ObsT, ActionT],
    action_space: AnySpace,
    epsilon: float | Schedule,
    *,
    action_mask_fn: ActionMaskFn | None = None,
) -> Policy[ParamsT, ObsT, ActionT]:
    """Replaces each lane's action, with probability epsilon, by a uniformly random one.

    With an `action_mask_fn` the random action is an allowed one, and so is that of the
    wrapped policy: where it chose another, a random allowed one takes its place.

    Args:
        policy: the policy to explore around.
        action_space: any space that `random_policy` takes.
        epsilon: probability per step, in [0, 1]: a number, or a schedule over the
            steps of the lane. A schedule's value above 1 counts as 1, one below 0 or
            NaN as 0.
        action_mask_fn: `obs` to the allowed actions, as in `random_policy`.

    Returns:
        A policy with the state of `policy`, and a step count in it if `epsilon` is a
        schedule. The extras are those of `policy` for its own action, and with a
        `action_mask_fn` also `no_valid_action`, `[B]` bool.

    Raises:
        ValueError: if `epsilon` is a number outside [0, 1]; if a bound of the space is
            not finite; if an `action_mask_fn` is given and the space is not discrete.
            While
            tracing: if the mask is not `[B, n]` bool; if the action does not fit the
            space; with an `action_mask_fn`, if the extras are neither `()` nor a dict,
            or have another `no_valid_action`.

    Source:
        "Reinforcement Learning: An Introduction", 2nd ed., section 2.2.
    """
    _check_value("epsilon", epsilon, highest=1.0)
    space = as_space(action_space, "action_space")
    masks.check_drawable(space, action_mask_fn)

    def transform(
        decision: PolicyStep, obs: Obs, epsilon: Any, keys: list[Key]
    ) -> PolicyStep:
        # Strictly below: NaN never explores, and 1 always does, for draws are below 1.
        draw = prng.uniform(keys[0], 0.0, 1.0, (uniform.num_lanes(obs),))
        return _replace(decision, obs, draw < epsilon, keys[1], space, action_mask_fn)

    return explore(policy, space, transform, epsilon)


@programs.shared
def random_warmup(
    policy: Policy[ParamsT, ObsT, ActionT],
    action_space: AnySpace,
    num_steps: int,
    *,
    action_mask_fn: ActionMaskFn | None = None,
) -> Policy[ParamsT, ObsT, ActionT]:
    """Takes random actions in the first steps of each lane, then those of the policy.

    Random actions are uniform; the steps are counted over episode ends. `policy` is
    applied from the first step, so its state and its extras are ready when its actions
    are first taken. With an `action_mask_fn` every action is an allowed one, as in
    `epsilon_greedy`.

    Args:
        policy: the policy that acts after the warm-up.
        action_space: any space that `random_policy` takes.
        num_steps: random steps per lane, at least 1. Episodes may end within them.
        action_mask_fn: `obs` to the allowed actions, as in `random_policy`.

    Returns:
        A policy with the state of `policy` and a step count, and with the extras of
        `epsilon_greedy`.

    Raises:
        ValueError: if `num_steps` is not an int of at least 1, or as `epsilon_greedy`
            does.

    Source:
        "Spinning Up in Deep RL" (OpenAI, 2018), `start_steps` of DDPG, TD3 and SAC.
    """
    num_steps = checks.int_between("num_steps", num_steps)
    space = as_space(action_space, "action_space")
    masks.check_drawable(space, action_mask_fn)

    def transform(
        decision: PolicyStep, obs: Obs, is_warmup: Any, keys: list[Key]
    ) -> PolicyStep:
        flag = jnp.broadcast_to(jnp.asarray(is_warmup) > 0, uniform.num_lanes(obs))
        if action_mask_fn is not None or prng.num_parts() > 1:
            return _replace(decision, obs, flag, keys[0], space, action_mask_fn)

        def draw(action: ArrayTree) -> ArrayTree:
            given = decision._replace(action=action)
            return _replace(given, obs, flag, keys[0], space, None).action

        def draw_if_any(action: ArrayTree) -> ArrayTree:
            return lax.cond(jnp.any(flag), draw, lambda x: x, action)

        # After the warm-up nothing is drawn. Not on a GPU, where a condition would wait
        # for the host, nor on several devices, where lanes would wait for each other.
        action = lax.platform_dependent(
            decision.action, cuda=draw, rocm=draw, default=draw_if_any
        )
        return decision._replace(action=action)

    return explore(policy, space, transform, lambda step: step < num_steps)


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
        ValueError: if `scale` is a number below 0 or not finite; if the space is not
            one of floats. While tracing: if the action does not fit the space.

    Source:
        "Addressing Function Approximation Error in Actor-Critic Methods" (TD3),
        arXiv:1802.09477, algorithm 1.
    """
    return _add_noise(policy, action_space, scale)


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
        ValueError: if `scale`, `theta` or `dt` is a number outside its range; if the
            space is not one of floats. While tracing: if the action does not fit the
            space.

    Source:
        "On the Theory of the Brownian Motion" (Uhlenbeck & Ornstein, Physical Review
        36, 1930), by the Euler-Maruyama step; as exploration in "Continuous control
        with deep reinforcement learning" (DDPG), arXiv:1509.02971, section 3.
    """
    is_known = _is_number(theta) and _is_number(dt)
    if not is_known or theta < 0 or dt <= 0 or theta * dt >= 2:
        raise ValueError(
            "`theta` must be at least 0, `dt` above 0, and `theta` * `dt` below 2, or "
            f"the noise grows without bound, got {theta!r} and {dt!r}."
        )

    def correlate(old: jax.Array, normal: jax.Array) -> jax.Array:
        return old - theta * dt * old + math.sqrt(dt) * normal

    return _add_noise(policy, action_space, scale, correlate)


def _replace(
    decision: PolicyStep,
    obs: Obs,
    flag: jax.Array,
    key: Key,
    space: AnySpace,
    action_mask_fn: ActionMaskFn | None,
) -> PolicyStep:
    """Replaces actions by random ones where `flag`, or where a mask forbids them."""
    if action_mask_fn is None:
        action = uniform.uniform(space, flag.shape[0], key)
    else:
        allowed = masks.read(action_mask_fn, obs, space)
        flag = flag | ~masks.is_allowed(allowed, decision.action, space)
        action, no_valid_action = masks.draw(allowed, space, key)
        extras: Any = decision.extras
        extras = {} if isinstance(extras, tuple) and not extras else extras
        what = (
            "With an `action_mask_fn` the wrapped policy's extras must be () or a dict"
        )
        checks.kind(what, extras, dict)
        # Another wrapper with a mask inside of this one has its own flag.
        inner = extras.get("no_valid_action", no_valid_action)
        what = (
            "The wrapped policy's `no_valid_action` must be that of an `action_mask_fn`"
        )
        checks.same(what, no_valid_action, inner)
        extras = {**extras, "no_valid_action": no_valid_action | inner}
        decision = decision._replace(extras=extras)
    return decision._replace(action=trees.select(flag, action, decision.action))


def _add_noise(
    policy: Policy,
    action_space: AnySpace,
    scale: float | Schedule,
    correlate: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> Policy:
    """Adds noise to the actions, and clips them to the bounds of the space.

    `correlate` maps the noise of the step before and new Gaussian noise to that of this
    step, `[B, ...]`; None takes the Gaussian noise as it is, and keeps no state.
    """
    _check_value("scale", scale)
    space = as_space(action_space, "action_space")
    if space.dtype is None or not jnp.issubdtype(space.dtype, jnp.floating):
        raise ValueError(
            "`action_space` must be one of floats to add noise to, got "
            f"{type(space).__name__} with dtype {space.dtype}."
        )

    def init_noise(num_envs: int) -> jax.Array:
        return jnp.zeros((num_envs, *space.shape), space.dtype)

    def transform(
        decision: PolicyStep, obs: Obs, scale: Any, keys: list[Key]
    ) -> PolicyStep:
        action, state = decision.action, decision.state
        noise = jnp.zeros_like(action)
        # A scale that is known to be 0, as in the mode, draws nothing.
        if not isinstance(scale, float) or scale != 0.0:
            scale = jnp.asarray(scale, action.dtype)  # [B], or ()
            column = scale.reshape(scale.shape + (1,) * (action.ndim - scale.ndim))
            key = prng.inline(keys[0])
            noise = column * jax.random.normal(key, action.shape, action.dtype)
            noise = correlate(state.noise, noise) if correlate else noise
        action = action + noise
        if space.bounds is not None:
            low, high = (
                jnp.broadcast_to(jnp.asarray(bound, space.dtype), space.shape)[None]
                for bound in space.bounds
            )
            action = jnp.clip(action, low, high)
        if correlate:
            state = state.replace(noise=noise)
        return decision._replace(action=action, state=state)

    memory = init_noise if correlate else None
    return explore(policy, space, transform, scale, init_noise=memory)


def _check_value(
    name: str, value: float | Schedule, *, highest: float = math.inf
) -> None:
    """Checks a number in [0, highest]; a schedule is any function."""
    is_known = callable(value) or (_is_number(value) and 0.0 <= value <= highest)
    if not is_known:
        bounded = f"in [0, {highest:g}]"
        what = "at least 0 and finite" if highest == math.inf else bounded
        raise ValueError(f"`{name}` must be {what}, or a schedule, got {value!r}.")


def _is_number(value: Any) -> bool:
    """Returns whether `value` is a finite Python or NumPy number."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and math.isfinite(value)
