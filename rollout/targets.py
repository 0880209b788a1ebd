"""Computes advantages and returns from arrays of a rollout, to learn from.

All functions take arrays `[T, ...]` of one shape, time first: those of a `Transition`,
of agents' rows, or of a rollout of your own. Each row bootstraps from the next one that
is not masked out: an agent that waits for its turn has masked-out rows between its own.
A row that ends an episode, and the last one, bootstraps from `next_value` instead,
unless the task terminated there. All are jitted, so that a notebook may call them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from rollout import checks, platform
from rollout.types import Transition, check_trajectory

Scalar = float | jax.Array  # (), may be traced
_Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # see `_rows`

# Rows of an iteration. Three launches of 16 rows are too few for XLA to make a CUDA
# graph of them; 128 are a whole rollout, which needs no loop.
_ROWS_ON_GPU, _ROWS_ELSEWHERE = 128, 16


def next_values(
    trajectory: Transition, value: jax.Array, last_value: jax.Array
) -> jax.Array:
    """Computes V(next_obs) of every step from values that are already known.

    Where a step does not end its episode, the value of its successor is that of the
    next row. Only two kinds of values are computed apart: those of truncated steps,
    `final_value`, and that of the observation after the last step.

        value, last_value = t.extras["value"], collector.value(carry, params)
        next_value = rollout.next_values(t, value, last_value)

    Args:
        trajectory: `[T, B, ...]` of a policy with a critic, `Policy.value`.
        value: `[T, B]` float, V(obs), as the policy recorded it.
        last_value: `[B]` float, V(obs) of the carry after the last step; for the rows
            of agents see `rollout.agents.last_values`.

    Returns:
        `[T, B]` float, the `next_value` of the functions below: 0 where the task
        terminated, arbitrary where `mask` is False.

    Raises:
        ValueError: if the trajectory has no `final_value`, or if a shape is not as
            above.
    """
    check_trajectory(trajectory)
    if isinstance(trajectory.final_value, tuple):
        raise ValueError(
            "`trajectory` must have `final_value`, got none: it is recorded where the "
            "policy has a critic, as `stateless_policy(..., value_fn=...)`. Without "
            "one, compute V(next_obs) from `next_obs`."
        )
    shape, final_value = trajectory.mask.shape, trajectory.final_value
    checks.shaped("`value` must be", value, shape)
    # A critic of several agents returns a dict by group, for rows of whole steps.
    what = "`trajectory.final_value`, of `agent_transitions` if by group, must be"
    checks.shaped(what, final_value, shape)
    checks.shaped("`last_value` must be", last_value, shape[1:])
    value = jnp.asarray(value)
    # `final_value` is 0 at terminations: there is nothing to bootstrap from.
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

    t + 1 is the next row that is not masked out, and γ is per row. Where V(next_obs) is
    the V(obs) of the next row, the sum of A and V(obs) is the λ-return, the usual
    target of the value function.

    Args:
        reward: `[T, B]`; integers count as floats.
        value: `[T, B]` float, V(obs).
        next_value: `[T, B]` float, V(next_obs): the value of the true successors.
        terminated: `[T, B]` bool, the task ended.
        truncated: `[T, B]` bool, the episode was cut, as by a time limit.
        gamma: γ, discount per step, in [-1, 1]: negative where two players alternate,
            and each has the other's loss.
        lambda_: λ, in [0, 1]: 0 for the one-step error, 1 for return minus value.
        mask: `[T, B]` bool, False where there was no step; None for all.

    Returns:
        `[T, B]` float, in discounted reward; 0 where `mask` is False.

    Raises:
        ValueError: if `gamma` or `lambda_` is no number in its range, or if the shapes
            differ.

    Source:
        "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
        eq. 11 and 16, arXiv:1506.02438.
    """
    checks.fraction("gamma", gamma, lowest=-1)
    checks.fraction("lambda_", lambda_)
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

    with V(next_obs_t) for G_{t+1} in the last row of an episode or of the window.

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
    checks.fraction("gamma", gamma, lowest=-1)
    checks.fraction("lambda_", lambda_)
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
    """Computes the discounted sum of the rewards from every step onwards.

        G_t = r_t + γ (1 - done_t) G_{t+1}

    Args:
        reward: as in `gae`.
        terminated: as in `gae`.
        truncated: as in `gae`.
        gamma: as in `gae`.
        next_value: `[T, B]` float, V(next_obs), in place of the missing rewards where
            an episode was truncated or goes on after the window; None counts them as 0.
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
    """Corrects advantages and targets for actions of an older policy, by V-trace.

        ρ_t = min(ρ̄, π(a_t) / μ(a_t)), c_t = λ min(c̄, π(a_t) / μ(a_t))
        δ_t = ρ_t (r_t + γ (1 - terminated_t) V(next_obs_t) - V(obs_t))
        v_t = V(obs_t) + δ_t + γ c_t (1 - done_t) (v_{t+1} - V(obs_{t+1}))
        A_t = ρ_t (r_t + γ (1 - terminated_t) v_{t+1} - V(obs_t))

    with V(next_obs_t) for v_{t+1} in the last row of an episode or of the window. Where
    both policies are the same, v - V is the advantage of `gae`. Actors that lag behind,
    as those of `Stream(prefetch=1)` and of Ray do, act by μ.

    Args:
        reward: as in `gae`.
        value: as in `gae`, by the critic that learns.
        next_value: likewise.
        terminated: as in `gae`.
        truncated: as in `gae`.
        log_rhos: `[T, B]` float, log π(a) - log μ(a): of the policy that learns, minus
            that of the policy that acted. No derivative passes through.
        gamma: as in `gae`.
        lambda_: λ, in [0, 1].
        clip_rho_threshold: ρ̄, the largest ρ, at least 0: the critic learns the value of
            μ if it is near 0, and that of π if it is infinite.
        clip_c_threshold: c̄, at least 0: the largest weight of later errors, which
            changes the speed of learning and not what is learned.
        mask: as in `gae`.

    Returns:
        The advantages A and the targets v of the critic, `[T, B]` float, in discounted
        reward; 0 where `mask` is False.

    Raises:
        ValueError: as `gae` does, or if a threshold is no number of at least 0.

    Source:
        "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
        Architectures", eq. 1 and section 4.2, arXiv:1802.01561.
    """
    checks.fraction("gamma", gamma, lowest=-1)
    checks.fraction("lambda_", lambda_)
    thresholds = clip_rho_threshold, clip_c_threshold
    checks.fraction("clip_rho_threshold", clip_rho_threshold, highest=math.inf)
    checks.fraction("clip_c_threshold", clip_c_threshold, highest=math.inf)
    others = {"value": value, "next_value": next_value, "log_rhos": log_rhos}
    rows = _rows(reward, terminated, truncated, mask, **others)
    # The weights correct for who acted; the policy is not to learn through them.
    ratio = jnp.exp(jax.lax.stop_gradient(jnp.asarray(log_rhos)))
    return _vtrace(
        rows, jnp.asarray(value), next_value, ratio, gamma, lambda_, *thresholds
    )


def explained_variance(
    value: jax.Array, target: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Computes 1 - Var(target - value) / Var(target), to judge a critic.

    Args:
        value: V(obs), an array of floats.
        target: returns that the critic learns, of the same shape.
        mask: bool, the rows that count; None for all.

    Returns:
        `()` float: 1 if the critic is perfect, 0 if it predicts a constant, and less
        than 0 if it is worse. NaN if all targets are equal.
    """
    error = jnp.var(target - value, where=mask)
    return 1 - error / jnp.var(target, where=mask)


def _rows(
    reward: Any, terminated: Any, truncated: Any, mask: Any, **others: Any
) -> _Rows:
    """Checks that all have one shape; returns reward, terminated, done and mask."""
    shape = jnp.shape(reward)
    named = {"reward": reward, "terminated": terminated, "truncated": truncated}
    named |= others if mask is None else {**others, "mask": mask}
    for name, x in named.items():
        checks.shaped(f"`{name}` must be", x, shape)
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
    # Without a loop, which would be launches outside of CUDA graphs.
    known = jnp.concatenate([mask, jnp.ones_like(mask[:1])])
    value = jnp.concatenate([value, last_value[None]])

    def nearest(later: tuple, row: tuple) -> tuple:
        return later[0] | row[0], jnp.where(row[0], row[1], later[1])

    _, later = jax.lax.associative_scan(nearest, (known, value), reverse=True)
    return jnp.where(done, final_value, later[1:])


@jax.jit
def _gae(
    rows: _Rows, value: jax.Array, next_value: jax.Array, gamma: Any, lambda_: Any
) -> jax.Array:
    error, _ = _errors(rows, next_value, gamma)
    error = error - value
    weight = jnp.asarray(gamma * lambda_, error.dtype)
    return _sum_up(rows, error, weight, jnp.zeros_like(error))[0]


@jax.jit
def _lambda_returns(
    rows: _Rows, next_value: jax.Array, gamma: Any, lambda_: Any
) -> jax.Array:
    # `term` bootstraps from all of V: where there is a next row, λ of it gives way to
    # that row's return.
    term, instead = _errors(rows, next_value, gamma)
    weight = jnp.asarray(gamma * lambda_, term.dtype)
    return _sum_up(rows, term, weight, instead)[0]


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
    # The sum is v - V; `later` is that of the next row.
    total, later = _sum_up(rows, rho * error, weight, jnp.zeros_like(error))
    advantage = rho * (error + jnp.asarray(gamma, error.dtype) * later)
    return jnp.where(mask, advantage, 0.0), jnp.where(mask, value + total, 0.0)


def _errors(
    rows: _Rows, next_value: jax.Array, gamma: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns r + γ V(next_obs), and V(next_obs), 0 where the task terminated."""
    reward, terminated, _, mask = rows
    # A masked-out row may hold anything.
    after = jnp.where(terminated | ~mask, 0.0, next_value)
    return reward + jnp.asarray(gamma, reward.dtype) * after, after


def _sum_up(
    rows: _Rows, term: jax.Array, weight: jax.Array, instead: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """x_t = term_t + weight_t (x of the next row - instead_t), and that x, `[T, ...]`.

    `weight` may be a scalar. The next row is the next one of the same episode that is
    not masked out; without one x_t is term_t, and x of the next row 0. Where `mask` is
    False, x_t is 0.
    """

    # Backwards in time. The carry is the next row that is not masked out: its x, and
    # whether there is one; a masked-out row passes it on.
    def step(following: tuple, row: tuple) -> tuple:
        later, is_there = following
        term, own_weight, instead, done, mask = row
        goes_on, scale = is_there & ~done, own_weight if weight.ndim else weight
        here = term + jnp.where(goes_on, scale * (later - instead), 0.0)
        out = jnp.where(mask, here, 0.0), jnp.where(goes_on, later, 0.0)
        return (jnp.where(mask, here, later), is_there | mask), out

    _, _, done, mask = rows
    nothing = jnp.zeros_like(term[0]), jnp.zeros_like(mask[0])
    inputs = term, weight if weight.ndim else (), instead, done, mask
    unroll = {"gpu": _ROWS_ON_GPU, "other": _ROWS_ELSEWHERE}
    return platform.scan(step, nothing, inputs, **unroll, reverse=True)[1]
