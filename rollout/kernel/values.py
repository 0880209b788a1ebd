"""Evaluates the critic at a few observations, for example at truncations."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rollout import checks
from rollout.envs import masked_update, trees
from rollout.envs.types import ArrayTree, LaneIndex, VectorEnv, sharding_of
from rollout.types import Carry, Parts, Policy, Transition


def final_value(
    parts: Parts, carry: Carry, params: Any, transition: Transition
) -> ArrayTree:
    """Returns `Transition.final_value`; `carry` has the true successor."""
    if not parts.policy.has_value:
        return ()
    with jax.named_scope("final_value"):
        goes_on = transition.truncated & ~transition.terminated
        agents = getattr(transition.info, "agents", None)  # as of a `MultiAgentInfo`
        if (truncated := getattr(agents, "truncated", None)) is not None:
            goes_on |= jnp.any(truncated, axis=-1)  # one of them may be cut alone
        inputs = carry.obs, carry.policy_state
        return values_where(parts.env, parts.policy, params, *inputs, goes_on)


def values_where(
    env: VectorEnv,
    policy: Policy,
    params: Any,
    obs: ArrayTree,
    policy_state: ArrayTree,
    flag: jax.Array,
) -> ArrayTree:
    """Computes the values of observations where a flag is set; 0 elsewhere.

    Truncations are rare, so a CPU computes `K` lanes at a time, mostly none, and a GPU
    all lanes if a value is cheap, else none, `K` or all: `masked_update.by_platform`
    has the rule, which is that of resets. Sharded lanes are computed on their devices.
    No derivative passes through.

    Args:
        env: the environments.
        policy: a policy with a critic.
        params: parameters of the policy.
        obs: `[B, ...]`.
        policy_state: `[B, ...]`, state of the policy when it observes `obs`.
        flag: `[B]` bool.

    Returns:
        `[B]`, or by group `[B, A_g]`, of the dtype of the values.
    """
    compute = _values_where
    if (sharding := sharding_of(env)) is not None:
        compute = functools.partial(sharding.map, compute)
    # Bootstrapped values are targets: no gradient passes through them.
    inputs = obs, policy_state
    fixed = *lax.stop_gradient(((policy, params), inputs)), flag
    # The critic may also close over differentiated values.
    compute, closed_over = jax.closure_convert(compute, *fixed)
    return compute(*fixed, *lax.stop_gradient(closed_over))


def check_values(value: Any, obs: ArrayTree) -> None:
    """Checks that there is one float per observation, or one per agent by group."""
    # A critic of one agent has no group: its value is named "" here.
    want = {"": jax.tree.leaves(obs)[0].shape[:1]}
    if isinstance(value, Mapping):
        groups = obs if isinstance(obs, Mapping) else {}
        want = {name: jax.tree.leaves(x)[0].shape[:2] for name, x in groups.items()}
    for name, x in value.items() if isinstance(value, Mapping) else [("", value)]:
        is_float = jnp.issubdtype(getattr(x, "dtype", bool), jnp.floating)
        if not is_float or x.shape != want.get(name):
            where = f" for the group {name!r}" if name else ""
            raise ValueError(
                "A critic must return one float per observation, of shape "
                f"{want.get(name, 'none')}{where}, got {checks.describe(x)}; it is "
                "called with only those observations that need a value."
            )


def _values_where(
    whole: tuple[Policy, Any], inputs: tuple[ArrayTree, ArrayTree], flag: jax.Array
) -> ArrayTree:
    # Jitted, so that the branches below trace it once for each number of lanes.
    @jax.jit
    def evaluate(
        whole: tuple[Policy, Any], inputs: tuple[ArrayTree, ArrayTree]
    ) -> ArrayTree:
        policy, params = whole
        values = policy.value(params, *inputs)
        check_values(values, inputs[0])
        return values

    def fn(at: LaneIndex) -> ArrayTree:
        return evaluate(whole, jax.tree.map(lambda x: x[at], inputs))

    nothing = trees.blank(jax.eval_shape(evaluate, whole, inputs))
    return masked_update.by_platform(flag, fn, nothing)
