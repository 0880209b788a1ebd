"""`summarize_agents`: statistics of each agent and each policy, over ended episodes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.agents.transitions import agents_of
from rollout.collector import Collector
from rollout.envs.multi_agent import AgentInfo, layout_of
from rollout.moments import Moments, moments, moments_by_name
from rollout.stats import present
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
            no action: from before an agent's first action and from after its end. With
            `agent_transitions(end="agent")` no learner sees them; where agents win or
            lose together it must be "episode".
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
    is_named, is_unmapped = isinstance(data.accumulated, dict), jnp.zeros((), bool)
    accumulated: dict[str, Any] = data.accumulated if is_named else {}
    if isinstance(data, Episodes):
        if _NAME not in accumulated:
            raise ValueError(
                "`data` must be a trajectory, or `Episodes` of a collector made by "
                "`rollout.agents.agent_stats.keep_agents`, got others."
            )
        info, unassigned_reward = accumulated[_NAME]
        num_steps, num_actions = data.num_steps, info.agent_length
        ended = present(data)[:, None]
        took_part = ended & (info.agent_length > 0)
        of_policies = {x.name: _only(x.members, took_part) for x in info.layout.groups}
    else:
        info, mask = agents_of(data), data.mask[..., None]
        unassigned_reward = jnp.where(mask, info.unassigned_reward, 0.0)
        num_steps, num_actions = _count(mask), info.acted & mask
        ended = data.done[..., None] & mask
        took_part, of_policies = ended & (info.agent_length > 0), {}
        extras: dict[str, Any] = data.extras if isinstance(data.extras, dict) else {}
        if (policy_index := extras.get("policy_index")) is not None:
            policy_id = extras["policy_id"]
            is_unmapped = num_actions & (policy_id < 0)
            of_policies = {
                name: took_part & policy_index.select(name, policy_id)
                for name, *_ in policy_index.indices
            }
    agents = {x: _only([i], took_part) for i, x in enumerate(info.layout.agents)}
    own = {name: x.value for name, x in accumulated.items() if isinstance(x, PerAgent)}

    def metrics(flag: jax.Array) -> AgentMetrics:
        return AgentMetrics(
            returns=moments(info.agent_return, flag),
            lengths=moments(info.agent_length, flag),
            accumulated=moments_by_name(own, flag),
        )

    return AgentStats(
        num_steps=num_steps,
        num_agent_steps=_count(num_actions),
        num_episodes=_count(ended),
        unassigned_reward=jnp.sum(unassigned_reward),
        num_stale=_count(ended & info.waiting),
        num_unmapped=_count(is_unmapped),
        agents={name: metrics(flag) for name, flag in agents.items()},
        policies={name: metrics(flag) for name, flag in of_policies.items()},
    )


def _only(members: Sequence[int], flag: jax.Array) -> jax.Array:
    """Clears the flags, `[..., A]`, of all agents but the members."""
    is_member = np.isin(np.arange(flag.shape[-1]), members)
    return flag & is_member[(None,) * (flag.ndim - 1)]


def _count(flag: jax.Array) -> jax.Array:
    return jnp.sum(flag, dtype=jnp.int32)
