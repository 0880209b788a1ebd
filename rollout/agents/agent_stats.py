"""`summarize_agents`: statistics of each agent and each policy, over ended episodes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.agents.transitions import agents_of
from rollout.collector import Collector
from rollout.envs.multi_agent import AgentInfo, layout_of
from rollout.stats import Moments, moments
from rollout.types import Accumulator, Episodes, PerAgent, Transition

_NAME = "agents"  # of the accumulator


class AgentMetrics(struct.PyTreeNode, kw_only=True):
    """Metrics of one agent or one policy, over the episodes in which it acted.

    Attributes:
        returns: of its undiscounted returns.
        lengths: of the number of its actions.
        accumulated: of each `PerAgent` value that is one number per agent, by its path
            in `accumulated`, joined by "/".
    """

    returns: Moments
    lengths: Moments
    accumulated: dict[str, Moments] = struct.field(default_factory=dict)


class AgentStats(struct.PyTreeNode, kw_only=True):
    """Statistics per agent.

    Attributes:
        num_steps: `()` int32, environment steps over all lanes, idle ones not counted.
        num_agent_steps: `()` int32, actions that agents took in these steps.
        num_episodes: `()` int32, episodes that ended, also if they began before.
        unassigned_reward: `()` float32, in these steps, the sum of rewards that answer
            no action: from before an agent's first action and from after its end.
        num_stale: `()` int32, agents without a last observation in these episodes.
        num_unmapped: `()` int32, actions in these steps of agents to which the mapping
            gave no policy that can act for them.
        agents: metrics by agent.
        policies: metrics by policy, of a `policy_map`; else empty.
    """

    num_steps: jax.Array  # ()
    num_agent_steps: jax.Array  # ()
    num_episodes: jax.Array  # ()
    unassigned_reward: jax.Array  # ()
    num_stale: jax.Array  # ()
    num_unmapped: jax.Array  # ()
    agents: dict[str, AgentMetrics]
    policies: dict[str, AgentMetrics]


def keep_agents(collector: Collector) -> Collector:
    """Adds the accumulator that `summarize_agents` reads in `Episodes` to a collector.

    Args:
        collector: with an environment of `rollout.envs.vectorize_agents`.
    """
    layout = layout_of(collector.env)

    def init(num_envs: int) -> tuple[AgentInfo, jax.Array]:
        zero = jnp.zeros((num_envs, len(layout.agents)), jnp.float32)
        packed = zero.astype(jnp.uint32)
        info = AgentInfo(reward=zero, agent_return=zero, packed=packed, layout=layout)
        return info, zero

    def update(kept: Any, transition: Transition) -> tuple[AgentInfo, jax.Array]:
        info = agents_of(transition)
        return info, kept[1] + info.unassigned_reward

    accumulators = {**dict(collector.accumulators), _NAME: Accumulator(init, update)}
    return collector.replace(accumulators=accumulators)


def summarize_agents(data: Transition | Episodes) -> AgentStats:
    """Summarizes agents and policies, inside or outside of `jit`.

    Returns and lengths are those of the episodes that ended, each counted whole.

    Args:
        data: a trajectory, `[T, B, ...]`, of an environment of
            `rollout.envs.vectorize_agents`; masked-out rows do not count. Or the
            `Episodes` of a collector made by `rollout.agents.agent_stats.keep_agents`:
            then `policies` has the metrics of the environment's groups, by name, and
            `num_unmapped` is 0.

    Returns:
        Statistics, each `()`; means over no episode are NaN.

    Raises:
        ValueError: if the data is not of several agents.
    """
    if isinstance(data, Episodes):
        return _summarize_episodes(data)
    trajectory = data
    info, mask = agents_of(trajectory), trajectory.mask[..., None]
    ended = trajectory.done[..., None] & mask
    took_part = ended & (info.agent_length > 0)
    is_dict = isinstance(trajectory.extras, dict)
    extras: dict[str, Any] = trajectory.extras if is_dict else {}
    policy_id, policy_index = extras.get("policy_id", -1), extras.get("policy_index")
    acted = info.acted & mask
    is_unmapped, policies = jnp.zeros((), bool), {}
    if policy_index is not None:
        is_unmapped = acted & (policy_id < 0)
        policies = {
            name: _metrics(trajectory, took_part & policy_index.select(name, policy_id))
            for name, *_ in policy_index.indices
        }
    return AgentStats(
        num_steps=_count(trajectory.mask),
        num_agent_steps=_count(acted),
        num_episodes=_count(ended),
        unassigned_reward=jnp.sum(jnp.where(mask, info.unassigned_reward, 0.0)),
        num_stale=_count(ended & info.waiting),
        num_unmapped=_count(is_unmapped),
        agents={
            agent: _metrics(trajectory, took_part & _is_only(i, took_part.shape[-1]))
            for i, agent in enumerate(info.layout.agents)
        },
        policies=policies,
    )


def _summarize_episodes(episodes: Episodes) -> AgentStats:
    kept: Any = episodes.accumulated
    if not isinstance(kept, dict) or _NAME not in kept:
        raise ValueError(
            "`data` must be a trajectory, or `Episodes` of a collector made by "
            "`rollout.agents.agent_stats.keep_agents`, got others."
        )
    info, unassigned_reward = kept[_NAME]
    lengths, layout = info.agent_length, info.layout

    def metrics(members: tuple[int, ...]) -> AgentMetrics:
        columns = np.asarray(members)
        length = lengths[:, columns]
        return AgentMetrics(
            returns=moments(info.agent_return[:, columns], length > 0),
            lengths=moments(length.astype(jnp.float32), length > 0),
        )

    return AgentStats(
        num_steps=episodes.num_steps,
        num_agent_steps=jnp.sum(lengths, dtype=jnp.int32),
        num_episodes=jnp.int32(lengths.shape[0]),
        unassigned_reward=jnp.sum(unassigned_reward),
        num_stale=_count(info.waiting),
        num_unmapped=jnp.int32(0),
        agents={name: metrics((i,)) for i, name in enumerate(layout.agents)},
        policies={group.name: metrics(group.members) for group in layout.groups},
    )


def _metrics(trajectory: Transition, flag: jax.Array) -> AgentMetrics:
    """Computes the metrics over the steps and agents where `flag`, `[T, B, A]`."""
    info, accumulated = trajectory.info.agents, trajectory.accumulated
    named = accumulated.items() if isinstance(accumulated, dict) else ()
    per_agent = {name: x.value for name, x in named if isinstance(x, PerAgent)}
    return AgentMetrics(
        returns=moments(info.agent_return, flag),
        lengths=moments(info.agent_length.astype(jnp.float32), flag),
        accumulated={
            jax.tree_util.keystr(path, simple=True, separator="/"): moments(
                leaf.astype(jnp.float32), flag
            )
            for path, leaf in jax.tree.leaves_with_path(per_agent)
            if leaf.shape == flag.shape
        },
    )


def _is_only(number: int, num_agents: int) -> jax.Array:
    return (jnp.arange(num_agents) == number)[None, None]


def _count(flag: jax.Array) -> jax.Array:
    return jnp.sum(flag, dtype=jnp.int32)
