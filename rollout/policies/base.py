"""Policies from functions, the base class of wrappers, and validated policy calls.

`random_policy`, `stateless_policy` and `recurrent_policy` create policies.
`PolicyWrapper` forwards all methods to the wrapped policy. `unroll` replays a recurrent
policy over recorded rows. `act` calls a policy and validates its outputs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import struct

from rollout.base import checks, trees
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree
from rollout.policies import masks
from rollout.policies.masks import ActionMaskFn
from rollout.types import (
    NO_MODE,
    ActionT,
    Key,
    ObsT,
    Params,
    ParamsT,
    Persistent,
    Policy,
    PolicyState,
    PolicyStep,
    check_policy,
)

_FLAT = (
    "A network of dense layers needs flat observations. Wrap the environment in "
    "`rollout.envs.wrappers.FlattenObs`, or call `rollout.envs.wrappers.flatten_obs("
    "space, obs)` in the policy."
)


class PolicyWrapper(Policy[ParamsT, ObsT, ActionT]):
    """Base class of policy wrappers: forwards every method to the wrapped policy.

    Attributes:
        policy: the wrapped policy.
    """

    policy: Policy[ParamsT, ObsT, ActionT]

    def __post_init__(self) -> None:
        check_policy(self.policy)

    def init(self, num_envs: int) -> PolicyState:
        """Returns the initial state of the wrapped policy."""
        return self.policy.init(num_envs)

    def apply(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Applies the wrapped policy."""
        return self.policy.apply(params, obs, state, key)

    def mode(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Returns the mode of the wrapped policy."""
        return self.policy.mode(params, obs, state, key)

    def value(self, params: Any, obs: Any, state: Any) -> ArrayTree:
        """Evaluates the critic of the wrapped policy."""
        return self.policy.value(params, obs, state)

    @property
    def has_mode(self) -> bool:
        """Whether the wrapped policy, or a subclass, has a mode."""
        return type(self).mode is not PolicyWrapper.mode or self.policy.has_mode

    @property
    def has_value(self) -> bool:
        """Whether the wrapped policy, or a subclass, has a critic."""
        return type(self).value is not PolicyWrapper.value or self.policy.has_value


class Greedy(PolicyWrapper[ParamsT, ObsT, ActionT]):
    """Takes the most likely actions of a policy. Use it for evaluation.

    The mode of an exploration wrapper is the mode of its wrapped policy. State, extras
    and critic come from the wrapped policy.

    Attributes:
        policy: the wrapped policy, which must have a `mode`.

    Raises:
        ValueError: if `policy` is not a policy, or has no `mode`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policy.has_mode:
            raise ValueError(NO_MODE)

    def apply(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Applies the mode of the wrapped policy."""
        return self.policy.mode(params, obs, state, key)


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
            action = masks.sample_actions(space, masks.num_lanes(obs), key)
            return PolicyStep(action, state)
        action_mask = masks.read(self.action_mask_fn, obs, space)
        action, no_valid_action = masks.sample(action_mask, space, key)
        return PolicyStep(action, state, {"no_valid_action": no_valid_action})


def random_policy(
    action_space: AnySpace, *, action_mask_fn: ActionMaskFn | None = None
) -> Policy:
    """Makes a policy that samples every action uniformly from the action space.

    The samples of lane i do not depend on the number of lanes. If the environment
    returns a mask in `info`, `rollout.envs.ObserveInfo` adds it to `obs`.

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
        value_fn: critic, a function `(params, obs)` that returns the values, `[K]`
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
        checks.check_function("init_fn", self.init_fn, "num_envs")

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
        value_fn: critic, a function `(params, obs, state)` that returns the values,
            `[K]` float32, of any number of observations and policy states, `[K, ...]`.
            Each value depends on one observation and state only; see `Policy.value`.

    Returns:
        A policy whose state is reset in a lane when the lane's episode ends.

    Raises:
        ValueError: if an argument is not a function of these arguments.
    """
    return RecurrentPolicy(fn, init_fn=init_fn, mode_fn=mode_fn, value_fn=value_fn)


def _check_functions(arguments: tuple[str, ...], **functions: Any) -> None:
    for name, fn in functions.items():
        if name == "fn" or fn is not None:
            checks.check_function(name, fn, *arguments)


def unroll(
    core: Callable[[Any, Any], tuple[Any, Any]],
    state: ArrayTree,
    inputs: ArrayTree,
    first: jax.Array,
    init: Callable[[int], ArrayTree],
    *,
    acting: jax.Array | None = None,
) -> tuple[ArrayTree, ArrayTree]:
    """Runs a recurrent network over the rows of a trajectory, as the collector did.

    With the parameters that collected the trajectory, the outputs equal the policy's
    outputs up to rounding. `jax.grad` differentiates through all rows, back to `state`.
    Apply layers that read only the outputs, such as heads, outside of `unroll`, to all
    rows at once, which is faster.

    Without the axis `B`, the function runs a single lane, as in a loss that
    `rollout.minibatches.mean_gradient` maps over lanes.

    Args:
        core: function `(state, input)` for one row, `[B, ...]`, that returns `(state,
            output)`.
        state: state of the policy before the first row, `[B, ...]`, for example the
            first row of the states that the policy recorded.
        inputs: a pytree of `[T, B, ...]`, for example the observations.
        first: `[T, B]` bool, True at the first row of an episode: `Transition.first`.
            The state is reset to `init` before this row, except for its `Persistent`
            parts.
        init: function of `num_envs` that returns the initial state: the `init_fn` of
            the `recurrent_policy`. The state must not contain an `EpisodeKey`, since
            the keys of later episodes are not recorded.
        acting: `[T, B]` bool, for example `acting` of an agent's transitions. Rows with
            False leave the state unchanged. None is equivalent to True in all rows.

    Returns:
        The state after the last row, and the outputs, `[T, B, ...]`.
    """
    if first.ndim == 1:  # one lane without a batch axis
        initial_state = jax.tree.map(lambda x: jnp.asarray(x)[0], init(1))
    else:
        initial_state = jax.tree.map(jnp.asarray, init(first.shape[1]))

    def step(state: ArrayTree, row: Any) -> tuple[ArrayTree, ArrayTree]:
        x, first, acting = row
        # Reset before `core`: the first row of an episode reads the initial state.
        state = select_initial(first, initial_state, state)
        new_state, output = core(state, x)
        if acting is not None:
            new_state = trees.select(acting, new_state, state)
        return new_state, output

    return jax.lax.scan(step, state, (inputs, first, acting))


def select_initial(
    restarts: jax.Array, initial: ArrayTree, state: ArrayTree
) -> ArrayTree:
    """Resets lanes to `initial` if `restarts`, except for `Persistent` parts."""

    def choose(initial: ArrayTree, state: ArrayTree) -> ArrayTree:
        if isinstance(state, Persistent):
            return state
        return trees.select(restarts, initial, state)

    is_persistent = lambda x: isinstance(x, Persistent)  # noqa: E731
    return jax.tree.map(choose, initial, state, is_leaf=is_persistent)


def decision(
    caller: str, result: PolicyStep, space: AnySpace, num_envs: int, obs: ArrayTree
) -> PolicyStep:
    """Checks that a result for `obs` is a `PolicyStep` whose action fits the space.

    Returns:
        The result, with its action cast to the dtype of the space. Integers are cast
        only to integers and floats only to floats, for example the int64 that
        `jax.random.categorical` returns with `jax_enable_x64`.
    """
    message = f"{caller} must return a `PolicyStep` with `action`, `state` and `extras`"
    checks.check_type(message, result, PolicyStep)
    if space.shape is None:
        return result  # a composite space: `act` checks the action
    spec = jax.ShapeDtypeStruct((num_envs, *space.shape), space.dtype)
    action = _cast(result.action, spec)
    if not checks.has_dtype(action, spec.dtype) or action.shape != spec.shape:
        has_scalar_obs = [x.ndim for x in jax.tree.leaves(obs)] == [1]
        raise ValueError(
            f"{caller} must return actions as {jnp.dtype(spec.dtype).name} of shape "
            f"{spec.shape}, got {checks.describe(action)}."
            + (f" Each observation is a scalar. {_FLAT}" if has_scalar_obs else "")
        )
    return result._replace(action=action)


def _cast(action: Any, spec: Any) -> Any:
    """Casts integers to integers and floats to floats; else returns the action."""
    for category in (jnp.integer, jnp.floating):
        if all(checks.has_dtype(x, category) for x in (action, spec)):
            return jnp.asarray(action, spec.dtype)
    return action


def act(
    policy: Policy,
    action_space: AnySpace,
    num_envs: int,
    params: Params,
    obs: ArrayTree,
    policy_state: ArrayTree,
    key: Key,
) -> PolicyStep:
    """Applies a policy and validates its action, state and extras.

    Returns:
        The output of the policy, with its action cast to the dtypes of the space; see
        `decision`.
    """
    try:
        result = policy.apply(params, obs, policy_state, key)
    except (AttributeError, IndexError, TypeError) as error:
        if not jax.tree_util.all_leaves([obs]) and action_space.shape is not None:
            error.add_note(f"The observation is a {type(obs).__name__}. {_FLAT}")
        raise
    result = decision("`policy.apply`", result, action_space, num_envs, obs)
    if action_space.shape is None:
        # A composite space has no shape or dtype: compare actions with samples.
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_envs))
        sample = jax.eval_shape(jax.vmap(action_space.sample), keys)
        if jax.tree.structure(sample) == jax.tree.structure(result.action):
            action = jax.tree.map(_cast, result.action, sample)
            result = result._replace(action=action)
        message = "`policy.apply` must return actions like samples of the action space"
        checks.check_same_types(
            f"{message}, a tuple as (action, extras)", sample, result.action
        )
    checks.check_same_types(
        "`policy.apply` must return a state like its input state",
        policy_state,
        result.state,
    )
    checks.check_leading_axes(
        "`policy.apply` must return extras", result.extras, (num_envs,)
    )
    return result
