"""Applies policies and validates their outputs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rollout import checks
from rollout.envs.types import AnySpace, ArrayTree, VectorEnv
from rollout.types import Key, Params, Policy, PolicyStep

_FLAT = (
    "A network of dense layers must get flat observations. Wrap the environment in "
    "`rollout.envs.wrappers.FlattenObs`, or call `rollout.envs.wrappers.flatten_obs("
    "space, obs)` in the policy."
)


class View(NamedTuple):
    """Holds the fields that `act` reads from an environment; used on a host."""

    num_envs: int
    action_space: AnySpace


def decision(
    who: str, result: PolicyStep, space: AnySpace, num_envs: int, obs: ArrayTree
) -> PolicyStep:
    """Checks that a result for `obs` is a `PolicyStep` whose action fits the space.

    Returns:
        The result, with its action cast to the dtype of the space. Only casts among
        integers and among floats are made, for example of the int64 that
        `jax.random.categorical` returns under `jax_enable_x64`.
    """
    message = f"{who} must return a `PolicyStep`, with `action`, `state` and `extras`"
    checks.kind(message, result, PolicyStep)
    if space.shape is None:
        return result  # a composite space: `act` checks the action
    spec = jax.ShapeDtypeStruct((num_envs, *space.shape), space.dtype)
    action = _cast(result.action, spec)
    if getattr(action, "dtype", None) != spec.dtype or action.shape != spec.shape:
        has_scalar_obs = [x.ndim for x in jax.tree.leaves(obs)] == [1]
        raise ValueError(
            f"{who} must return actions as {jnp.dtype(spec.dtype).name} of shape "
            f"{spec.shape}, got {checks.describe(action)}."
            + (f" Each observation is a scalar. {_FLAT}" if has_scalar_obs else "")
        )
    return result._replace(action=action)


def _cast(action: Any, spec: Any) -> Any:
    """Casts an action among integers, or among floats; returns it unchanged if not."""
    if hasattr(action, "dtype"):
        for category in (jnp.integer, jnp.floating):
            if all(jnp.issubdtype(x.dtype, category) for x in (action, spec)):
                return jnp.asarray(action, spec.dtype)
    return action


def act(
    policy: Policy,
    env: VectorEnv | View,
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
        if not jax.tree_util.all_leaves([obs]) and not hasattr(env, "groups"):
            error.add_note(f"The observation is a {type(obs).__name__}. {_FLAT}")
        raise
    space = env.action_space
    result = decision("`policy.apply`", result, space, env.num_envs, obs)
    if space.shape is None:
        # A composite space has no shape or dtype: compare the action with a sample.
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), env.num_envs))
        sample = jax.eval_shape(jax.vmap(space.sample), keys)
        if jax.tree.structure(sample) == jax.tree.structure(result.action):
            action = jax.tree.map(_cast, result.action, sample)
            result = result._replace(action=action)
        message = "`policy.apply` must return actions like samples of the action space"
        checks.same(f"{message}, a tuple as (action, extras)", sample, result.action)
    checks.same(
        "`policy.apply` must return a state like its input state",
        policy_state,
        result.state,
    )
    checks.leading_axes(
        "`policy.apply` must return extras", result.extras, (env.num_envs,)
    )
    return result
