"""Wrappers that make a policy explore by acting at random now and then.

Each gives the wrapped policy a key of its own, applies it at every step, and passes on
its extras unchanged: they are those of the wrapped policy's action (a `log_prob`, say,
is not that of the action that was sent). What a wrapper draws for lane i does not
depend on the number of lanes. Build a wrapped policy once and keep it: another call
gives another object, which is traced anew.

The mode of a policy that explores is the mode of the wrapped one, without exploring.
With a `mask_fn` the action is still an allowed one.

A schedule, as optax has them, is a function of the number of steps that the lane has
taken so far, `()` int32 from 0, to a scalar. Each lane counts its own steps, over
episode ends too, in a `Persistent` part of the policy's state.

A `mask_fn` says which actions are allowed, `[B, n]` bool of the batched `obs`. A mask
that the environment gives in `info` is brought into `obs` by
`envs.ObserveInfo(env, fn, initial)`: there `mask_fn` reads `obs["info"]`. Where nothing
is allowed, the action is drawn from all, since one must be sent, and
`extras["none_allowed"]` says so.

The noise for continuous actions is in `noise`.
"""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from envs import keys
from envs.spaces import as_space
from envs.types import AnySpace, ArrayTree
from rollout import checks
from rollout.policies import draws, masks, wrapping
from rollout.policies.masks import MaskFn
from rollout.policies.wrapping import Schedule
from rollout.types import ActionT, Obs, ObsT, Params, ParamsT, Policy, PolicyStep


def epsilon_greedy(
    policy: Policy[ParamsT, ObsT, ActionT],
    action_space: AnySpace,
    epsilon: float | Schedule,
    *,
    mask_fn: MaskFn | None = None,
) -> Policy[ParamsT, ObsT, ActionT]:
    """Replaces the action, with probability epsilon, by a uniformly random one.

    Lane by lane. With a `mask_fn` the random action is an allowed one, and so is that
    of the wrapped policy: where it chose another, a random allowed one takes its place.

    Args:
        policy: the policy to explore around.
        action_space: any space that `random_policy` takes.
        epsilon: probability per step, in [0, 1]: a number, or a schedule over the
            steps of the lane. Of a schedule, a value above 1 counts as 1, and one below
            0 or NaN as 0.
        mask_fn: which actions are allowed, as `random_policy` takes it.

    Returns:
        A policy with the state of `policy`, and a step count in it if `epsilon` is a
        schedule. The extras are those of `policy`, of its own action; with a `mask_fn`
        and `none_allowed`, `[B]` bool.

    Raises:
        ValueError: if `epsilon` is a number outside [0, 1], or a schedule that does not
            return a scalar; if a bound of the space is not finite; if a `mask_fn` is
            given and the space is not discrete. While tracing: if the mask is not
            `[B, n]` bool; if the action is not one of the space; with a `mask_fn`, if
            the extras are neither `()` nor a dict, or have another `none_allowed`.

    Source:
        "Reinforcement Learning: An Introduction", 2nd ed., section 2.2.
    """
    checks.policy(policy)
    wrapping.check_scheduled("epsilon", epsilon, highest=1.0)
    action_space = as_space(action_space, "action_space")
    replace = _replacer(action_space, mask_fn)

    def act(
        policy: Policy,
        epsilon: jax.typing.ArrayLike,
        params: Any,
        obs: ArrayTree,
        state: ArrayTree,
        key: chex.PRNGKey,
    ) -> PolicyStep:
        inner_key, flag_key, action_key = wrapping.derive(key, 3)
        decision = wrapping.decide(policy, action_space, params, obs, state, inner_key)
        draw = keys.uniform(flag_key, 0.0, 1.0, (draws.num_lanes(obs),))
        return replace(decision, obs, draw < epsilon, action_key)

    return wrapping.scheduled(epsilon, policy, act, policy.init)


def random_warmup(
    policy: Policy[ParamsT, ObsT, ActionT],
    action_space: AnySpace,
    num_steps: int,
    *,
    mask_fn: MaskFn | None = None,
) -> Policy[ParamsT, ObsT, ActionT]:
    """Takes random actions in the first steps of each lane, then those of the policy.

    A random action is drawn uniformly; the steps are counted over episode ends.
    `policy` is applied from the first step, so its state and its extras are there when
    its actions are first taken. With a `mask_fn` every action is an allowed one, as in
    `epsilon_greedy`.

    Args:
        policy: the policy that acts after the warm-up.
        action_space: any space that `random_policy` takes.
        num_steps: random steps per lane, at least 1. Episodes may end within them.
        mask_fn: which actions are allowed, as `random_policy` takes it.

    Returns:
        A policy with the state of `policy` and a step count, and with the extras that
        `epsilon_greedy` gives.

    Raises:
        ValueError: if `num_steps` is not an int of at least 1, or as `epsilon_greedy`
            does.

    Source:
        "Spinning Up in Deep RL" (OpenAI, 2018), `start_steps` of DDPG, TD3 and SAC.
    """
    checks.policy(policy)
    num_steps = checks.count("num_steps", num_steps)
    action_space = as_space(action_space, "action_space")
    replace = _replacer(action_space, mask_fn)

    def act(
        policy: Policy,
        num_steps: int,
        step: jax.Array,
        params: Any,
        obs: ArrayTree,
        state: ArrayTree,
        key: chex.PRNGKey,
    ) -> PolicyStep:
        inner_key, action_key = wrapping.derive(key, 2)
        decision = wrapping.decide(policy, action_space, params, obs, state, inner_key)
        return replace(decision, obs, step < num_steps, action_key)

    apply = functools.partial(act, policy, num_steps)
    return wrapping.counted(policy.init, apply, wrapping.act_by_mode(policy, act, 0))


def random_where(
    policy: Policy,
    action_space: AnySpace,
    is_random: jax.Array,
    key: chex.PRNGKey,
    mask_fn: MaskFn | None = None,
) -> Policy:
    """Makes the policy that acts at random in the lanes where `is_random`, `[B]` bool.

    For one step, whose random actions are drawn from `key`: of a warm-up that is
    counted over all lanes, where `random_warmup` counts the steps of each. Those are
    allowed by `mask_fn`; what the policy chooses stays as it is.
    """
    if mask_fn is not None:
        masks.check_maskable(action_space, mask_fn)
    draws.check_bounds(action_space)

    def apply(
        params: Params, obs: Obs, state: ArrayTree, inner_key: chex.PRNGKey
    ) -> PolicyStep:
        decision = wrapping.decide(policy, action_space, params, obs, state, inner_key)

        def draw(action: ArrayTree) -> ArrayTree:
            if mask_fn is None:
                new = draws.uniform(action_space, is_random.shape[0], key)
            else:
                mask = masks.read(mask_fn, obs, action_space)
                new, _ = masks.draw(mask, action_space, key)
            return keys.select(is_random, new, action)

        def draw_if_any(action: ArrayTree) -> ArrayTree:
            return lax.cond(jnp.any(is_random), draw, lambda x: x, action)

        # Once the warm-up is over nothing is drawn, but on a GPU, which would wait for
        # the host to read the condition.
        action = lax.platform_dependent(
            decision.action, cuda=draw, rocm=draw, default=draw_if_any
        )
        return decision._replace(action=action)

    return Policy(init=policy.init, apply=apply)


def _replacer(
    space: AnySpace, mask_fn: MaskFn | None
) -> Callable[[PolicyStep, ArrayTree, jax.Array, chex.PRNGKey], PolicyStep]:
    """Makes `(decision, obs, flag, key)` to the decision, random where `flag`."""
    if mask_fn is not None:
        masks.check_maskable(space, mask_fn)
    draws.check_bounds(space)

    def replace(
        decision: PolicyStep, obs: ArrayTree, flag: jax.Array, key: chex.PRNGKey
    ) -> PolicyStep:
        del obs  # unused
        action = draws.uniform(space, flag.shape[0], key)
        return decision._replace(action=keys.select(flag, action, decision.action))

    if mask_fn is None:
        return replace

    def replace_masked(
        decision: PolicyStep, obs: ArrayTree, flag: jax.Array, key: chex.PRNGKey
    ) -> PolicyStep:
        mask = masks.read(mask_fn, obs, space)
        flag = flag | ~masks.is_allowed(mask, decision.action, space)
        action, none_allowed = masks.draw(mask, space, key)
        return decision._replace(
            action=keys.select(flag, action, decision.action),
            extras=_flag(decision.extras, none_allowed),
        )

    return replace_masked


def _flag(extras: ArrayTree, none_allowed: jax.Array) -> dict[str, Any]:
    """Adds `none_allowed` to the extras; with that of another wrapper, either holds."""
    extras = {} if isinstance(extras, tuple) and not extras else extras
    if not isinstance(extras, dict):
        raise ValueError(
            "With a `mask_fn` the wrapped policy's extras must be () or a dict, got "
            f"structure {jax.tree.structure(extras)}."
        )
    inner = extras.get("none_allowed", none_allowed)
    kind = jnp.shape(inner), jnp.result_type(inner)
    if kind != (none_allowed.shape, none_allowed.dtype):
        raise ValueError(
            "With a `mask_fn` the wrapped policy's extras must not have "
            f"`none_allowed`, unless as bool of shape {none_allowed.shape}, got "
            f"{kind[1]} of shape {kind[0]}."
        )
    return {**extras, "none_allowed": none_allowed | inner}
