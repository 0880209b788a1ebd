"""Wraps policies to explore: epsilon-greedy actions, and a random warm-up.

A wrapper applies the wrapped policy at every step, with a key of its own, and passes on
its critic and its extras unchanged: they belong to the wrapped policy's action (a
`log_prob`, say, is not that of the action sent). Draws for lane i do not depend on the
number of lanes. Equal arguments make the same policy, so that jax does not trace again.

The mode of an exploring policy is the mode of the wrapped one, without exploration.
With an `allowed_fn` its action is still an allowed one.

A schedule, as in optax, maps the number of steps that the lane has taken so far, `()`
int32 from 0, to a scalar. Each lane counts its own steps, over episode ends too, in a
`Persistent` part of the policy's state.

An `allowed_fn` maps the batched `obs` to the allowed actions, `[B, n]` bool. Where the
environment has a mask in `info`, `rollout.envs.ObserveInfo(env, fn, initial)` adds it
to `obs`, and `allowed_fn` reads `obs["info"]`. Where nothing is allowed, the action is
drawn from all, since one must be sent, and `extras["none_allowed"]` is True.

The module `noise` has the noise for continuous actions.
"""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from rollout import checks, programs
from rollout.envs import prng
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree
from rollout.policies import masks, schedules, uniform
from rollout.policies.masks import AllowedFn
from rollout.policies.schedules import Schedule
from rollout.types import ActionT, ObsT, ParamsT, Policy, PolicyStep


@programs.shared
def epsilon_greedy(
    policy: Policy[ParamsT, ObsT, ActionT],
    action_space: AnySpace,
    epsilon: float | Schedule,
    *,
    allowed_fn: AllowedFn | None = None,
) -> Policy[ParamsT, ObsT, ActionT]:
    """Replaces each lane's action, with probability epsilon, by a uniformly random one.

    With an `allowed_fn` the random action is an allowed one, and so is that of the
    wrapped policy: where it chose another, a random allowed one takes its place.

    Args:
        policy: the policy to explore around.
        action_space: any space that `random_policy` takes.
        epsilon: probability per step, in [0, 1]: a number, or a schedule over the
            steps of the lane. A schedule's value above 1 counts as 1, one below 0 or
            NaN as 0.
        allowed_fn: `obs` to the allowed actions, as in `random_policy`.

    Returns:
        A policy with the state of `policy`, and a step count in it if `epsilon` is a
        schedule. The extras are those of `policy` for its own action, and with a
        `allowed_fn` also `none_allowed`, `[B]` bool.

    Raises:
        ValueError: if `epsilon` is a number outside [0, 1], or a schedule that does not
            return a scalar; if a bound of the space is not finite; if an `allowed_fn`
            is given and the space is not discrete. While tracing: if the mask is not
            `[B, n]` bool; if the action does not fit the space; with an `allowed_fn`,
            if the extras are neither `()` nor a dict, or have another `none_allowed`.

    Source:
        "Reinforcement Learning: An Introduction", 2nd ed., section 2.2.
    """
    checks.policy(policy)
    schedules.check_scheduled("epsilon", epsilon, highest=1.0)
    action_space = as_space(action_space, "action_space")
    replace = _replacer(action_space, allowed_fn)

    def act(
        policy: Policy,
        epsilon: jax.typing.ArrayLike,
        params: Any,
        obs: ArrayTree,
        state: ArrayTree,
        key: chex.PRNGKey,
    ) -> PolicyStep:
        inner_key, flag_key, action_key = schedules.derive(key, 3)
        decision = schedules.decide(policy, action_space, params, obs, state, inner_key)
        draw = prng.uniform(flag_key, 0.0, 1.0, (uniform.num_lanes(obs),))
        return replace(decision, obs, draw < epsilon, action_key)

    return schedules.scheduled(epsilon, policy, act, policy.init, policy.value)


@programs.shared
def random_warmup(
    policy: Policy[ParamsT, ObsT, ActionT],
    action_space: AnySpace,
    num_steps: int,
    *,
    allowed_fn: AllowedFn | None = None,
) -> Policy[ParamsT, ObsT, ActionT]:
    """Takes random actions in the first steps of each lane, then those of the policy.

    Random actions are uniform; the steps are counted over episode ends. `policy` is
    applied from the first step, so its state and its extras are ready when its actions
    are first taken. With an `allowed_fn` every action is an allowed one, as in
    `epsilon_greedy`.

    Args:
        policy: the policy that acts after the warm-up.
        action_space: any space that `random_policy` takes.
        num_steps: random steps per lane, at least 1. Episodes may end within them.
        allowed_fn: `obs` to the allowed actions, as in `random_policy`.

    Returns:
        A policy with the state of `policy` and a step count, and with the extras of
        `epsilon_greedy`.

    Raises:
        ValueError: if `num_steps` is not an int of at least 1, or as `epsilon_greedy`
            does.

    Source:
        "Spinning Up in Deep RL" (OpenAI, 2018), `start_steps` of DDPG, TD3 and SAC.
    """
    checks.policy(policy)
    num_steps = checks.int_between("num_steps", num_steps)
    action_space = as_space(action_space, "action_space")
    replace = _replacer(action_space, allowed_fn)

    def act(
        policy: Policy,
        num_steps: int,
        step: jax.Array,
        params: Any,
        obs: ArrayTree,
        state: ArrayTree,
        key: chex.PRNGKey,
    ) -> PolicyStep:
        inner_key, action_key = schedules.derive(key, 2)
        decision = schedules.decide(policy, action_space, params, obs, state, inner_key)
        flag = step < num_steps
        if allowed_fn is not None or prng.num_parts() > 1:
            return replace(decision, obs, flag, action_key)

        def draw(action: ArrayTree) -> ArrayTree:
            given = decision._replace(action=action)
            return replace(given, obs, flag, action_key).action

        def draw_if_any(action: ArrayTree) -> ArrayTree:
            return lax.cond(jnp.any(flag), draw, lambda x: x, action)

        # After the warm-up nothing is drawn. Not on a GPU, where a condition would wait
        # for the host, nor on several devices, where lanes would wait for each other.
        action = lax.platform_dependent(
            decision.action, cuda=draw, rocm=draw, default=draw_if_any
        )
        return decision._replace(action=action)

    apply = functools.partial(act, policy, num_steps)
    mode = schedules.act_by_mode(policy, act, 0)
    return schedules.counted(policy.init, apply, mode, policy.value)


def _replacer(
    space: AnySpace, allowed_fn: AllowedFn | None
) -> Callable[[PolicyStep, ArrayTree, jax.Array, chex.PRNGKey], PolicyStep]:
    """Makes the function that replaces actions by random ones where `flag` is True."""
    if allowed_fn is not None:
        masks.check_maskable(space, allowed_fn)
    uniform.check_bounds(space)

    def replace(
        decision: PolicyStep, obs: ArrayTree, flag: jax.Array, key: chex.PRNGKey
    ) -> PolicyStep:
        if allowed_fn is None:
            action = uniform.uniform(space, flag.shape[0], key)
        else:
            allowed = masks.read(allowed_fn, obs, space)
            flag = flag | ~masks.is_allowed(allowed, decision.action, space)
            action, none_allowed = masks.draw(allowed, space, key)
            decision = decision._replace(extras=_flag(decision.extras, none_allowed))
        return decision._replace(action=prng.select(flag, action, decision.action))

    return replace


def _flag(extras: ArrayTree, none_allowed: jax.Array) -> dict[str, Any]:
    """Adds `none_allowed` to the extras, or-ed with that of another wrapper."""
    extras = {} if isinstance(extras, tuple) and not extras else extras
    if not isinstance(extras, dict):
        raise ValueError(
            "With an `allowed_fn` the wrapped policy's extras must be () or a dict, "
            f"got structure {jax.tree.structure(extras)}."
        )
    inner = extras.get("none_allowed", none_allowed)
    kind = jnp.shape(inner), jnp.result_type(inner)
    if kind != (none_allowed.shape, none_allowed.dtype):
        raise ValueError(
            "With an `allowed_fn` the wrapped policy's extras must not have "
            f"`none_allowed`, unless as bool of shape {none_allowed.shape}, got "
            f"{kind[1]} of shape {kind[0]}."
        )
    return {**extras, "none_allowed": none_allowed | inner}
