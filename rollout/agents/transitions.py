"""Rearranges a trajectory into each agent's own transitions.

An action of an agent is answered at its next turn, at its own end, or at the end of the
episode. Until then it is *pending*: it may be taken in one window of steps and answered
in another.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from envs.multi_agent import AgentGroup, AgentInfo, layout_of
from envs.types import ArrayTree
from rollout import checks, unrolling
from rollout.collector import Collector
from rollout.types import Carry, PerAgent, Transition

AgentRows = dict[str, Transition]  # by group, `[T, B * A_g]`


_UNROLL = 16  # rows in one iteration on accelerators


class Pending(struct.PyTreeNode, kw_only=True):
    """The actions that were not answered when a window ended.

    Attributes:
        is_open: `[B, A]` bool, there is one.
        reward: `[B, A]` float32, sum of the agent's rewards since.
        answered: `[B, A]` float32, sum of the rewards of its rows in the episode.
        episode_id: `[B]` int32, the episode of the lane's last step.
        episode_length: `[B]` int32, which step of it that was, from 1.
        num_gaps: `()` int32, in how many lanes a window did not begin where the one
            before had ended, over all calls; there nothing was pending any more. Only
            inside `jit`: outside it is an error.
        source: `(obs, action, extras)` of it, each `{group: [B, A_g, ...]}`.
    """

    is_open: jax.Array  # [B, A]
    reward: jax.Array  # [B, A]
    answered: jax.Array  # [B, A]
    episode_id: jax.Array  # [B]
    episode_length: jax.Array  # [B]
    num_gaps: jax.Array  # ()
    source: dict[str, tuple[ArrayTree, ...]]  # {group: [B, A_g, ...]}


def init_agent_transitions(
    collector: Collector, carry: Carry, params: Any = None
) -> Pending | tuple[()]:
    """Makes what `agent_transitions` starts from, with nothing pending.

    An action that was taken before and is not answered yet gives no row.

    Args:
        collector: with an environment of `envs.vectorize_agents`.
        carry: the carry that the first trajectory will start from.
        params: as `collect_steps` takes them: they decide the shapes of the extras.

    Returns:
        `()` where every agent acts at every step, since nothing is ever pending there.

    Raises:
        ValueError: if the environment is not one of several agents.
    """
    layout = layout_of(collector.env)
    if layout.simultaneous:
        return ()

    def step(carry: Carry, params: Any) -> Pending:
        transition = collector.step(carry, params)[1]
        info = agents_of(transition)
        return Pending(
            is_open=info.acted,
            reward=info.reward,
            answered=info.reward,
            episode_id=transition.episode_id,
            episode_length=transition.episode_length,
            num_gaps=jnp.int32(0),
            source={group.name: _source(transition, group) for group in layout.groups},
        )

    shapes = jax.eval_shape(step, carry, params)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    at = carry.episode
    return nothing.replace(episode_id=at.episode_id, episode_length=at.episode_length)


def agent_transitions(
    pending: Pending | tuple[()], trajectory: Transition
) -> tuple[Pending | tuple[()], AgentRows]:
    """Turns what happened into what each agent experienced. Inside or outside of `jit`.

    A row stands where an action of the agent is answered: at its next turn, at its own
    end or at the end of the episode. Its `reward` is the sum of the agent's rewards
    since the action, its `next_obs` the agent's own next observation, and its flags
    say how the agent ended, or else how the episode did. What is still open at the end
    of the trajectory comes out of the next call: nothing is lost, and nothing comes
    twice. Rewards before an agent's first action and after its end belong to no row.

    Args:
        pending: of `init_agent_transitions` or of the call before.
        trajectory: `[T, B, ...]`, the steps that follow on that, each handed over once.
            An episode may be given up in between, as `collect_episodes` does.

    Returns:
        What is pending now, and the rows by group, `[T, B * A_g, ...]`, agent i of lane
        b in column `b * A_g + i`; where no action is answered `mask` is False. Their
        `episode_return` and `episode_length` are of the agent's rows so far, `info` is
        `()`, and `accumulated` has the figures that are `PerAgent`. To the `extras` of
        the policies `policy_id` is added, with `roster` for `for_policy`, and
        `stale_next_obs`, `[T, B * A_g]` bool: the episode ended without an observation
        for the agent, and `next_obs` is its last one again.

    Raises:
        ValueError: if the trajectory is not one of several agents, or `pending` is of
            another collector; outside of `jit`, if it is not what follows on `pending`:
            the same steps again, or later ones. Inside, `Pending.num_gaps` counts, and
            where everyone acts at every step nothing tells.
    """
    info = agents_of(trajectory)
    if info.layout.simultaneous:
        answers = _Answers(
            mask=info.acted & trajectory.mask[..., None],
            reward=info.reward,
            total=info.agent_return,
            is_stale=jnp.zeros(info.reward.shape, bool),
        )
        return (), {
            group.name: _rows(trajectory, answers, group, _source(trajectory, group))
            for group in info.layout.groups
        }
    lanes = trajectory.mask.shape[1:]
    if not isinstance(pending, Pending) or pending.episode_id.shape != lanes:
        raise ValueError(
            "`pending` must be of `init_agent_transitions` for the lanes of the "
            f"trajectory, {lanes}, got {checks.describe(pending)}."
        )
    first = jax.tree.map(lambda x: x[0], trajectory)
    sources = {group.name: _source(first, group) for group in info.layout.groups}
    what = "`pending` must be of `init_agent_transitions` of this collector"
    checks.same(what, sources, pending.source)
    pending = _follow(pending, trajectory)
    pending, answers, taken_at = _match(pending, trajectory, info)
    sources, rows = {}, {}
    for group in info.layout.groups:
        # Row 0 is what was pending, row t + 1 what was done at step t.
        stacked = jax.tree.map(
            lambda first, rest: jnp.concatenate([first[None], rest]),
            pending.source[group.name],
            _source(trajectory, group),
        )
        at = taken_at[..., list(group.members)]
        found = _rows_at(stacked, at)
        rows[group.name] = _rows(trajectory, answers, group, found)
        sources[group.name] = jax.tree.map(lambda x: x[-1], found)
    return pending.replace(source=sources), rows


def for_policy(rows: AgentRows, name: str) -> AgentRows:
    """Picks the rows of one policy.

    Args:
        rows: of `agent_transitions`, of a trajectory whose policy is a `policy_map`.
        name: of the policy.

    Returns:
        The rows by group, `mask` False where another policy played. Under a fixed
        mapping only the groups and columns of agents that it plays, `[T, B * n]`.

    Raises:
        ValueError: if the policy was no `policy_map`, or has no policy of that name.
    """
    if not isinstance(rows, Mapping):
        raise ValueError(
            "`rows` must be those by group that `agent_transitions` returns, got "
            f"{type(rows).__name__}."
        )
    picked = {}
    for group, row in rows.items():
        extras = getattr(row, "extras", ())
        roster = extras.get("roster") if isinstance(extras, Mapping) else None
        if roster is None:
            raise ValueError("`rows` must be of a `policy_map`, got another policy's.")
        is_its = roster.select(name, row.extras["policy_id"])
        if roster.columns is None:
            picked[group] = row.replace(mask=row.mask & is_its)
            continue
        for whose, where, columns in roster.columns:
            if (whose, where) == (name, group):
                size = sum(len(x) for _, of, x in roster.columns if of == group)
                picked[group] = _pick(row, columns, size)
    return picked


def agents_of(transition: Transition) -> AgentInfo:
    """Returns the per-agent part of a transition; raises if there is none."""
    info = getattr(transition.info, "agents", None)
    if not isinstance(info, AgentInfo):
        raise ValueError(
            "The environment must be one of `envs.vectorize_agents`, whose `info` has "
            "`agents`, got another."
        )
    return info


class _Answers(NamedTuple):
    """Answers to the agents' actions, `[T, B, A]`."""

    mask: jax.Array  # bool, an action is answered here
    reward: jax.Array  # float32, since that action
    total: jax.Array  # float32, of the agent's answers in the episode so far
    is_stale: jax.Array  # bool, without an observation


def _source(
    transition: Transition, group: AgentGroup
) -> tuple[ArrayTree, ArrayTree, dict[str, Any]]:
    """`(obs, action, extras)` of a group, `[..., A_g]`."""
    extras = {}
    if isinstance(transition.extras, dict) and "roster" in transition.extras:
        extras = {
            **transition.extras["agents"][group.name],
            "policy_id": transition.extras["policy_id"][..., list(group.members)],
            "roster": transition.extras["roster"],
        }
    return transition.obs[group.name], transition.action[group.name], extras


def _follow(pending: Pending, trajectory: Transition) -> Pending:
    """Checks that the steps are the next ones, and moves on to the last of them."""
    mask = trajectory.mask
    rows = trajectory.episode_id, trajectory.episode_length
    has_rows, first = jnp.any(mask, axis=0), jnp.argmax(mask, axis=0)
    last = mask.shape[0] - 1 - jnp.argmax(mask[::-1], axis=0)
    take = lambda x, at: jnp.take_along_axis(x, at[None], axis=0)[0]  # noqa: E731
    episode_id, length = (take(x, first) for x in rows)
    old_id, old_length = pending.episode_id, pending.episode_length
    is_next = (episode_id == old_id) & (length == old_length + 1)
    # Ids of a lane ascend; those of `collect_episodes` are negative.
    is_new = (episode_id > old_id) | (episode_id < 0) & (episode_id != old_id)
    is_gap = has_rows & ~(is_next | is_new & (length == 1))
    if not isinstance(is_gap, Tracer) and np.any(is_gap):
        lane = int(np.argmax(is_gap))
        raise ValueError(
            "`trajectory` must begin where the one before ended, after step "
            f"{old_length[lane]} of episode {old_id[lane]} in lane {lane}, got step "
            f"{length[lane]} of episode {episode_id[lane]}; after a gap take a new "
            "`init_agent_transitions`."
        )
    return pending.replace(
        is_open=pending.is_open & ~is_gap[:, None],
        episode_length=jnp.where(has_rows, take(rows[1], last), old_length),
        num_gaps=pending.num_gaps + jnp.sum(is_gap, dtype=jnp.int32),
    )


def _match(
    pending: Pending, trajectory: Transition, info: AgentInfo
) -> tuple[Pending, _Answers, jax.Array]:
    """Matches answers and actions, step by step.

    Returns:
        What is pending at the end, without its source; the answers; and `[T, B, A]`
        int32, when the action was taken that is open: t + 1 for step t, 0 for before.
    """

    def step(state: tuple, now: tuple) -> tuple:
        is_open, reward, total, taken_at, episode_id = state
        number, row, agents = now
        mask = row.mask[:, None]
        # A new episode without an end of the old one: that was given up.
        is_same = (episode_id == row.episode_id)[:, None]
        acted = agents.acted & mask
        is_open = (is_open & is_same) | acted
        reward = jnp.where(acted, 0.0, reward) + jnp.where(mask, agents.reward, 0.0)
        taken_at = jnp.where(acted, number + 1, taken_at)
        answered = is_open & mask & (row.done[:, None] | ~agents.waiting)
        total = jnp.where(is_same, total, 0.0) + jnp.where(answered, reward, 0.0)
        answers = _Answers(answered, reward, total, answered & agents.waiting)
        is_open &= ~answered
        return (is_open, reward, total, taken_at, row.episode_id), (answers, taken_at)

    rows = trajectory.replace(obs=(), next_obs=(), action=(), extras=(), info=())
    rows = rows.replace(accumulated=())
    numbers = jnp.arange(trajectory.mask.shape[0], dtype=jnp.int32)
    start = (
        pending.is_open,
        pending.reward,
        pending.answered,
        jnp.zeros(pending.is_open.shape, jnp.int32),
        pending.episode_id,
    )
    end, (answers, taken_at) = unrolling.scan(
        step, start, (numbers, rows, info), gpu=_UNROLL, other=_UNROLL
    )
    is_open, reward, total, _, episode_id = end
    pending = pending.replace(
        is_open=is_open, reward=reward, answered=total, episode_id=episode_id
    )
    return pending, answers, taken_at


def _rows_at(tree: ArrayTree, at: jax.Array) -> ArrayTree:
    """Takes row `at[t, b, i]` of `[R, B, A_g, ...]`."""

    def take(x: jax.Array) -> jax.Array:
        index = at.reshape(at.shape + (1,) * (x.ndim - at.ndim))
        return jnp.take_along_axis(x, index, axis=0)

    return jax.tree.map(take, tree)


def _rows(
    trajectory: Transition,
    answers: _Answers,
    group: AgentGroup,
    source: tuple[ArrayTree, ArrayTree, dict[str, Any]],
) -> Transition:
    """The rows of a group, `[T, B * A_g, ...]`."""
    info: Any = trajectory.info.agents
    members = list(group.members)
    obs, action, extras = source
    mask, reward, total, is_stale = (x[..., members] for x in answers)
    terminated, truncated = info.terminated[..., members], info.truncated[..., members]
    # How the episode ended counts for those who had not ended before.
    goes_on = ~(terminated | truncated)
    terminated |= goes_on & trajectory.terminated[..., None]
    truncated |= goes_on & trajectory.truncated[..., None]
    next_obs = trajectory.next_obs[group.name]
    if not info.layout.simultaneous:
        next_obs = jax.tree.map(
            lambda old, new: jnp.where(
                is_stale.reshape(is_stale.shape + (1,) * (new.ndim - 3)), old, new
            ),
            obs,
            next_obs,
        )
    rows = Transition(
        obs=obs,
        action=action,
        reward=jnp.where(mask, reward, 0.0),
        terminated=terminated & mask,
        truncated=truncated & mask,
        next_obs=next_obs,
        mask=mask,
        episode_id=jnp.broadcast_to(trajectory.episode_id[..., None], mask.shape),
        episode_return=total,
        episode_length=info.agent_length[..., members],
        extras={**extras, "stale_next_obs": is_stale},
        info=(),
        accumulated=_accumulated(trajectory.accumulated, members),
    )
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), rows)


def _accumulated(figures: ArrayTree, members: list[int]) -> ArrayTree:
    """The figures that are per agent, of a group."""
    items = figures.items() if isinstance(figures, dict) else ()
    return {
        name: jax.tree.map(lambda x: x[:, :, jnp.asarray(members)], figure.value)
        for name, figure in items
        if isinstance(figure, PerAgent)
    } or ()


def _pick(rows: Transition, columns: tuple[int, ...], size: int) -> Transition:
    """Picks columns of agents of `[T, B * size, ...]`."""

    def pick(x: jax.Array) -> jax.Array:
        parts = x.reshape(x.shape[0], -1, size, *x.shape[2:])[:, :, list(columns)]
        return parts.reshape(x.shape[0], -1, *x.shape[2:])

    return jax.tree.map(pick, rows)
