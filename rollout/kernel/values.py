"""Evaluates the critic at a few observations, for example at truncations."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rollout import checks
from rollout.envs import masked_update, trees
from rollout.envs.types import ArrayTree, LaneIndex, VectorEnv
from rollout.types import Carry, Parts, Policy, Transition


def final_value(
    parts: Parts, carry: Carry, params: Any, transition: Transition
) -> ArrayTree:
    """Returns `Transition.final_value`; `carry` must hold the true successors."""
    if not parts.policy.has_value:
        return ()
    with jax.named_scope("final_value"):
        bootstraps = transition.truncated & ~transition.terminated
        agents = getattr(transition.info, "agents", None)  # of a `MultiAgentInfo`
        if (truncated := getattr(agents, "truncated", None)) is not None:
            bootstraps |= jnp.any(truncated, axis=-1)  # an agent truncated alone
        inputs = carry.obs, carry.policy_state
        return values_where(parts.env, parts.policy, params, *inputs, bootstraps)


def values_where(
    env: VectorEnv,
    policy: Policy,
    params: Any,
    obs: ArrayTree,
    policy_state: ArrayTree,
    flag: jax.Array,
) -> ArrayTree:
    """Evaluates the critic at the observations with a True flag; 0 elsewhere.

    Truncations are rare, so a CPU evaluates `K` lanes at a time, mostly none. A GPU
    evaluates all lanes if the critic is cheap, else none, `K` or all.
    `masked_update.by_platform` has the rule, which also applies to resets. Each device
    evaluates its lanes. No derivative passes through.

    Args:
        env: the environments.
        policy: a policy with a critic.
        params: parameters of the policy.
        obs: `[B, ...]`.
        policy_state: `[B, ...]`, state of the policy when it observes `obs`.
        flag: `[B]` bool.

    Returns:
        `[B]`, or by group `[B, A_g]`, in the dtype of the critic's output.
    """
    compute = _values_where
    if (sharding := env.sharding) is not None:
        compute = functools.partial(sharding.map, compute)
    # Bootstrapped values are targets: no gradient passes through them.
    inputs = obs, policy_state
    fixed = *lax.stop_gradient(((policy, params), inputs)), flag
    # The critic may also close over differentiated values.
    compute, closed_over = jax.closure_convert(compute, *fixed)
    return compute(*fixed, *lax.stop_gradient(closed_over))


def check_values(value: Any, obs: ArrayTree) -> None:
    """Checks that there is one float per observation, or one per agent by group."""
    # The value of a single-agent critic has no group: name it "".
    expected = {"": jax.tree.leaves(obs)[0].shape[:1]}
    if isinstance(value, Mapping):
        groups = obs if isinstance(obs, Mapping) else {}
        expected = {name: jax.tree.leaves(x)[0].shape[:2] for name, x in groups.items()}
    for name, x in value.items() if isinstance(value, Mapping) else [("", value)]:
        is_float = jnp.issubdtype(getattr(x, "dtype", bool), jnp.floating)
        if not is_float or x.shape != expected.get(name):
            group = f" for the group {name!r}" if name else ""
            raise ValueError(
                "A critic must return one float per observation, of shape "
                f"{expected.get(name, 'none')}{group}, got {checks.describe(x)}. "
                "Collectors call it with any number of observations."
            )


def _values_where(
    critic: tuple[Policy, Any], inputs: tuple[ArrayTree, ArrayTree], flag: jax.Array
) -> ArrayTree:
    # Jitted, so that the branches below trace it once for each number of lanes.
    @jax.jit
    def evaluate(
        critic: tuple[Policy, Any], inputs: tuple[ArrayTree, ArrayTree]
    ) -> ArrayTree:
        policy, params = critic
        values = policy.value(params, *inputs)
        check_values(values, inputs[0])
        return values

    def fn(lane_index: LaneIndex) -> ArrayTree:
        return evaluate(critic, jax.tree.map(lambda x: x[lane_index], inputs))

    zeros = trees.blank(jax.eval_shape(evaluate, critic, inputs))
    return masked_update.by_platform(flag, fn, zeros)
