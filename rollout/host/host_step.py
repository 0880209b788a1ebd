"""One step of every lane of a host collection, as functions of one state value.

This is the NumPy version of `rollout.kernel.step`, which cannot call environments
outside of JAX. `decide` applies the policy, `take` steps the environments, `advance`
computes the next state and writes a row, and `restart` rebuilds failed environments and
starts new episodes. `advance` and `restart` return the next `HostState` and leave the
old one valid: only observations, rows from `num_rows` on, and the rows of lost episodes
change in place.

`rollout.host.asynchronous` chooses the lanes that step if environments step
asynchronously.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rollout.base.types import ArrayTree
from rollout.envs.host.arrays import place_rows
from rollout.envs.host.types import EnvFault, HostStep
from rollout.host.host_state import (
    ALL_LANES,
    NO_FAULTS,
    NO_LIMIT,
    Faults,
    Flight,
    HostSpec,
    HostState,
    mark,
    put,
)
from rollout.types import Transition


class Decision(NamedTuple):
    """Actions of the policy that the environments have not yet received.

    Attributes:
        step: number of calls of the policy so far.
        policy_state: `[B, ...]` next state of the policy.
        is_first: `[B]` bool, lanes that have not yet acted in their episode.
        action: `[B, ...]` actions. With asynchronous steps, the actions of the waiting
            lanes, see `rollout.host.asynchronous`.
        extras: `[B, ...]` extras of the policy, possibly on the device.
    """

    step: int
    policy_state: ArrayTree
    is_first: np.ndarray
    action: Any
    extras: ArrayTree = ()


class LaneResults(NamedTuple):
    """Results of the environments for a row.

    Attributes:
        lanes: `ALL_LANES`, or `[K]` int32, the lanes that have stepped.
        result: `[K, ...]`, their results.
        flight: steps in flight.
    """

    lanes: Any
    result: HostStep
    flight: Flight | None = None


def decide(spec: HostSpec, state: HostState, params: Any) -> Decision:
    """Applies the policy in all lanes."""
    # Pass the copy in the rows: JAX may alias its input, and the environments may
    # overwrite the original while the program runs.
    obs = state.rows.write(state.num_rows, "obs", state.obs)
    policy_state, action, extras = spec.policy.act(
        params, state.step, state.policy_state, obs, state.is_first, state.episode_id
    )
    return Decision(state.step + 1, policy_state, spec.no_lanes, action, extras)


def take(spec: HostSpec, state: HostState, decision: Decision) -> LaneResults:
    """Steps all lanes, and writes their actions and extras."""
    result = spec.env.step(decision.action)
    state.rows.write(state.num_rows, "action", decision.action)
    state.rows.write_extras(state.num_rows, decision.extras)
    return LaneResults(ALL_LANES, result)


def advance(
    spec: HostSpec,
    state: HostState,
    params: Any,
    decision: Decision,
    lane_results: LaneResults,
    *,
    limit: int = NO_LIMIT,
    is_last: bool = False,
) -> tuple[HostState, Faults]:
    """Writes the next row after a step of the environments, without resets.

    Args:
        spec: constants of the collection.
        state: state before the step.
        params: parameters of the policy, for the critic.
        decision: actions of the policy.
        lane_results: results of the K lanes that have stepped.
        limit: number of steps after which episodes are truncated.
        is_last: whether to truncate all episodes that do not terminate.

    Returns:
        The next state, in which lanes whose episode has ended wait for `restart`, and
        the errors of failed environments. The episodes of these are lost.
    """
    # The first K columns of the row have the results.
    lanes, result, flight = lane_results
    plan, terminated, truncated = state.plan, result.terminated, result.truncated
    reward, is_step, is_first = result.total_reward, result.mask, decision.is_first
    if is_step is None:  # the usual case, kept fast
        is_step = spec.all_lanes[lanes]
    else:
        reward = np.where(is_step, reward, 0)
        is_first = put(is_first, lanes, is_first[lanes] | ~is_step)
    episode_id = state.episode_id[lanes]
    episode_length = state.episode_length[lanes] + is_step
    episode_return = state.episode_return[lanes] + reward
    # Mask out lanes that only reset themselves, and idle lanes.
    mask = is_step if plan is None else is_step & plan.mask[lanes]
    is_cut: Any = False
    if limit < NO_LIMIT:
        is_cut = mask & (episode_length >= limit) & ~truncated
        # An assigned episode that terminates at the limit is not truncated.
        is_cut = is_cut if plan is None else is_cut & ~terminated
        truncated = truncated | is_cut
    if is_last:
        truncated = truncated | (mask & ~terminated)
    if spec.policy.has_critic:
        bootstraps = truncated & ~terminated & mask
        _write_final_value(spec, state, params, decision, lane_results, bootstraps)
    state.rows.write_step(
        state.num_rows,
        result,
        terminated=terminated,
        truncated=truncated,
        mask=mask,
        is_cut=is_cut,
        episode_id=episode_id,
        episode_return=episode_return,
        episode_length=episode_length,
    )
    obs = result.obs
    if lanes is not ALL_LANES:
        place_rows(state.obs, lanes, obs)
        obs = state.obs
    state = state.replace(
        step=decision.step,
        policy_state=decision.policy_state,
        obs=obs,
        episode_return=put(state.episode_return, lanes, episode_return),
        episode_length=put(state.episode_length, lanes, episode_length),
        is_first=is_first,
        flight=flight,
        plan=plan if plan is None else plan.count_steps(mask),
        num_rows=state.num_rows + 1,
    )
    done = put(spec.no_lanes, lanes, terminated | truncated)
    return _end_episodes(state, done, _find_faults(spec, result, lanes))


def restart(spec: HostSpec, state: HostState) -> tuple[HostState, Faults]:
    """Rebuilds failed environments, else resets the lanes that begin an episode.

    Returns:
        The next state, and errors of environments. Call `restart` again until no lane
        waits for a reset. After a fault in a reset, the lane begins the following
        episode, since the seed may be the cause, and all other lanes are reset again
        with the same seeds.
    """
    env = spec.env
    if env.can_rebuild and np.count_nonzero(state.failed):
        return _rebuild(spec, state)
    lanes = np.flatnonzero(state.must_reset)
    # Queued ids count down from -1, and their numbers count up from 0.
    ids = state.episode_id
    env.at_episodes(np.where(ids < 0, -1 - ids, ids))
    obs: ArrayTree = None
    try:
        obs = env.reset(spec.seeds(ids, lanes), state.must_reset)
        causes = spec.obs_check.find_invalid(obs)
        causes = {n: causes[n] for n in lanes.tolist() if n in causes}
    except EnvFault as error:
        causes = error.causes
    if causes:
        return _end_episodes(state, spec.no_lanes, causes)
    flight = state.flight
    if flight is not None:  # a reset cancels steps
        flight = flight._replace(mask=flight.mask & ~state.must_reset)
        old = jax.tree.map(np.array, obs) if state.obs is None else state.obs
        place_rows(old, lanes, jax.tree.map(lambda x: x[lanes], obs))
        obs = old
    return state.replace(obs=obs, flight=flight, must_reset=spec.no_lanes), NO_FAULTS


def record(spec: HostSpec, state: HostState) -> HostState:
    """Records the complete rows: accumulates values and applies `record_fn`."""
    if state.recorded is not None:
        return state
    rows, accumulated = state.rows.read(state.num_rows), state.accumulated
    if spec.record_fn is None:
        recorded = _to_device(rows)
    else:
        accumulated, recorded = spec.record_fn(accumulated, rows, state.rows.lane)
    return state.replace(accumulated=accumulated, recorded=recorded)


def _to_device(rows: Transition) -> Transition:
    """Copies rows to the device."""
    if rows.reward.shape[0] > 1:
        return jax.device_put(rows)
    # `jax.device_put` takes five times as long for a row as a compiled copy.
    with jax.debug_nans(False), jax.debug_infs(False):  # infos may be NaN
        return _copy(rows)


@jax.jit
def _copy(row: Transition) -> Transition:
    return jax.tree.map(jnp.asarray, row)  # converts arrays if `jit` is disabled


def _write_final_value(
    spec: HostSpec,
    state: HostState,
    params: Any,
    decision: Decision,
    lane_results: LaneResults,
    bootstraps: np.ndarray,
) -> None:
    """Evaluates the critic at the observations with a True in `bootstraps`, `[K]`."""
    if state.num_rows and not np.count_nonzero(bootstraps):
        return  # rows without bootstraps stay zero
    lanes, result, _ = lane_results
    env_id = None if lanes is ALL_LANES else np.resize(lanes, spec.width)
    value = spec.policy.values(
        params, result.obs, decision.policy_state, bootstraps, env_id
    )
    state.rows.write(state.num_rows, "final_value", value)


def _end_episodes(
    state: HostState, done: np.ndarray, causes: Mapping[int, BaseException]
) -> tuple[HostState, Faults]:
    """Assigns the next episodes to the lanes in `done` and to failed environments."""
    faults = NO_FAULTS
    if causes:
        faults = Faults(causes, int(state.episode_length[next(iter(causes))]))
        state = _lose_episodes(state, causes)
        done = put(done, list(causes), True)
    if not np.count_nonzero(done):  # faster than `any`
        return state, faults
    if state.plan is None:
        return mark(state, done, state.next_ids), faults
    plan = state.plan.assign_next(done)
    return mark(state.replace(plan=plan), done, plan.episode_id), faults


def _lose_episodes(state: HostState, causes: Mapping[int, BaseException]) -> HostState:
    """Counts the episodes of failed environments and masks out their rows."""
    failed = list(causes)
    lost_ids, plan, num_episodes = state.episode_id[failed], state.plan, len(failed)
    if plan is not None:
        num_episodes = int(np.count_nonzero(plan.mask[failed]))
        plan = plan._replace(lost_ids=(*plan.lost_ids, *lost_ids.tolist()))
    num_steps = 0
    if state.rows is not None:
        num_steps = state.rows.mask_out(state.num_rows, lost_ids)
    stats = state.stats._replace(
        faulty_episodes=state.stats.faulty_episodes + num_episodes,
        lost_steps=state.stats.lost_steps + num_steps,
    )
    # The environment of a lost episode is rebuilt before it is reset.
    failed = put(state.failed, failed, True)
    return state.replace(plan=plan, stats=stats, failed=failed)


def _find_faults(
    spec: HostSpec, result: HostStep, lanes: Any
) -> Mapping[int, BaseException]:
    """Returns errors of the environments and of invalid values, by lane."""
    # Check after the row is written, since a fault masks out all rows of its episode.
    faults, reward = spec.obs_check.find_invalid(result.obs), result.total_reward
    if np.count_nonzero(np.isfinite(reward)) < len(reward):
        is_invalid = ~np.isfinite(reward)
        is_invalid = is_invalid if result.mask is None else is_invalid & result.mask
        for column in np.flatnonzero(is_invalid).tolist():
            message = f"`reward` must be finite, got {reward[column]}"
            faults.setdefault(column, ValueError(message))
    if not faults:
        return result.causes
    lane = np.arange(spec.env.num_envs)[lanes].tolist()
    return {lane[i]: cause for i, cause in faults.items()} | dict(result.causes)


def _rebuild(spec: HostSpec, state: HostState) -> tuple[HostState, Faults]:
    """Rebuilds the failed environments."""
    # Count attempts, so that `max_restarts` also limits failed rebuilds.
    num_restarts = state.stats.restarts + int(np.count_nonzero(state.failed))
    causes, failed = {}, spec.no_lanes
    try:
        spec.env.rebuild(state.failed)
    except EnvFault as error:  # the new environment also failed
        causes, failed = error.causes, put(failed, list(error.causes), True)
    stats = state.stats._replace(restarts=num_restarts)
    return state.replace(failed=failed, stats=stats), Faults(causes)
