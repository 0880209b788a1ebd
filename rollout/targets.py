"""Computes advantages and returns of a trajectory, to learn from.

Each row bootstraps from the next row of its episode that is not masked out: an agent
that waits for its turn has masked-out rows between its own. The last row of an episode
or of the window bootstraps from `next_value` instead, unless the task terminated there.
All functions are jitted, so that a notebook may call them as they are.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from rollout import checks, platform
from rollout.types import Transition

Scalar = float | jax.Array  # (), may be traced

_UNROLL = 16  # rows; more would save launches, and take longer to compile


def next_values(trajectory: Transition, last_value: jax.Array) -> jax.Array:
    """Computes V(next_obs) of every step from values that are already known.

    Where a step does not end its episode, the policy recorded the value of its
    successor in the next row. Only two kinds of values are computed apart: those of
    truncated steps, `final_value`, and that of the observation after the last step.

        next_value = rollout.next_values(t, collector.value(carry, params))

    Args:
        trajectory: `[T, B, ...]` of a policy with a critic, `Policy.value`, with V(obs)
            in `extras["value"]`, `[T, B]` float.
        last_value: `[B]` float, V(obs) of the carry after the last step; for the rows
            of agents see `rollout.agents.last_values`.

    Returns:
        `[T, B]` float, the `next_value` of `gae`, `lambda_returns` and
        `discounted_returns`: 0 where the task terminated, arbitrary where `mask` is
        False.

    Raises:
        ValueError: if the extras have no `value`, or the trajectory no `final_value`,
            or if a shape is not as above.
    """
    value = _values(trajectory)
    if isinstance(trajectory.final_value, tuple):
        raise ValueError(
            "`trajectory` must have `final_value`, got none: it is recorded where the "
            "policy has a critic, as `stateless_policy(..., value_fn=...)`. Without "
            "one, compute V(next_obs) from `next_obs`."
        )
    if isinstance(trajectory.final_value, Mapping):
        raise ValueError(
            "`trajectory` must be the rows of one group where the critic returns one "
            "value per agent, got those of whole steps: call "
            "`rollout.agents.agent_transitions` first."
        )
    checks.shaped("trajectory.final_value", trajectory.final_value, value.shape)
    checks.shaped("last_value", last_value, value.shape[1:])
    done = trajectory.terminated | trajectory.truncated
    rows = done, trajectory.mask, value, trajectory.final_value
    return _next_values(rows, jnp.asarray(last_value, value.dtype))


def gae(
    trajectory: Transition, next_value: jax.Array, *, gamma: Scalar, lam: Scalar
) -> jax.Array:
    """Computes the generalized advantage estimate of every step.

        δ_t = r_t + γ (1 - terminated_t) V(next_obs_t) - V(obs_t)
        A_t = δ_t + γ λ (1 - done_t) A_{t+1}

    t + 1 is the next row that is not masked out, and γ is per row. The sum of A and
    V(obs) is the λ-return, the usual target of the value function.

    Args:
        trajectory: `[T, B, ...]`, with V(obs) in `extras["value"]`, `[T, B]` float.
        next_value: `[T, B]` float, V(next_obs): the value of the true successors.
        gamma: γ, discount per step, in [0, 1].
        lam: λ, in [0, 1]: 0 for the one-step error, 1 for return minus value.

    Returns:
        `[T, B]` float, in discounted reward; 0 where `mask` is False.

    Raises:
        ValueError: if the extras have no `value`, if `gamma` or `lam` is no number in
            [0, 1], or if a shape is not as above.

    Source:
        "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
        eq. 11 and 16, arXiv:1506.02438.
    """
    checks.fraction("gamma", gamma)
    checks.fraction("lam", lam)
    value = _values(trajectory)
    checks.shaped("next_value", next_value, value.shape)
    return _sum_up(_fields(trajectory), next_value, gamma, lam, value)


def lambda_returns(
    trajectory: Transition, next_value: jax.Array, *, gamma: Scalar, lam: Scalar
) -> jax.Array:
    """Computes the λ-return of every step.

        G_t = r_t + γ (1 - terminated_t) ((1 - λ) V(next_obs_t) + λ G_{t+1})

    with V(next_obs_t) for G_{t+1} in the last row of an episode or of the window.

    Args:
        trajectory: `[T, B, ...]`.
        next_value: `[T, B]` float, V(next_obs): the value of the true successors.
        gamma: γ, discount per step, in [0, 1].
        lam: λ, in [0, 1].

    Returns:
        `[T, B]` float, in discounted reward; 0 where `mask` is False.

    Raises:
        ValueError: if `next_value` is not `[T, B]`, or if `gamma` or `lam` is no number
            in [0, 1].

    Source:
        "Reinforcement Learning: An Introduction", 2nd ed., eq. 12.19 (without the
        approximation) and "High-Dimensional Continuous Control", arXiv:1506.02438.
    """
    checks.fraction("gamma", gamma)
    checks.fraction("lam", lam)
    checks.trajectory(trajectory)
    checks.shaped("next_value", next_value, trajectory.mask.shape)
    return _sum_up(_fields(trajectory), next_value, gamma, lam)


def discounted_returns(
    trajectory: Transition, next_value: jax.Array | None = None, *, gamma: Scalar
) -> jax.Array:
    """Computes the discounted sum of the rewards from every step onwards.

        G_t = r_t + γ (1 - done_t) G_{t+1}

    Args:
        trajectory: `[T, B, ...]`.
        next_value: `[T, B]` float, V(next_obs), in place of the missing rewards where
            an episode was truncated or goes on after the window; None counts them as 0.
        gamma: γ, discount per step, in [0, 1].

    Returns:
        `[T, B]` float, in discounted reward; 0 where `mask` is False.

    Raises:
        ValueError: if `next_value` is not `[T, B]`, or if `gamma` is no number in
            [0, 1].

    Source:
        "Reinforcement Learning: An Introduction", 2nd ed., eq. 3.9.
    """
    checks.trajectory(trajectory)
    if next_value is None:
        next_value = jnp.zeros_like(trajectory.reward)
    return lambda_returns(trajectory, next_value, gamma=gamma, lam=1.0)


def _values(trajectory: Transition) -> jax.Array:
    """Returns V(obs) as the policy recorded it, `[T, B]`."""
    checks.trajectory(trajectory)
    extras = trajectory.extras
    if not isinstance(extras, dict) or "value" not in extras:
        got = sorted(extras) if isinstance(extras, dict) else type(extras).__name__
        raise ValueError(f"`trajectory.extras` must have `value`, got {got}.")
    name = 'trajectory.extras["value"]'
    checks.shaped(name, extras["value"], trajectory.mask.shape)
    return extras["value"]


def _fields(trajectory: Transition) -> tuple[jax.Array, ...]:
    """Selects the fields that the targets read; the others, and ids, may be `()`."""
    checks.shaped("trajectory.reward", trajectory.reward, trajectory.mask.shape)
    episode_id = trajectory.episode_id
    if isinstance(episode_id, tuple):  # then only the flags separate episodes
        episode_id = jnp.zeros(trajectory.reward.shape, jnp.int32)
    return (
        trajectory.reward,
        trajectory.terminated,
        trajectory.terminated | trajectory.truncated,
        trajectory.mask,
        episode_id,
    )


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
def _sum_up(
    fields: tuple[jax.Array, ...],
    next_value: jax.Array,
    gamma: jax.Array,
    lam: jax.Array,
    value: jax.Array | None = None,
) -> jax.Array:
    """x_t = term_t + γ λ (x of the next row - instead_t), `[T, B]`.

    The next row is the next one of the same episode that is not masked out; without one
    x_t is term_t. Where `mask` is False, x_t is 0.

    For an advantage, the one-step error of `value`, `instead` is 0. For a λ-return
    `term` bootstraps from all of V, and `instead` is V: where there is a next row, λ of
    it gives way to that row's return.
    """
    reward, terminated, done, mask, episode_id = fields
    # A masked-out row may hold anything.
    instead = jnp.where(terminated | ~mask, 0.0, next_value)
    term = reward + jnp.asarray(gamma, reward.dtype) * instead
    if value is not None:
        term, instead = term - value, jnp.zeros_like(value)
    weight = jnp.asarray(gamma * lam, term.dtype)

    # Backwards in time. The carry is the next row that is not masked out: its x, its
    # episode, and whether there is one; a masked-out row passes it on.
    def step(following: tuple, row: tuple) -> tuple:
        later, later_id, is_there = following
        term, instead, done, mask, episode_id = row
        goes_on = is_there & ~done & (episode_id == later_id)
        here = term + jnp.where(goes_on, weight * (later - instead), 0.0)
        following = (
            jnp.where(mask, here, later),
            jnp.where(mask, episode_id, later_id),
            is_there | mask,
        )
        return following, jnp.where(mask, here, 0.0)

    nothing = jnp.zeros_like(term[0]), episode_id[0], jnp.zeros_like(mask[0])
    rows, unroll = (term, instead, done, mask, episode_id), _UNROLL
    return platform.scan(step, nothing, rows, gpu=unroll, other=unroll, reverse=True)[1]
