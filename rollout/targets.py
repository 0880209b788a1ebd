"""Computes advantages and returns from the arrays of a rollout.

All functions take arrays `[T, ...]` of one shape, time first, from a `Transition`, from
the transitions of agents, or from any other rollout. Each row bootstraps from the next
row that is not masked out: in a turn-based game an agent has masked-out rows between
its steps. The last row of an episode or of the arrays bootstraps from `next_value`
instead, unless the task terminated. All functions are jitted.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from rollout.base import checks, platform
from rollout.types import Transition, check_trajectory

Scalar = float | jax.Array  # (), may be traced
_Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # see `_rows`

# Rows per loop iteration. On a GPU an iteration of 16 rows has three launches, too few
# for XLA to form a CUDA graph. A rollout of up to 128 rows needs no loop.
_ROWS_ON_GPU, _ROWS_ELSEWHERE = 128, 16


def next_values(
    trajectory: Transition, value: jax.Array, last_value: jax.Array
) -> jax.Array:
    """Computes V(next_obs) of every step from previously computed values.

    If a step does not end an episode, V(next_obs) is V(obs) of the next row. At
    truncated steps V(next_obs) is `final_value`, and after the last step `last_value`.

        value, last_value = t.extras["value"], collector.value(carry, params)
        next_value = rollout.next_values(t, value, last_value)

    Args:
        trajectory: `[T, B, ...]` of a policy with a critic, `Policy.value`.
        value: `[T, B]` float, V(obs), as the policy recorded it.
        last_value: `[B]` float, V(obs) of the carry after the last step; see
            `rollout.agents.last_values` for several agents.

    Returns:
        `[T, B]` float, `next_value` for the functions below: 0 if the task terminated,
        arbitrary if `mask` is False.

    Raises:
        ValueError: if the trajectory has no `final_value`, or if a shape differs.
    """
    check_trajectory(trajectory)
    if isinstance(trajectory.final_value, tuple):
        raise ValueError(
            "`trajectory` must have `final_value`, got none: collectors record it if "
            "the policy has a critic. Pass `value_fn` to `stateless_policy`. Without a "
            "critic, compute V(next_obs) from `next_obs`."
        )
    shape, final_value = trajectory.mask.shape, trajectory.final_value
    checks.check_shape("`value` must be", value, shape)
    # With several agents `final_value` of a step is a dict by group.
    rule = "`trajectory.final_value` (of `agent_transitions` if by group) must be"
    checks.check_shape(rule, final_value, shape)
    checks.check_shape("`last_value` must be", last_value, shape[1:])
    value = jnp.asarray(value)
    # `final_value` is 0 at terminations, where the value is 0 by definition.
    rows = trajectory.done, trajectory.mask, value, final_value
    return _next_values(rows, jnp.asarray(last_value, value.dtype))


def gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    gamma: Scalar,
    lambda_: Scalar,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Computes the generalized advantage estimate of every step.

        δ_t = r_t + γ (1 - terminated_t) V(next_obs_t) - V(obs_t)
        A_t = δ_t + γ λ (1 - done_t) A_{t+1}

    Row t + 1 is the next row that is not masked out; γ applies once between the two. If
    V(next_obs) equals V(obs) of the next row, A + V(obs) is the λ-return, the usual
    target of the value function.

    Args:
        reward: `[T, B]`; integers are converted to floats.
        value: `[T, B]` float, V(obs).
        next_value: `[T, B]` float, V(next_obs) of the true successors.
        terminated: `[T, B]` bool, the task ended.
        truncated: `[T, B]` bool, the episode was cut off, for example by a time limit.
        gamma: γ, discount per step, in [-1, 1]: negative if two players of a zero-sum
            game alternate.
        lambda_: λ, in [0, 1]: 0 for the one-step error, 1 for return minus value.
        mask: `[T, B]` bool, False for rows without a step; None if there are none.

    Returns:
        `[T, B]` float, in discounted reward; 0 where `mask` is False.

    Raises:
        ValueError: if `gamma` or `lambda_` is outside the range above, or if the shapes
            differ.

    Source:
        "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
        eq. 11 and 16, arXiv:1506.02438.
    """
    checks.check_fraction("gamma", gamma, lowest=-1)
    checks.check_fraction("lambda_", lambda_)
    rows = _rows(
        reward, terminated, truncated, mask, value=value, next_value=next_value
    )
    return _gae(rows, jnp.asarray(value), next_value, gamma, lambda_)


def lambda_returns(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    gamma: Scalar,
    lambda_: Scalar,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Computes the λ-return of every step.

        G_t = r_t + γ (1 - terminated_t) ((1 - λ) V(next_obs_t) + λ G_{t+1})

    V(next_obs_t) replaces G_{t+1} in the last row of an episode or of the window.

    Args:
        reward: as in `gae`.
        next_value: as in `gae`.
        terminated: as in `gae`.
        truncated: as in `gae`.
        gamma: as in `gae`.
        lambda_: λ, in [0, 1].
        mask: as in `gae`.

    Returns:
        `[T, B]` float, in discounted reward; 0 where `mask` is False.

    Raises:
        ValueError: as `gae` does.

    Source:
        "Reinforcement Learning: An Introduction", 2nd ed., eq. 12.19 (without the
        approximation) and "High-Dimensional Continuous Control", arXiv:1506.02438.
    """
    checks.check_fraction("gamma", gamma, lowest=-1)
    checks.check_fraction("lambda_", lambda_)
    rows = _rows(reward, terminated, truncated, mask, next_value=next_value)
    return _lambda_returns(rows, next_value, gamma, lambda_)


def discounted_returns(
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    gamma: Scalar,
    next_value: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Computes the discounted sum of the rewards from every step onward.

        G_t = r_t + γ (1 - done_t) G_{t+1}

    Args:
        reward: as in `gae`.
        terminated: as in `gae`.
        truncated: as in `gae`.
        gamma: as in `gae`.
        next_value: `[T, B]` float, V(next_obs), which replaces the rewards after a
            truncation and after the last row; None is 0.
        mask: as in `gae`.

    Returns:
        `[T, B]` float, in discounted reward; 0 where `mask` is False.

    Raises:
        ValueError: as `gae` does.

    Source:
        "Reinforcement Learning: An Introduction", 2nd ed., eq. 3.9.
    """
    if next_value is None:
        next_value = jnp.zeros(jnp.shape(reward))
    flags = terminated, truncated
    return lambda_returns(
        reward, next_value, *flags, gamma=gamma, lambda_=1.0, mask=mask
    )


def vtrace(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    log_rhos: jax.Array,
    gamma: Scalar,
    lambda_: Scalar = 1.0,
    clip_rho_threshold: Scalar = 1.0,
    clip_c_threshold: Scalar = 1.0,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes V-trace advantages and value targets for actions of an older policy.

        ρ_t = min(ρ̄, π(a_t) / μ(a_t)), c_t = λ min(c̄, π(a_t) / μ(a_t))
        δ_t = ρ_t (r_t + γ (1 - terminated_t) V(next_obs_t) - V(obs_t))
        v_t = V(obs_t) + δ_t + γ c_t (1 - done_t) (v_{t+1} - V(obs_{t+1}))
        A_t = ρ_t (r_t + γ (1 - terminated_t) v_{t+1} - V(obs_t))

    V(next_obs_t) replaces v_{t+1} in the last row of an episode or of the window. If
    both policies are the same, v - V is the advantage of `gae`. Use it if actors have
    older parameters, for example in `Stream(prefetch=1)` or with Ray.

    Args:
        reward: as in `gae`.
        value: as in `gae`, from the learner's critic.
        next_value: as in `gae`, from the learner's critic.
        terminated: as in `gae`.
        truncated: as in `gae`.
        log_rhos: `[T, B]` float, log π(a) - log μ(a), for the learner's policy π and
            the actor's policy μ. Gradients are stopped.
        gamma: as in `gae`.
        lambda_: λ, in [0, 1].
        clip_rho_threshold: ρ̄, the largest ρ, at least 0: the critic learns the value of
            μ if ρ̄ is near 0, and the value of π if ρ̄ is infinite.
        clip_c_threshold: c̄, at least 0: the largest weight of later errors, which
            changes the speed of convergence but not the fixed point.
        mask: as in `gae`.

    Returns:
        The advantages A and the targets v of the critic, `[T, B]` float, in discounted
        reward; 0 where `mask` is False.

    Raises:
        ValueError: as `gae` does, or if a threshold is not a number of at least 0.

    Source:
        "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
        Architectures", eq. 1 and section 4.2, arXiv:1802.01561.
    """
    checks.check_fraction("gamma", gamma, lowest=-1)
    checks.check_fraction("lambda_", lambda_)
    thresholds = clip_rho_threshold, clip_c_threshold
    checks.check_fraction("clip_rho_threshold", clip_rho_threshold, highest=math.inf)
    checks.check_fraction("clip_c_threshold", clip_c_threshold, highest=math.inf)
    arrays = {"value": value, "next_value": next_value, "log_rhos": log_rhos}
    rows = _rows(reward, terminated, truncated, mask, **arrays)
    # Importance weights are constants of the loss: stop their gradients.
    ratio = jnp.exp(jax.lax.stop_gradient(jnp.asarray(log_rhos)))
    return _vtrace(
        rows, jnp.asarray(value), next_value, ratio, gamma, lambda_, *thresholds
    )


def explained_variance(
    value: jax.Array, target: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Computes 1 - Var(target - value) / Var(target). Use it to judge a critic.

    Args:
        value: V(obs), an array of floats.
        target: returns that the critic is trained on, of the same shape.
        mask: bool, rows to include; None for all rows.

    Returns:
        `()` float: 1 if the critic is perfect, 0 if it predicts a constant, and less
        than 0 if it is worse. NaN if all targets are equal; minus infinity if
        `jax_debug_nans` is set.
    """
    error, variance = (jnp.var(x, where=mask) for x in (target - value, target))
    if not jax.debug_nans.value:
        return 1 - error / variance
    return jnp.where(variance > 0, 1 - error / variance, -jnp.inf)


def _rows(
    reward: Any, terminated: Any, truncated: Any, mask: Any, **arrays: Any
) -> _Rows:
    """Checks that all shapes agree; returns reward, terminated, done and mask."""
    shape = jnp.shape(reward)
    named = {"reward": reward, "terminated": terminated, "truncated": truncated}
    named |= arrays if mask is None else {**arrays, "mask": mask}
    for name, x in named.items():
        checks.check_shape(f"`{name}` must be", x, shape)
    reward, terminated, truncated = map(jnp.asarray, (reward, terminated, truncated))
    if not jnp.issubdtype(reward.dtype, jnp.floating):  # discounts have its dtype
        reward = reward.astype(float)
    mask = jnp.ones(shape, bool) if mask is None else jnp.asarray(mask)
    flags = {"terminated": terminated, "truncated": truncated, "mask": mask}
    for name, x in flags.items():
        if x.dtype != bool:
            raise ValueError(f"`{name}` must be bool, got {x.dtype}.")
    return reward, terminated, terminated | truncated, mask


@jax.jit
def _next_values(rows: tuple[jax.Array, ...], last_value: jax.Array) -> jax.Array:
    done, mask, value, final_value = rows

    def select_valid(next_row: tuple, row: tuple) -> tuple:
        return next_row[0] | row[0], jnp.where(row[0], row[1], next_row[1])

    def straight(mask: jax.Array, value: jax.Array, last_value: jax.Array) -> jax.Array:
        is_valid = jnp.concatenate([mask, jnp.ones_like(mask[:1])])
        pairs = is_valid, jnp.concatenate([value, last_value[None]])
        return jax.lax.associative_scan(select_valid, pairs, reverse=True)[1][1:]

    def loop(mask: jax.Array, value: jax.Array, last_value: jax.Array) -> jax.Array:
        def step(next_value: jax.Array, row: tuple) -> tuple[jax.Array, jax.Array]:
            mask, value = row
            return jnp.where(mask, value, next_value), next_value

        return jax.lax.scan(step, last_value, (mask, value), reverse=True)[1]

    # A loop compiles faster, but on a GPU its steps are launches outside CUDA graphs.
    next_value = platform.choose(loop, straight, mask, value, last_value)
    return jnp.where(done, final_value, next_value)


@jax.jit
def _gae(
    rows: _Rows, value: jax.Array, next_value: jax.Array, gamma: Any, lambda_: Any
) -> jax.Array:
    error, _ = _errors(rows, next_value, gamma)
    error = error - value
    weight = jnp.asarray(gamma * lambda_, error.dtype)
    return _accumulate(rows, error, weight, jnp.zeros_like(error))[0]


@jax.jit
def _lambda_returns(
    rows: _Rows, next_value: jax.Array, gamma: Any, lambda_: Any
) -> jax.Array:
    # `term` bootstraps from V. If there is a next row, its return replaces the fraction
    # λ of V.
    term, baseline = _errors(rows, next_value, gamma)
    weight = jnp.asarray(gamma * lambda_, term.dtype)
    return _accumulate(rows, term, weight, baseline)[0]


@jax.jit
def _vtrace(
    rows: _Rows,
    value: jax.Array,
    next_value: jax.Array,
    ratio: jax.Array,
    gamma: Any,
    lambda_: Any,
    clip_rho: Any,
    clip_c: Any,
) -> tuple[jax.Array, jax.Array]:
    mask = rows[3]
    error, _ = _errors(rows, next_value, gamma)
    error, rho = error - value, jnp.minimum(ratio, clip_rho)
    weight = jnp.asarray(gamma * lambda_, error.dtype) * jnp.minimum(ratio, clip_c)
    # `total` is v - V of each row, and `next_total` of the next row.
    total, next_total = _accumulate(rows, rho * error, weight, jnp.zeros_like(error))
    advantage = rho * (error + jnp.asarray(gamma, error.dtype) * next_total)
    return jnp.where(mask, advantage, 0.0), jnp.where(mask, value + total, 0.0)


def _errors(
    rows: _Rows, next_value: jax.Array, gamma: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns r + γ V(next_obs), and V(next_obs), which is 0 at terminations."""
    reward, terminated, _, mask = rows
    # Masked-out rows have arbitrary values.
    bootstrap = jnp.where(terminated | ~mask, 0.0, next_value)
    return reward + jnp.asarray(gamma, reward.dtype) * bootstrap, bootstrap


def _accumulate(
    rows: _Rows, term: jax.Array, weight: jax.Array, baseline: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns x_t = term_t + weight_t (x_{t+1} - baseline_t), and x_{t+1}, `[T, ...]`.

    `weight` may be a scalar. Row t + 1 is the next row of the same episode that is not
    masked out. If there is no such row, x_t is term_t, and x_{t+1} is 0. If `mask` is
    False, x_t is 0.
    """

    # Backward in time. The carry holds x of the next row that is not masked out, and
    # whether this row exists; a masked-out row does not change the carry.
    def step(carry: tuple, row: tuple) -> tuple:
        next_x, exists = carry
        term, row_weight, baseline, done, mask = row
        has_next, scale = exists & ~done, row_weight if weight.ndim else weight
        x = term + jnp.where(has_next, scale * (next_x - baseline), 0.0)
        out = jnp.where(mask, x, 0.0), jnp.where(has_next, next_x, 0.0)
        return (jnp.where(mask, x, next_x), exists | mask), out

    _, _, done, mask = rows
    start = jnp.zeros_like(term[0]), jnp.zeros_like(mask[0])
    inputs = term, weight if weight.ndim else (), baseline, done, mask
    unroll = {"gpu": _ROWS_ON_GPU, "other": _ROWS_ELSEWHERE}
    return platform.scan(step, start, inputs, **unroll, reverse=True)[1]
