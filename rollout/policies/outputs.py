"""Lets policies act, and checks what they return."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rollout import checks
from rollout.envs.types import AnySpace, ArrayTree, VectorEnv
from rollout.types import Key, Params, Policy, PolicyStep

_FLAT = (
    "a network of dense layers must take the observations flat: put `rollout.envs."
    "wrappers.FlattenObs` around the environment, or `flatten_obs(space, obs)` from "
    "there into the policy."
)


class View(NamedTuple):
    """Stands for the environment in `act` on a host: the two fields that it reads."""

    num_envs: int
    action_space: AnySpace


def decision(
    who: str, result: PolicyStep, space: AnySpace, num_envs: int, obs: ArrayTree
) -> PolicyStep:
    """Checks that a result for `obs` is a `PolicyStep` whose action fits the space.

    Returns:
        It, with the action in the dtypes of the space where those of the policy are of
        the same kind, such as the int64 of a categorical draw under `jax_enable_x64`.
    """
    what = f"{who} must return a `PolicyStep`, as `stateless_policy` makes it"
    checks.kind(what, result, PolicyStep)
    if space.shape is None:
        return result  # a composite space: see `policy_step`
    wanted = jax.ShapeDtypeStruct((num_envs, *space.shape), space.dtype)
    action = _cast(result.action, wanted)
    if getattr(action, "dtype", None) != wanted.dtype or action.shape != wanted.shape:
        numbers = [x.ndim for x in jax.tree.leaves(obs)] == [1]
        raise ValueError(
            f"{who} must return actions as {jnp.dtype(wanted.dtype).name} of shape "
            f"{wanted.shape}, got {checks.describe(action)}."
            + (f" Each observation is a number; {_FLAT}" if numbers else "")
        )
    return result._replace(action=action)


def _cast(action: Any, wanted: Any) -> Any:
    """Casts an action among integers, or among floats; others stay as they are."""
    if hasattr(action, "dtype"):
        for kind in (jnp.integer, jnp.floating):
            if all(jnp.issubdtype(x.dtype, kind) for x in (action, wanted)):
                return jnp.asarray(action, wanted.dtype)
    return action


def act(
    policy: Policy,
    env: VectorEnv | View,
    params: Params,
    obs: ArrayTree,
    policy_state: ArrayTree,
    key: Key,
) -> PolicyStep:
    """Applies a policy; checks its output against the environment and its own state.

    Returns:
        It, with the action in the dtypes of the space; see `decision`.
    """
    try:
        result = policy.apply(params, obs, policy_state, key)
    except (AttributeError, IndexError, TypeError) as error:
        if not jax.tree_util.all_leaves([obs]) and not hasattr(env, "groups"):
            error.add_note(f"The observation is a {type(obs).__name__}; {_FLAT}")
        raise
    space = env.action_space
    result = decision("`policy.apply`", result, space, env.num_envs, obs)
    if space.shape is None:
        # A composite space has no shape or dtype: those of a draw stand for them.
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), env.num_envs))
        drawn = jax.eval_shape(jax.vmap(space.sample), keys)
        if jax.tree.structure(drawn) == jax.tree.structure(result.action):
            action = jax.tree.map(_cast, result.action, drawn)
            result = result._replace(action=action)
        what = "`policy.apply` must return actions as the action space draws them"
        checks.same(f"{what}, a tuple together with extras", drawn, result.action)
    checks.same(
        "`policy.apply` must return a state like the one it takes",
        policy_state,
        result.state,
    )
    checks.leading_axes(
        "`policy.apply` must return extras", result.extras, (env.num_envs,)
    )
    return result
