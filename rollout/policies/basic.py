"""Makes policies from plain functions; the random policy, and the greedy mode."""

from collections.abc import Callable
from typing import Any, overload

from rollout import checks, programs
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree
from rollout.policies import masks, uniform
from rollout.policies.masks import ActionMaskFn
from rollout.types import (
    ActionT,
    Key,
    Obs,
    ObsT,
    Params,
    ParamsT,
    Policy,
    PolicyFn,
    PolicyState,
    PolicyStep,
    check_policy,
)


@programs.shared
def random_policy(
    action_space: AnySpace, *, action_mask_fn: ActionMaskFn | None = None
) -> Policy:
    """Makes the policy that draws every action uniformly from the action space.

    Lane i draws the same actions whatever the number of lanes. Where the environment
    has a mask in `info`, `rollout.envs.ObserveInfo` adds it to `obs`.

    Args:
        action_space: a space of `envs`, Gymnasium or gymnax.
        action_mask_fn: `obs`, `[B, ...]`, to a mask, `[B, n]` bool, True where an
            action is allowed. For a `MultiDiscrete` of `rollout.envs.spaces` it is a
            tuple of one mask per entry, or `[B, *nvec]`; for a `MultiBinary`,
            `[B, *shape, 2]`; for a composite space, masks in its structure, None for a
            part without one. Where nothing is allowed, the action is drawn from all.

    Returns:
        A policy without parameters or state; it ignores `params`. Its extras are `()`,
        or with an `action_mask_fn` `{"no_valid_action": [B] bool}`. Equal arguments
        make the same policy object, here and below, so that jax does not trace again.

    Raises:
        ValueError: if `action_space` is no space; if a bound of a box is not finite; if
            an `action_mask_fn` is given and neither the space nor a part of it is
            discrete; while tracing, if the mask has another shape or is not bool.
    """
    space = as_space(action_space, "action_space")
    masks.check_drawable(space, action_mask_fn)

    def apply(params: Params, obs: Obs, state: PolicyState, key: Key) -> PolicyStep:
        del params  # unused
        if action_mask_fn is None:
            action = uniform.uniform(space, uniform.num_lanes(obs), key)
            return PolicyStep(action, state)
        allowed = masks.read(action_mask_fn, obs, space)
        action, no_valid_action = masks.draw(allowed, space, key)
        return PolicyStep(action, state, {"no_valid_action": no_valid_action})

    return Policy(init=_no_state, apply=apply)


@overload
def stateless_policy(
    fn: Callable[[ParamsT, ObsT, Key], tuple[ActionT, Any]],
    *,
    mode_fn: Callable[[ParamsT, ObsT, Key], Any] | None = None,
    value_fn: Callable[[ParamsT, ObsT], Any] | None = None,
) -> Policy[ParamsT, ObsT, ActionT]: ...


@overload
def stateless_policy(
    fn: Callable[[ParamsT, ObsT, Key], ActionT],
    *,
    mode_fn: Callable[[ParamsT, ObsT, Key], Any] | None = None,
    value_fn: Callable[[ParamsT, ObsT], Any] | None = None,
) -> Policy[ParamsT, ObsT, ActionT]: ...


@programs.shared
def stateless_policy(
    fn: Callable[..., Any],
    *,
    mode_fn: Callable[..., Any] | None = None,
    value_fn: Callable[..., Any] | None = None,
) -> Policy:
    """Makes a policy from a function without memory.

    Args:
        fn: `(params, obs, key)` to `action`, or to the tuple `(action, extras)`; all
            are batched, `[B, ...]`. If the action is itself a tuple, return it with
            extras, even if only `()`.
        mode_fn: as `fn`, but the most likely action, for `greedy`.
        value_fn: the critic, `(params, obs)` to `[K]` float32, the value of any number
            of observations, `[K, ...]`, each computed on its own; see `Policy.value`.

    Returns:
        A policy whose state is `()`.

    Raises:
        ValueError: if a function is none, or does not take these arguments.
    """
    _check_functions(("params", "obs", "key"), fn=fn, mode_fn=mode_fn)
    _check_functions(("params", "obs"), value_fn=value_fn)

    def make(fn: Callable[..., Any]) -> PolicyFn:
        def apply(params: Params, obs: Obs, state: PolicyState, key: Key) -> PolicyStep:
            result = fn(params, obs, key)
            if isinstance(result, tuple) and len(result) != 2:
                raise ValueError(
                    "A stateless policy's `fn` must return an action or (action, "
                    f"extras), a tuple of 2, got {len(result)}: one with memory is a "
                    "`recurrent_policy`, and an action that is a tuple needs extras."
                )
            # A tuple is always `(action, extras)`, so an action that is one needs
            # extras.
            action, extras = result if isinstance(result, tuple) else (result, ())
            return PolicyStep(action, state, extras)

        return apply

    value = value_fn and (lambda params, obs, state: value_fn(params, obs))
    return Policy(_no_state, make(fn), make(mode_fn) if mode_fn else None, value)


@programs.shared
def recurrent_policy(
    fn: Callable[
        [ParamsT, ObsT, Any, Key], tuple[ActionT, Any] | tuple[ActionT, Any, Any]
    ],
    init: Callable[[int], ArrayTree],
    *,
    mode_fn: Callable[[ParamsT, ObsT, Any, Key], Any] | None = None,
    value_fn: Callable[[ParamsT, ObsT, Any], Any] | None = None,
) -> Policy[ParamsT, ObsT, ActionT]:
    """Makes a policy from a function with memory.

    Args:
        fn: `(params, obs, state, key)` to `(action, state)` or `(action, state,
            extras)`; all are batched, `[B, ...]`.
        init: `num_envs` to the `[B, ...]` state at the start of an episode, any pytree.
        mode_fn: as `fn`, but the most likely action, for `greedy`.
        value_fn: the critic, `(params, obs, state)` to `[K]` float32, the value of any
            number of observations, `[K, ...]`, that the policy sees in that state, each
            computed on its own; see `Policy.value`.

    Returns:
        A policy whose state goes back to `init` in every lane whose episode ends.

    Raises:
        ValueError: if a function is none, or does not take these arguments.
    """
    _check_functions(("params", "obs", "state", "key"), fn=fn, mode_fn=mode_fn)
    _check_functions(("params", "obs", "state"), value_fn=value_fn)
    checks.function("init", init, "num_envs")

    def make(fn: Callable[..., Any]) -> PolicyFn:
        def apply(params: Params, obs: Obs, state: PolicyState, key: Key) -> PolicyStep:
            result = fn(params, obs, state, key)
            if not isinstance(result, tuple) or len(result) not in (2, 3):
                got = len(result) if isinstance(result, tuple) else "no tuple"
                raise ValueError(
                    "A recurrent policy's `fn` must return (action, state) or (action, "
                    f"state, extras), a tuple of 2 or 3, got {got}."
                )
            return PolicyStep(*result)

        return apply

    return Policy(init, make(fn), make(mode_fn) if mode_fn else None, value_fn)


def greedy(policy: Policy[ParamsT, ObsT, ActionT]) -> Policy[ParamsT, ObsT, ActionT]:
    """Makes the policy that takes the most likely actions of another, for evaluation.

    Args:
        policy: a policy with a `mode`; an exploring wrapper has the mode of the policy
            that it wraps.

    Returns:
        A policy with the same state, extras and critic; equal for an equal `policy`, so
        jax does not trace again.

    Raises:
        ValueError: if `policy` is no policy, or has no `mode`.
    """
    check_policy(policy)
    if policy.mode is None:
        raise ValueError(
            "`policy` must have a `mode`, got one without; `stateless_policy` and "
            "`recurrent_policy` take it as `mode_fn`."
        )
    return policy._replace(apply=policy.mode)


def _check_functions(arguments: tuple[str, ...], **functions: Any) -> None:
    for name, fn in functions.items():
        if name == "fn" or fn is not None:
            checks.function(name, fn, *arguments)


def _no_state(num_envs: int) -> tuple[()]:
    del num_envs  # unused
    return ()
