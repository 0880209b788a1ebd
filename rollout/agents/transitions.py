"""Converts a trajectory to the transitions of each agent.

An agent's action is *answered* at the agent's next turn, when the agent ends, or at the
end of the episode. Until then the action is *pending*: it may be taken in one
trajectory and answered in the next. Steps at which an agent has no pending action have
a row only in `team_transitions`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.agents.mapping import MapExtras, PolicyIndex
from rollout.base import checks, platform, trees
from rollout.collector import Collector
from rollout.envs.multi_agent import AgentGroup, AgentInfo, AgentLayout, layout_of
from rollout.envs.types import ArrayTree
from rollout.host.host_collector import HostCollector
from rollout.types import (
    AsyncInfo,
    Carry,
    PerAgent,
    Transition,
    check_trajectory,
)

_UNROLL = 16  # steps in one iteration on accelerators


class AgentTransition(Transition):
    """The transitions of the agents of a group, `[T, B * A_g, ...]`.

    Agent i of lane b is in column `b * A_g + i`. `episode_return` sums the rewards of
    the agent's transitions in the episode so far, and `episode_length` counts the
    agent's actions. `extras` come from the agent's policy, `info` is `()`, and
    `accumulated` has the `PerAgent` values.

    Attributes:
        acting: `[T, B * A_g]` bool, True if the transition has an action of the agent.
        stale_next_obs: `[T, B * A_g]` bool, True if the episode ended without an
            observation for the agent: `next_obs` repeats the agent's last observation.
        policy_id: `[T, B * A_g]` int32, index of the agent's policy; `()` without a
            `policy_map`.
        policy_index: maps the indices to names; `()` without a `policy_map`.
    """

    acting: jax.Array  # [T, B * A_g]
    stale_next_obs: jax.Array  # [T, B * A_g]
    policy_id: ArrayTree = ()  # [T, B * A_g]
    policy_index: PolicyIndex | tuple[()] = ()


AgentRows = dict[str, AgentTransition]  # by group, `[T, B * A_g]`

# Maps the extras of one group's policies to the values that the policies recorded.
RecordedValueFn = Callable[[Any], jax.Array]


class Pending(struct.PyTreeNode, kw_only=True):
    """The unanswered actions at the end of a trajectory.

    Attributes:
        is_open: `[B, A]` bool, True if the agent has a pending action.
        reward: `[B, A]` float32, sum of the agent's rewards since the pending action.
        answered: `[B, A]` float32, sum of the rewards of the agent's answered actions
            in the episode.
        episode_id: `[B]` int32, episode of the lane's last step.
        source: `(obs, action, extras, policy_id)` of the pending action by group, each
            `[B, A_g, ...]`.
        layout: agents and groups of the environment.
    """

    is_open: jax.Array  # [B, A]
    reward: jax.Array  # [B, A]
    answered: jax.Array  # [B, A]
    episode_id: jax.Array  # [B]
    source: dict[str, tuple[ArrayTree, ...]]  # {group: [B, A_g, ...]}
    layout: AgentLayout = struct.field(pytree_node=False)

    @classmethod
    def init(
        cls, collector: Collector | HostCollector, carry: Carry, params: Any = None
    ) -> "Pending | tuple[()]":
        """Makes the first `pending` of `agent_transitions`, without pending actions.

        Actions taken before `carry` have no transition.

        Args:
            collector: a collector of an environment with several agents.
            carry: the carry from which the first trajectory starts.
            params: parameters as in `collect_steps`; they determine the shapes of the
                extras.

        Returns:
            The initial `pending`; `()` if every agent acts at every step, so that
            actions are never pending.

        Raises:
            ValueError: if the environment does not have several agents.
        """
        layout = layout_of(collector.env)
        if layout.simultaneous:
            return ()
        num_envs = collector.env.num_envs
        # A row of asynchronous lanes is shorter than the lanes.
        row = trees.blank(collector.row_shape(params), (num_envs,), skip=1)
        zeros = jnp.zeros((num_envs, len(layout.agents)), jnp.float32)
        return cls(
            is_open=zeros.astype(bool),
            reward=zeros,
            answered=zeros,
            episode_id=carry.episode.episode_id,
            source={group.name: _source(row, group) for group in layout.groups},
            layout=layout,
        )


def agent_transitions(
    pending: Pending | tuple[()],
    trajectory: Transition,
    *,
    recorded_value_fn: RecordedValueFn | None = None,
) -> tuple[Pending | tuple[()], AgentRows]:
    """Converts a trajectory to each agent's transitions, inside or outside of `jit`.

    A transition is in the row of the step that answers the agent's action: the agent's
    next turn, the end of the agent, or the end of the episode. `reward` is the sum of
    the agent's rewards since the action, and `next_obs` is the agent's next
    observation. `terminated` and `truncated` are the flags of the agent, or of the
    episode if the agent did not end earlier. The next call answers the actions that are
    pending at the end of the trajectory: every action has exactly one transition.

    Rewards before an agent's first action and after its end are in no transition. This
    is correct for agents that cannot earn rewards after they end. Use
    `team_transitions` if agents cooperate.

    Args:
        pending: from `Pending.init` or the previous call.
        trajectory: `[T, B, ...]`, the next steps. Pass every trajectory exactly once
            and in order: otherwise the wrong actions are answered. Episodes may be
            discarded between trajectories, as in `collect_episodes`. Pass rows of a
            `HostCollector` with `num_ready` to `rollout.host.regroup_by_env` first.
        recorded_value_fn: function of the extras of one group that returns the values
            that the policies recorded, for example `lambda extras: extras["value"]`.
            Required if the policy has a critic and the agents take turns: the value of
            a stale `next_obs` is the value recorded with the action.

    Returns:
        The new `pending`, and the transitions by group; `mask` is False in rows without
        a transition.

    Raises:
        ValueError: if the environment of the trajectory does not have several agents;
            if the rows are in the order of service of `num_ready`; if `pending` belongs
            to another collector; if a required `recorded_value_fn` is missing.
    """
    return _transitions(pending, trajectory, recorded_value_fn, is_team=False)


def team_transitions(
    pending: Pending | tuple[()],
    trajectory: Transition,
    *,
    recorded_value_fn: RecordedValueFn | None = None,
) -> tuple[Pending | tuple[()], AgentRows]:
    """Converts a trajectory to transitions that last until the end of the episode.

    There are two differences from `agent_transitions`. `terminated` and `truncated` are
    the flags of the episode. A step at which the agent has no pending action, because
    the agent has ended or has not acted yet, has an additional transition with the
    reward of the step and `acting` False. An agent that ends early therefore receives
    the later rewards of its team, which is correct if agents cooperate. Train the
    critic on all transitions, and the policy on transitions with `acting` True.

    Args:
        pending: from `Pending.init` or the previous call of either function.
        trajectory: as in `agent_transitions`.
        recorded_value_fn: as in `agent_transitions`.

    Returns:
        The new `pending` and the transitions, as in `agent_transitions`.
        `episode_return` is the sum of all rewards of the agent in the episode so far,
        and `episode_length` counts the steps of the episode.

    Raises:
        ValueError: for the reasons listed in `agent_transitions`.
    """
    return _transitions(pending, trajectory, recorded_value_fn, is_team=True)


def last_values(
    pending: Pending | tuple[()],
    values: Mapping[str, jax.Array],
    *,
    recorded_value_fn: RecordedValueFn | None = None,
) -> dict[str, jax.Array]:
    """Returns the values that follow the last transitions, for `next_values`.

    The value of a pending action is the value that the policy recorded with the action.

        value_fn = lambda extras: extras["value"]
        pending, rows = rollout.agents.agent_transitions(
            pending, trajectory, recorded_value_fn=value_fn
        )
        values = collector.value(carry, params)
        last = rollout.agents.last_values(pending, values, recorded_value_fn=value_fn)
        t = rows["agents"]
        next_value = rollout.next_values(t, t.extras["value"], last["agents"])

    Args:
        pending: from `agent_transitions`.
        values: values of the observations in the carry after the trajectory, by group
            `[B, A_g]` float.
        recorded_value_fn: as in `agent_transitions`. Required if the agents take turns.

    Returns:
        The values by group, `[B * A_g]` float.

    Raises:
        ValueError: if a required `recorded_value_fn` is missing.
    """
    if not isinstance(pending, Pending):
        return {name: value.reshape(-1) for name, value in values.items()}
    last = {}
    for group in pending.layout.groups:
        if group.name not in values:
            continue
        is_open = pending.is_open[:, list(group.members)]
        _, _, extras, _ = pending.source[group.name]
        recorded = _recorded_value(recorded_value_fn, extras)
        value = jnp.where(is_open, recorded, values[group.name])
        last[group.name] = value.reshape(-1)
    return last


def select_policy(rows: AgentRows, name: str) -> AgentRows:
    """Selects the transitions of one policy.

    Args:
        rows: transitions from `agent_transitions`, of a trajectory collected with a
            `policy_map`.
        name: name of the policy.

    Returns:
        The transitions by group. With a mapping function, `mask` is False in rows of
        other policies. With a fixed mapping, the result contains only the columns of
        agents that the policy controls, `[T, B * n]`, and only groups with these
        agents. Select the same columns of `last_values`, for example of the agents 0
        and 1 of a group: `last.reshape(num_envs, -1)[:, :2].reshape(-1)`.

    Raises:
        ValueError: if the trajectory was not collected with a `policy_map` that has a
            policy of that name.
    """
    selected = {}
    for group, row in rows.items():
        policy_index = row.policy_index if isinstance(row, AgentTransition) else ()
        if not isinstance(policy_index, PolicyIndex):
            raise ValueError(
                "`rows` must be transitions of a trajectory that was collected with a "
                f"`policy_map`, got {checks.describe(row)} in group {group!r}."
            )
        is_selected = policy_index.select(name, jnp.asarray(row.policy_id))
        if policy_index.columns is None:
            selected[group] = row.replace(mask=row.mask & is_selected)
            continue
        for policy_name, policy_group, columns in policy_index.columns:
            if (policy_name, policy_group) == (name, group):
                size = sum(len(x) for _, y, x in policy_index.columns if y == group)
                # Agent i of lane b is in column b * size + i.
                lane = np.arange(row.mask.shape[1] // size)[:, None]
                index = np.ravel(columns + size * lane)
                selected[group] = jax.tree.map(lambda x, i=index: x[:, i], row)
    return selected


def agents_of(transition: Transition) -> AgentInfo:
    """Returns the per-agent data of a transition; raises `ValueError` if missing."""
    info: Any = transition.info
    info = info.info if isinstance(info, AsyncInfo) else info
    info = getattr(info, "agents", None)
    if not isinstance(info, AgentInfo):
        raise ValueError(
            "The environment must have several agents, for example lanes of a "
            "`rollout.envs.multi_agent.MultiAgentEnv`, got `info` without `agents`."
        )
    return info


class _Answers(NamedTuple):
    """The answers to the agents' actions, `[T, B, A]`."""

    answered: jax.Array  # bool, the step answers an action
    pending: jax.Array  # bool, an action is unanswered after the step
    reward: jax.Array  # float32, sum of rewards since the action
    total: jax.Array  # float32, sum of rewards of answered actions in the episode
    taken_at: jax.Array  # int32, t + 1 for an action of step t, 0 for earlier actions


def _recorded_value(fn: RecordedValueFn | None, extras: Any) -> jax.Array:
    if fn is None:
        raise ValueError(
            "`recorded_value_fn` must be given for agents that take turns and a policy "
            'with a critic. Pass `lambda extras: extras["value"]` if the policy '
            "records the critic's values as `value`."
        )
    return fn(extras)


def _transitions(
    pending: Any,
    trajectory: Transition,
    recorded_value_fn: RecordedValueFn | None,
    *,
    is_team: bool,
) -> tuple[Any, AgentRows]:
    check_trajectory(trajectory)
    info = agents_of(trajectory)
    groups = info.layout.groups
    if info.layout.simultaneous:  # every action is answered at once
        # Each step answers its actions, and no action is pending between two calls.
        is_answered = info.acted & trajectory.mask[..., None]
        zeros = jnp.zeros(is_answered.shape, bool)
        answers = _Answers(is_answered, zeros, info.reward, info.agent_return, zeros)
        sources = {group.name: _source(trajectory, group) for group in groups}
        pending = ()
    else:
        lanes = trajectory.mask.shape[1:]
        if not isinstance(pending, Pending) or pending.episode_id.shape != lanes:
            raise ValueError(
                "`pending` must be from `Pending.init` or an earlier call, with the "
                f"lanes {lanes} of the trajectory, got {checks.describe(pending)}."
            )
        pending, answers = _match(pending, trajectory, info)
        sources = {}
        for group in groups:
            # Index 0 has the pending actions, index t + 1 the actions of step t.
            stacked = jax.tree.map(
                lambda first, rest: jnp.concatenate([first[None], rest]),
                pending.source[group.name],
                _source(trajectory, group),
            )
            index = answers.taken_at[..., list(group.members)]  # [T, B, A_g]
            sources[group.name] = jax.tree.map(
                lambda x, i=index: jnp.take_along_axis(
                    x, i.reshape(i.shape + (1,) * (x.ndim - i.ndim)), axis=0
                ),
                stacked,
            )
        # The sources at the last step are the sources of the pending actions.
        pending = pending.replace(source=jax.tree.map(lambda x: x[-1], sources))
    rows = _rows(trajectory, answers, is_team)
    return pending, {
        group.name: _of_group(
            trajectory, rows, group, sources[group.name], recorded_value_fn
        )
        for group in groups
    }


def _source(
    transition: Transition, group: AgentGroup
) -> tuple[ArrayTree, ArrayTree, ArrayTree, ArrayTree]:
    """Returns `(obs, action, extras, policy_id)` of a group, `[..., A_g, ...]`."""
    extras, policy_id = {}, ()
    if isinstance(transition.extras, MapExtras):
        extras = transition.extras.agents[group.name]
        policy_id = transition.extras.policy_id[..., list(group.members)]
    obs, action = transition.obs[group.name], transition.action[group.name]
    return obs, action, extras, policy_id


def _match(
    pending: Pending, trajectory: Transition, info: AgentInfo
) -> tuple[Pending, _Answers]:
    """Matches answers and actions, step by step.

    If an agent has no action at a step, answered or pending, `taken_at` is the step.

    Returns:
        The new `pending` with the old `source`, and the answers.
    """

    def step(state: tuple, inputs: tuple) -> tuple:
        is_open, reward, total, taken_at, old_id = state
        number, row, agents = inputs
        mask = row.mask[:, None]
        # Idle rows, which have no episode, leave pending actions unchanged.
        episode_id = jnp.where(row.mask, row.episode_id, old_id)
        # If the id changes without an ending, the old episode was discarded. A resumed
        # host environment may play an episode again from its start.
        is_same = ((old_id == episode_id) & ~(row.first & row.mask))[:, None]
        # The order matters, since all three can happen at one step: open the action,
        # add the reward of the step, and answer the action.
        acted = agents.acted & mask
        is_open = (is_open & is_same) | acted
        reward = jnp.where(acted, 0.0, reward) + jnp.where(mask, agents.reward, 0.0)
        taken_at = jnp.where(acted | (mask & ~is_open), number + 1, taken_at)
        is_answered = is_open & mask & (row.done[:, None] | ~agents.waiting)
        total = jnp.where(is_same, total, 0.0) + jnp.where(is_answered, reward, 0.0)
        is_open &= ~is_answered
        state = is_open, reward, total, taken_at, episode_id
        return state, _Answers(is_answered, is_open, reward, total, taken_at)

    # Keep observations and actions out of the loop: `taken_at` is their index.
    rows = trajectory.replace(obs=(), next_obs=(), action=(), extras=(), info=())
    rows = rows.replace(accumulated=(), final_value=())
    numbers = jnp.arange(trajectory.mask.shape[0], dtype=jnp.int32)
    start = (
        pending.is_open,
        pending.reward,
        pending.answered,
        jnp.zeros(pending.is_open.shape, jnp.int32),
        pending.episode_id,
    )
    end, answers = platform.scan(
        step, start, (numbers, rows, info), gpu=_UNROLL, other=_UNROLL
    )
    is_open, reward, total, _, episode_id = end
    pending = pending.replace(
        is_open=is_open, reward=reward, answered=total, episode_id=episode_id
    )
    return pending, answers


def _rows(trajectory: Transition, answers: _Answers, is_team: bool) -> AgentTransition:
    """Makes the transition fields that do not depend on the group, `[T, B, A]`."""
    info, is_answered = agents_of(trajectory), answers.answered
    expand = lambda x: jnp.broadcast_to(x[..., None], is_answered.shape)  # noqa: E731
    terminated, truncated = expand(trajectory.terminated), expand(trajectory.truncated)
    if is_team:
        # Every step has a row, except steps with a pending action, whose rewards are
        # summed in the row that answers the action.
        mask = expand(trajectory.mask) & ~answers.pending
        reward = jnp.where(is_answered, answers.reward, info.reward)
        total, length = info.agent_return, expand(trajectory.episode_length)
    else:
        mask, reward, total = is_answered, answers.reward, answers.total
        # Rows of an agent count actions; rows of a team count steps.
        length = info.agent_length
        # The flags of an agent take precedence over the flags of the episode.
        is_active = ~(info.terminated | info.truncated)
        terminated = info.terminated | (is_active & terminated)
        truncated = info.truncated | (is_active & truncated)
    values = trajectory.accumulated
    items = values.items() if isinstance(values, dict) else ()
    accumulated = {name: x.value for name, x in items if isinstance(x, PerAgent)}
    return AgentTransition(
        obs=(),
        action=(),
        next_obs=(),
        reward=jnp.where(mask, reward, 0.0),
        terminated=terminated & mask,
        truncated=truncated & mask,
        mask=mask,
        episode_id=expand(trajectory.episode_id),
        episode_return=total,
        episode_length=length,
        extras=(),
        info=(),
        accumulated=accumulated or (),
        acting=is_answered,
        # If the agent waits, the episode ended without an observation for the agent.
        stale_next_obs=is_answered & info.waiting,
    )


def _of_group(
    trajectory: Transition,
    rows: AgentTransition,
    group: AgentGroup,
    source: tuple[ArrayTree, ArrayTree, ArrayTree, ArrayTree],
    recorded_value_fn: RecordedValueFn | None,
) -> AgentTransition:
    """Completes the transitions of a group, `[T, B * A_g, ...]`."""
    rows = jax.tree.map(lambda x: x[:, :, np.asarray(group.members)], rows)
    obs, action, extras, policy_id = source
    is_stale, next_obs = rows.stale_next_obs, trajectory.next_obs[group.name]
    takes_turns = not agents_of(trajectory).layout.simultaneous
    if takes_turns:
        # If the episode ended without an observation for the agent, `next_obs` of the
        # environment is undefined: repeat the observation of the action.
        next_obs = jax.tree.map(
            lambda old, new: jnp.where(
                is_stale.reshape(is_stale.shape + (1,) * (new.ndim - 3)), old, new
            ),
            obs,
            next_obs,
        )
    final_value: Any = trajectory.final_value
    if isinstance(final_value, Mapping):
        final_value = final_value.get(group.name, ())
    elif not isinstance(final_value, tuple):  # one value for all agents
        # Each agent of the team has the value of the team.
        final_value = jnp.broadcast_to(final_value[..., None], rows.mask.shape)
    if not isinstance(final_value, tuple):
        if takes_turns:  # stale rows: `next_obs` repeats `obs`, so repeat the value
            recorded = _recorded_value(recorded_value_fn, extras)
            final_value = jnp.where(is_stale, recorded, final_value)
        # The collector evaluates whole lanes; only truncated agents bootstrap.
        final_value = jnp.where(rows.truncated & ~rows.terminated, final_value, 0.0)
    rows = rows.replace(
        obs=obs,
        action=action,
        next_obs=next_obs,
        extras=extras,
        final_value=final_value,
        policy_id=policy_id,
    )
    rows = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), rows)
    if isinstance(trajectory.extras, MapExtras):
        rows = rows.replace(policy_index=trajectory.extras.policy_index)
    return rows
