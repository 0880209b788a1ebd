"""Values of final observations, computed for the few lanes that need one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from envs import few_lanes
from envs.types import ArrayTree, LaneIndex, VectorEnv, spread_of
from rollout import checks
from rollout.types import ValueFn


def values_where(
    env: VectorEnv,
    value_fn: ValueFn,
    params: Any,
    obs: ArrayTree,
    policy_state: ArrayTree,
    flag: jax.Array,
) -> jax.Array:
    """Computes the values of observations where a flag is set; 0 elsewhere.

    Truncations are rare, so a CPU takes `K` lanes at a time and mostly none, and a GPU
    none, `K` or all, which it decides without the host; see `envs.few_lanes`. Where the
    lanes are spread, each device does so for its own. No derivative passes through.

    Args:
        env: the environments.
        value_fn: `(params, obs, policy_state)` to `[K]` float, row by row.
        params: whatever `value_fn` takes.
        obs: `[B, ...]`.
        policy_state: `[B, ...]`, of the policy that has come to `obs`.
        flag: `[B]` bool.

    Returns:
        `[B]`, of the dtype of the values.
    """
    fixed = lax.stop_gradient((params, (obs, policy_state)))
    compute = functools.partial(_values_where, value_fn)
    spread = spread_of(env)
    if spread is None:
        return compute(*fixed, flag)
    return spread.map(compute, *fixed, flag)


def _values_where(
    value_fn: ValueFn, params: Any, rows: tuple[ArrayTree, ArrayTree], flag: jax.Array
) -> jax.Array:
    # Jitted, so that the ways below trace it once for each number of rows.
    @jax.jit
    def evaluate(params: Any, rows: tuple[ArrayTree, ArrayTree]) -> jax.Array:
        values = value_fn(params, *rows)
        checks.values(values, len(jax.tree.leaves(rows[0])[0]))
        return values

    def fn(at: LaneIndex) -> jax.Array:
        return evaluate(params, jax.tree.map(lambda x: x[at], rows))

    nothing = jnp.zeros(flag.shape, jax.eval_shape(evaluate, params, rows).dtype)
    rounds = functools.partial(few_lanes.rounds, flag, fn)
    switch = functools.partial(few_lanes.switch, flag, fn)
    return lax.platform_dependent(
        nothing, cpu=rounds, cuda=switch, rocm=switch, default=rounds
    )
