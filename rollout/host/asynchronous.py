"""Chooses the lanes that step if environments step asynchronously.

`decide` and `take` replace the functions of the same name in `rollout.host.host_step`:
the policy acts in all waiting lanes, and a row has the first lanes to be ready.
`Decision.action` is a list of lanes, `[K]`, with their observations, actions and
extras, `[K, ...]`.
"""

from typing import Any

import jax
import numpy as np

from rollout.base.platform import to_host
from rollout.base.types import ArrayTree
from rollout.envs.host.arrays import place_rows
from rollout.host.host_state import Flight, HostSpec, HostState, put
from rollout.host.host_step import Decision, LaneResults
from rollout.types import AsyncInfo


def decide(spec: HostSpec, state: HostState, params: Any) -> Decision:
    """Applies the policy in all waiting lanes."""
    assert state.flight is not None
    is_waiting = ~state.flight.mask
    # Idle lanes get no action, unless a fixed batch size requires their steps.
    if state.plan is not None and spec.env.batch_size is None:
        is_waiting &= state.plan.mask
    step, policy_state, is_first = state.step, state.policy_state, state.is_first
    # Usually these are the lanes of the last row; at the start, all lanes.
    env_id, messages = np.flatnonzero(is_waiting).astype(np.int32), []
    for first in range(0, len(env_id), spec.width):
        lanes = env_id[first : first + spec.width]
        # Pad, so that one compiled program handles any number of lanes. The policy
        # drops the state of lane B, which is padding with arbitrary observations.
        num_envs, count = spec.env.num_envs, len(lanes)
        padded = np.full(spec.width, num_envs, np.int32)
        padded[:count] = lanes
        obs = _rows_of(state.obs, np.minimum(padded, num_envs - 1))
        ids = is_first, state.episode_id, padded
        policy_state, *output = spec.policy.act(params, step, policy_state, obs, *ids)
        step, is_first = step + 1, put(is_first, lanes, False)
        messages.append((lanes, _rows_of((obs, *to_host(tuple(output))), slice(count))))
    return Decision(step, policy_state, is_first, messages)


def take(spec: HostSpec, state: HostState, decision: Decision) -> LaneResults:
    """Sends the actions, and receives the steps of the first lanes to be ready."""
    assert state.flight is not None
    mask, sent = state.flight.mask.copy(), state.flight.sent
    # Send all actions before receiving, so that no environment is idle.
    for lanes, values in decision.action:
        if sent is None:
            sent = jax.tree.map(
                lambda x: np.zeros((len(mask), *x.shape[1:]), x.dtype), values
            )
        place_rows(sent, lanes, values)
        spec.env.send(values[1], lanes)
        mask[lanes] = True
    # At the end of a plan, fewer environments are in flight.
    num_ready = min(spec.width, int(np.count_nonzero(mask)))
    result, lanes = spec.env.receive(num_ready)
    mask[lanes] = False
    obs, action, extras = _rows_of(sent, lanes)
    row, rows = state.num_rows, state.rows
    rows.write(row, "obs", obs)
    rows.write(row, "action", action)
    rows.write_extras(row, extras)
    rows.lane[row, : len(lanes)] = lanes
    env_id: Any = lanes
    info = AsyncInfo(env_id=env_id, info=result.info, num_envs=spec.env.num_envs)
    return LaneResults(lanes, result._replace(info=info), Flight(mask, sent))


def _rows_of(tree: ArrayTree, index: Any) -> ArrayTree:
    return jax.tree.map(lambda x: x[index], tree)
