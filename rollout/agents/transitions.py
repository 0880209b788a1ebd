"""Rearranges a trajectory into each agent's own transitions.

An agent's action is answered at its next turn, at its own end, or at the end of the
episode. Until then it is *pending*: it may be taken in one window of steps and answered
in another. Steps at which an agent has no pending action have a row only if its rows
last until the end of the episode.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout import checks, platform
from rollout.agents.mapping import MapExtras, PolicyIndex
from rollout.collector import Collector
from rollout.envs import trees
from rollout.envs.multi_agent import AgentGroup, AgentInfo, AgentLayout, layout_of
from rollout.envs.types import ArrayTree
from rollout.types import Carry, PerAgent, Transition

_UNROLL = 16  # steps in one iteration on accelerators


class AgentTransition(Transition):
    """The transitions of the agents of a group, `[T, B * A_g, ...]`.

    Agent i of lane b is in column `b * A_g + i`. `episode_return` is the sum of the
    agent's transitions in the episode so far, and `episode_length` counts its actions.
    `extras` are those of the agent's policy, `info` is `()`, and `accumulated` has the
    `PerAgent` values.

    Attributes:
        acting: `[T, B * A_g]` bool, the transition has an action of the agent.
        stale_next_obs: `[T, B * A_g]` bool, the episode ended without an observation
            for the agent, and `next_obs` repeats its last one.
        policy_id: `[T, B * A_g]` int32, the index of the agent's policy; `()` without a
            `policy_map`.
        policy_index: names the indices; `()` without a `policy_map`.
    """

    acting: jax.Array  # [T, B * A_g]
    stale_next_obs: jax.Array  # [T, B * A_g]
    policy_id: ArrayTree = ()  # [T, B * A_g]
    policy_index: PolicyIndex | tuple[()] = ()


AgentRows = dict[str, AgentTransition]  # by group, `[T, B * A_g]`

# The extras of one group's policies to the critic's values that they recorded.
RecordedValueFn = Callable[[Any], jax.Array]


class Pending(struct.PyTreeNode, kw_only=True):
    """The actions that were not answered when a window ended.

    Attributes:
        is_open: `[B, A]` bool, True where the agent has a pending action.
        reward: `[B, A]` float32, sum of the agent's rewards since that action.
        answered: `[B, A]` float32, sum of the rewards of its answers in the episode.
        episode_id: `[B]` int32, the episode of the lane's last step.
        source: `(obs, action, extras, policy_id)` of the action by group, each
            `[B, A_g, ...]`.
        layout: the agents.
    """

    is_open: jax.Array  # [B, A]
    reward: jax.Array  # [B, A]
    answered: jax.Array  # [B, A]
    episode_id: jax.Array  # [B]
    source: dict[str, tuple[ArrayTree, ...]]  # {group: [B, A_g, ...]}
    layout: AgentLayout = struct.field(pytree_node=False)

    @classmethod
    def init(
        cls, collector: Collector, carry: Carry, params: Any = None
    ) -> "Pending | tuple[()]":
        """Makes the first `pending` of `agent_transitions`, without an action.

        Actions that were taken before `carry` give no transition.

        Args:
            collector: a collector of an environment with several agents.
            carry: the carry that the first trajectory will start from.
            params: parameters as `collect_steps` takes them: they decide the shapes of
                the extras.

        Returns:
            `()` if every agent acts at every step: then no action is ever pending.

        Raises:
            ValueError: if the environment does not have several agents.
        """
        layout = layout_of(collector.env)
        if layout.simultaneous:
            return ()
        row = trees.blank(collector.row_shape(params))
        zeros = jnp.zeros((*row.mask.shape, len(layout.agents)), jnp.float32)
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
    """Turns a trajectory into each agent's transitions, inside or outside of `jit`.

    A transition stands at the step where the agent's action is answered: at its next
    turn, at its own end or at the end of the episode. Its `reward` is the sum of the
    agent's rewards since the action, and its `next_obs` the agent's own next
    observation. Flags say how the agent ended, or else how the episode did. The next
    call answers the actions that are pending at the end of the trajectory: none is
    lost, and none comes twice.

    Rewards before an agent's first action and after its end are in no transition: right
    where whoever is out has nothing left to win. Where agents cooperate, take
    `team_transitions`.

    Args:
        pending: from `Pending.init` or the previous call.
        trajectory: `[T, B, ...]`, the steps that follow, each passed once: a window
            that is left out or repeated answers the wrong actions. An episode may be
            discarded in between, as `collect_episodes` does.
        recorded_value_fn: maps the extras of one group to the critic's values that its
            policies recorded, for example `lambda extras: extras["value"]`. Required if
            the policy has a critic and the agents take turns: the value at a stale
            `next_obs` is the one that was recorded with the action.

    Returns:
        The new `pending`, and the transitions by group; `mask` is False in rows without
        a transition.

    Raises:
        ValueError: if the trajectory is not one of several agents, if `pending` belongs
            to another collector, or if a required `recorded_value_fn` is missing.
    """
    return _transitions(pending, trajectory, recorded_value_fn, is_team=False)


def team_transitions(
    pending: Pending | tuple[()],
    trajectory: Transition,
    *,
    recorded_value_fn: RecordedValueFn | None = None,
) -> tuple[Pending | tuple[()], AgentRows]:
    """Turns a trajectory into transitions that last until the end of the episode.

    As `agent_transitions`, but with the flags of the episode only, and with one more
    transition at each step at which the agent has no action to answer, because it has
    ended or has not acted yet: with that step's reward, and `acting` False.
    So an agent that falls earns what its team wins later: right where agents cooperate.
    Learn values from all transitions, and the policy from those where `acting` is True.

    Args:
        pending: from `Pending.init` or the previous call of either function.
        trajectory: as in `agent_transitions`.
        recorded_value_fn: as in `agent_transitions`.

    Returns:
        As `agent_transitions`; `episode_return` is all that the agent has earned in the
        episode, and `episode_length` counts the steps of the episode.

    Raises:
        ValueError: as `agent_transitions`.
    """
    return _transitions(pending, trajectory, recorded_value_fn, is_team=True)


def last_values(
    pending: Pending | tuple[()],
    values: Mapping[str, jax.Array],
    *,
    recorded_value_fn: RecordedValueFn | None = None,
) -> dict[str, jax.Array]:
    """Returns the values that follow the last transitions, for `next_values`.

    The value of a pending action is the one that the policy recorded with it.

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
        values: by group `[B, A_g]` float, values of the observations in the carry after
            the trajectory.
        recorded_value_fn: as in `agent_transitions`. Required if the agents take turns.

    Returns:
        By group `[B * A_g]` float.

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
    """Picks the transitions of one policy.

    Args:
        rows: from `agent_transitions`, of a trajectory collected with a `policy_map`.
        name: of the policy.

    Returns:
        The transitions by group, `mask` False where another policy was in control.
        Under a fixed mapping only the columns of agents that it controls, `[T, B * n]`,
        and only groups with such agents.

    Raises:
        ValueError: if the trajectory is not of a `policy_map` with a policy of that
            name.
    """
    picked = {}
    for group, row in rows.items():
        policy_index = row.policy_index if isinstance(row, AgentTransition) else ()
        if not isinstance(policy_index, PolicyIndex):
            raise ValueError("`rows` must be of a `policy_map`, got another policy's.")
        is_its = policy_index.select(name, jnp.asarray(row.policy_id))
        if policy_index.columns is None:
            picked[group] = row.replace(mask=row.mask & is_its)
            continue
        for whose, where, columns in policy_index.columns:
            if (whose, where) == (name, group):
                size = sum(len(x) for _, of, x in policy_index.columns if of == group)
                # Agent i of lane b stands in column b * size + i.
                lane = np.arange(row.mask.shape[1] // size)[:, None]
                mine = np.ravel(columns + size * lane)
                picked[group] = jax.tree.map(lambda x, at=mine: x[:, at], row)
    return picked


def agents_of(transition: Transition) -> AgentInfo:
    """Returns the per-agent part of a transition; raises `ValueError` without one."""
    info = getattr(transition.info, "agents", None)
    if not isinstance(info, AgentInfo):
        raise ValueError(
            "The environment must have several agents, as lanes of a "
            "`rollout.envs.multi_agent.MultiAgentEnv`, got `info` without `agents`."
        )
    return info


class _Answers(NamedTuple):
    """Where actions are answered, `[T, B, A]`."""

    answered: jax.Array  # bool
    pending: jax.Array  # bool, an action has no answer yet after this step
    reward: jax.Array  # float32, sum since the action
    total: jax.Array  # float32, sum of the agent's answers in the episode so far
    taken_at: jax.Array  # int32, when: t + 1 for step t, 0 before the trajectory


def _recorded_value(fn: RecordedValueFn | None, extras: Any) -> jax.Array:
    if fn is None:
        raise ValueError(
            "`recorded_value_fn` must be given for agents that take turns under a "
            'policy with a critic. Pass `lambda extras: extras["value"]` if the policy '
            "records the values of its critic as `value`."
        )
    return fn(extras)


def _transitions(
    pending: Any,
    trajectory: Transition,
    recorded_value_fn: RecordedValueFn | None,
    *,
    is_team: bool,
) -> tuple[Any, AgentRows]:
    info = agents_of(trajectory)
    groups = info.layout.groups
    if info.layout.simultaneous:  # every action is answered at once
        # The step itself is the answer, and nothing is pending between two calls.
        answered = info.acted & trajectory.mask[..., None]
        none = jnp.zeros(answered.shape, bool)
        answers = _Answers(answered, none, info.reward, info.agent_return, none)
        sources = {group.name: _source(trajectory, group) for group in groups}
        pending = ()
    else:
        lanes = trajectory.mask.shape[1:]
        if not isinstance(pending, Pending) or pending.episode_id.shape != lanes:
            raise ValueError(
                "`pending` must be from `Pending.init` or an earlier call, for the "
                f"lanes of the trajectory, {lanes}, got {checks.describe(pending)}."
            )
        pending, answers = _match(pending, trajectory, info)
        sources = {}
        for group in groups:
            # Index 0 has the pending actions, index t + 1 those of step t.
            stacked = jax.tree.map(
                lambda first, rest: jnp.concatenate([first[None], rest]),
                pending.source[group.name],
                _source(trajectory, group),
            )
            at = answers.taken_at[..., list(group.members)]  # [T, B, A_g]
            sources[group.name] = jax.tree.map(
                lambda x, at=at: jnp.take_along_axis(
                    x, at.reshape(at.shape + (1,) * (x.ndim - at.ndim)), axis=0
                ),
                stacked,
            )
        # What the last row would read is the source of the actions that are still open.
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

    A step without an action, answered or pending, is its own source.

    Returns:
        The new `pending` with the old `source`, and the answers.
    """

    def step(state: tuple, now: tuple) -> tuple:
        is_open, reward, total, taken_at, episode_id = state
        number, row, agents = now
        mask = row.mask[:, None]
        # If the id changes without an ending, the old episode was given up.
        is_same = (episode_id == row.episode_id)[:, None]
        # First the action opens, then this step's reward counts for it, then it may be
        # answered, all in one step.
        acted = agents.acted & mask
        is_open = (is_open & is_same) | acted
        reward = jnp.where(acted, 0.0, reward) + jnp.where(mask, agents.reward, 0.0)
        taken_at = jnp.where(acted | (mask & ~is_open), number + 1, taken_at)
        answered = is_open & mask & (row.done[:, None] | ~agents.waiting)
        total = jnp.where(is_same, total, 0.0) + jnp.where(answered, reward, 0.0)
        is_open &= ~answered
        state = is_open, reward, total, taken_at, row.episode_id
        return state, _Answers(answered, is_open, reward, total, taken_at)

    # Observations and actions stay out of the loop: `taken_at` says where to read them.
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
    """Makes the fields of all agents' transitions that need no group, `[T, B, A]`."""
    info, answered = agents_of(trajectory), answers.answered
    every = lambda x: jnp.broadcast_to(x[..., None], answered.shape)  # noqa: E731
    terminated, truncated = every(trajectory.terminated), every(trajectory.truncated)
    if is_team:
        # A row at every step, except where the answer of an action is to come: its row
        # will have the sum of the rewards until then.
        mask = every(trajectory.mask) & ~answers.pending
        reward = jnp.where(answered, answers.reward, info.reward)
        total, length = info.agent_return, every(trajectory.episode_length)
    else:
        mask, reward, total = answered, answers.reward, answers.total
        # It counts actions, as the rows of an agent do; a team's rows count steps.
        length = info.agent_length
        # The episode's ending is that of the agents that had not ended before.
        goes_on = ~(info.terminated | info.truncated)
        terminated = info.terminated | (goes_on & terminated)
        truncated = info.truncated | (goes_on & truncated)
    named = trajectory.accumulated
    own = named.items() if isinstance(named, dict) else ()
    own = {name: x.value for name, x in own if isinstance(x, PerAgent)}
    return AgentTransition(
        obs=(),
        action=(),
        next_obs=(),
        reward=jnp.where(mask, reward, 0.0),
        terminated=terminated & mask,
        truncated=truncated & mask,
        mask=mask,
        episode_id=every(trajectory.episode_id),
        episode_return=total,
        episode_length=length,
        extras=(),
        info=(),
        accumulated=own or (),
        acting=answered,
        # Answered while it waits: the episode ended without an observation for it.
        stale_next_obs=answered & info.waiting,
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
        # environment is undefined: repeat the one that the agent acted on.
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
        # The value of the team counts for each of its agents.
        final_value = jnp.broadcast_to(final_value[..., None], rows.mask.shape)
    if not isinstance(final_value, tuple):
        if takes_turns:  # stale rows: `next_obs` repeats `obs`, and so does its value
            recorded = _recorded_value(recorded_value_fn, extras)
            final_value = jnp.where(is_stale, recorded, final_value)
        # The collector valued whole lanes, here only agents that were cut bootstrap.
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
