"""Makes policies from plain functions, and the random policy."""

import dataclasses
from collections.abc import Callable
from typing import Any, overload

from flax import struct

from rollout import checks
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree
from rollout.policies import masks, uniform
from rollout.policies.masks import ActionMaskFn
from rollout.types import (
    ActionT,
    Key,
    ObsT,
    ParamsT,
    Policy,
    PolicyState,
    PolicyStep,
)


class RandomPolicy(Policy):
    """Policy that samples actions uniformly; made by `random_policy`."""

    action_space: AnySpace = struct.field(pytree_node=False)
    action_mask_fn: ActionMaskFn | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self) -> None:
        space = as_space(self.action_space, "action_space")
        masks.check_can_sample(space, self.action_mask_fn)
        object.__setattr__(self, "action_space", space)

    def apply(self, params: Any, obs: Any, state: PolicyState, key: Key) -> PolicyStep:
        """Samples actions uniformly."""
        del params  # unused
        space = self.action_space
        if self.action_mask_fn is None:
            action = uniform.uniform(space, uniform.num_lanes(obs), key)
            return PolicyStep(action, state)
        action_mask = masks.read(self.action_mask_fn, obs, space)
        action, no_valid_action = masks.sample(action_mask, space, key)
        return PolicyStep(action, state, {"no_valid_action": no_valid_action})


def random_policy(
    action_space: AnySpace, *, action_mask_fn: ActionMaskFn | None = None
) -> Policy:
    """Makes the policy that samples every action uniformly from the action space.

    Lane i samples the same actions for any number of lanes. If the environment returns
    a mask in `info`, `rollout.envs.ObserveInfo` adds it to `obs`.

    Args:
        action_space: action space of a single environment: a space of `rollout.envs`,
            Gymnasium or gymnax.
        action_mask_fn: function of `obs`, `[B, ...]`, that returns a mask, `[B, n]`
            bool, True for valid actions. For a `MultiDiscrete` of `rollout.envs.spaces`
            the mask is a tuple of one mask per entry, or `[B, *nvec]`. For a
            `MultiBinary` it is `[B, *shape, 2]`. For a composite space it has the
            structure of the space, with None for a part without a mask. If no action is
            valid, the action is sampled from all actions.

    Returns:
        A policy without parameters or state; it ignores `params`. Its extras are `()`,
        or `{"no_valid_action": [B] bool}` if `action_mask_fn` is given.

    Raises:
        ValueError: if `action_space` is not a space; if a bound of a box is not finite;
            if `action_mask_fn` is given and the space has no discrete part; while
            tracing, if the mask has a wrong shape or is not bool.
    """
    return RandomPolicy(action_space, action_mask_fn)


class _FunctionPolicy(Policy[ParamsT, ObsT, ActionT]):
    """Base class of policies whose methods call functions."""

    fn: Callable[..., Any] = struct.field(pytree_node=False)
    _: dataclasses.KW_ONLY
    mode_fn: Callable[..., Any] | None = struct.field(pytree_node=False, default=None)
    value_fn: Callable[..., Any] | None = struct.field(pytree_node=False, default=None)

    def _call(self, fn: Any, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        raise NotImplementedError

    def apply(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Calls `fn`."""
        return self._call(self.fn, params, obs, state, key)

    def mode(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Calls `mode_fn`."""
        if self.mode_fn is None:
            return super().mode(params, obs, state, key)
        return self._call(self.mode_fn, params, obs, state, key)

    @property
    def has_mode(self) -> bool:
        """Whether `mode_fn` is given."""
        return self.mode_fn is not None

    @property
    def has_value(self) -> bool:
        """Whether `value_fn` is given."""
        return self.value_fn is not None


class StatelessPolicy(_FunctionPolicy[ParamsT, ObsT, ActionT]):
    """Policy without memory; made by `stateless_policy`."""

    def __post_init__(self) -> None:
        arguments = "params", "obs", "key"
        _check_functions(arguments, fn=self.fn, mode_fn=self.mode_fn)
        _check_functions(("params", "obs"), value_fn=self.value_fn)

    def _call(self, fn: Any, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        result = fn(params, obs, key)
        if isinstance(result, tuple) and len(result) != 2:
            raise ValueError(
                "A stateless policy's `fn` must return an action or (action, extras), "
                f"a tuple of 2, got {len(result)}. For a policy with memory, use "
                "`recurrent_policy`. If the action is a tuple, return (action, ())."
            )
        # A tuple is always `(action, extras)`: a tuple of actions must have extras.
        action, extras = result if isinstance(result, tuple) else (result, ())
        return PolicyStep(action, state, extras)

    def value(self, params: Any, obs: Any, state: Any) -> ArrayTree:
        """Calls `value_fn`."""
        if self.value_fn is None:
            return super().value(params, obs, state)
        return self.value_fn(params, obs)


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


def stateless_policy(
    fn: Callable[..., Any],
    *,
    mode_fn: Callable[..., Any] | None = None,
    value_fn: Callable[..., Any] | None = None,
) -> Policy:
    """Makes a policy from a function without memory.

    Args:
        fn: function `(params, obs, key)` that returns `action` or the tuple `(action,
            extras)`; all are batched, `[B, ...]`. If the action is itself a tuple,
            return it with extras, for example `()`.
        mode_fn: function like `fn` that returns the most likely action, for `Greedy`.
        value_fn: critic: function `(params, obs)` that returns the values, `[K]`
            float32, of any number of observations, `[K, ...]`. Each value depends on
            one observation only; see `Policy.value`.

    Returns:
        A policy whose state is `()`. Policies made from the same functions are equal
        and share compiled programs: define the functions once, at module level.

    Raises:
        ValueError: if an argument is not a function of these arguments.
    """
    return StatelessPolicy(fn, mode_fn=mode_fn, value_fn=value_fn)


class RecurrentPolicy(_FunctionPolicy[ParamsT, ObsT, ActionT]):
    """Policy with memory; made by `recurrent_policy`."""

    init_fn: Callable[[int], ArrayTree] = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        arguments = "params", "obs", "state", "key"
        _check_functions(arguments, fn=self.fn, mode_fn=self.mode_fn)
        _check_functions(("params", "obs", "state"), value_fn=self.value_fn)
        checks.function("init_fn", self.init_fn, "num_envs")

    def init(self, num_envs: int) -> PolicyState:
        """Calls `init_fn`."""
        return self.init_fn(num_envs)

    def _call(self, fn: Any, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        result = fn(params, obs, state, key)
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            length = len(result) if isinstance(result, tuple) else "no tuple"
            raise ValueError(
                "A recurrent policy's `fn` must return (action, state) or (action, "
                f"state, extras), a tuple of 2 or 3, got {length}."
            )
        return PolicyStep(*result)

    def value(self, params: Any, obs: Any, state: Any) -> ArrayTree:
        """Calls `value_fn`."""
        if self.value_fn is None:
            return super().value(params, obs, state)
        return self.value_fn(params, obs, state)


def recurrent_policy(
    fn: Callable[
        [ParamsT, ObsT, Any, Key], tuple[ActionT, Any] | tuple[ActionT, Any, Any]
    ],
    init_fn: Callable[[int], ArrayTree],
    *,
    mode_fn: Callable[[ParamsT, ObsT, Any, Key], Any] | None = None,
    value_fn: Callable[[ParamsT, ObsT, Any], Any] | None = None,
) -> Policy[ParamsT, ObsT, ActionT]:
    """Makes a policy from a function with memory.

    Args:
        fn: function `(params, obs, state, key)` that returns `(action, state)` or
            `(action, state, extras)`; all are batched, `[B, ...]`.
        init_fn: function of `num_envs` that returns the state at the start of an
            episode, any pytree of `[B, ...]`.
        mode_fn: function like `fn` that returns the most likely action, for `Greedy`.
        value_fn: critic: function `(params, obs, state)` that returns the values, `[K]`
            float32, of any number of observations, `[K, ...]`, with the policy's state
            for each. Each value depends on one observation and state only; see
            `Policy.value`.

    Returns:
        A policy whose state is reset in a lane when the lane's episode ends.

    Raises:
        ValueError: if an argument is not a function of these arguments.
    """
    return RecurrentPolicy(fn, init_fn=init_fn, mode_fn=mode_fn, value_fn=value_fn)


def _check_functions(arguments: tuple[str, ...], **functions: Any) -> None:
    for name, fn in functions.items():
        if name == "fn" or fn is not None:
            checks.function(name, fn, *arguments)
