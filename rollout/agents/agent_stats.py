"""Statistics of each agent and each policy over ended episodes."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.agents.mapping import MapExtras
from rollout.agents.transitions import agents_of
from rollout.base import checks, trees
from rollout.collector import Collector
from rollout.envs.multi_agent import layout_of
from rollout.host.host_collector import HostCollector
from rollout.stats import Moments, by_name, is_known, moments, present, xp_of
from rollout.types import Accumulator, Episodes, PerAgent, Transition

_NAME = "agents"  # name of the accumulator


class WinDrawLoss(struct.PyTreeNode, kw_only=True):
    """Results of games: returns above 0 are wins, below 0 losses, and equal to 0 draws.

    An episode counts once. If a policy controls several agents, the result is the sign
    of their mean return, which is a draw in zero-sum self-play. Use the statistics by
    agent to distinguish the sides.

    Attributes:
        wins: `()` int32, number of wins.
        draws: `()` int32, number of draws.
        losses: `()` int32, number of losses.
    """

    wins: jax.Array  # ()
    draws: jax.Array  # ()
    losses: jax.Array  # ()

    def interval(self, name: str) -> tuple[jax.Array, jax.Array]:
        """Computes the 95 % confidence interval of the share of one kind of result.

        Args:
            name: "wins", "draws" or "losses".

        Returns:
            Lower and upper bound, in [0, 1]; valid also for shares of 0 and 1.

        Source:
            "Probable inference, the law of succession, and statistical inference"
            (Wilson, 1927).
        """
        xp, z = xp_of(self), 1.959964
        n = xp.maximum(self.wins + self.draws + self.losses, 1) * 1.0
        share = vars(self)[name] / n
        # The center of Wilson's interval is shifted from the share toward 1/2.
        middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
        margin = z * xp.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
        margin /= 1 + z**2 / n
        return xp.maximum(middle - margin, 0.0), xp.minimum(middle + margin, 1.0)

    def __str__(self) -> str:
        """Formats the counts, each with the 95 % interval of its share."""
        if not is_known(self.wins):
            return repr(self)
        parts = []
        for name in ("wins", "draws", "losses"):
            low, high = (100 * x for x in self.interval(name))
            parts += [f"{vars(self)[name]:,} {name} ({low:.1f} to {high:.1f} %)"]
        return ", ".join(parts)


class AgentMetrics(struct.PyTreeNode, kw_only=True):
    """Metrics of one agent or one policy over the episodes in which it acted.

    Attributes:
        returns: moments of the undiscounted returns.
        lengths: moments of the number of actions per episode.
        results: wins, draws and losses, by the sign of the return.
        accumulated: moments of each `PerAgent` value with one number per agent, by path
            in `accumulated`, joined by "/".
    """

    returns: Moments
    lengths: Moments
    results: WinDrawLoss
    accumulated: dict[str, Moments] = struct.field(default_factory=dict)


class AgentStats(struct.PyTreeNode, kw_only=True):
    """Statistics per agent and per policy.

    `print` shows the results of each policy, or of each agent without a `policy_map`.

    Attributes:
        num_steps: `()` int32, environment steps over all lanes, without idle steps.
        num_agent_steps: `()` int32, actions that agents took in these steps.
        num_episodes: `()` int32, episodes that ended in these steps, including earlier
            starts.
        unassigned_reward: `()` float32, sum of the rewards in these steps that belong
            to no action: rewards before an agent's first action and after its end.
            `agent_transitions` drops these rewards. Use `team_transitions` if agents
            win or lose together.
        num_stale: `()` int32, agents without a last observation in these episodes.
        num_unmapped: `()` int32, actions in these steps of agents without a policy that
            can act for them.
        agents: metrics by agent.
        policies: metrics by policy of a `policy_map`; empty without one.
    """

    num_steps: jax.Array  # ()
    num_agent_steps: jax.Array  # ()
    num_episodes: jax.Array  # ()
    unassigned_reward: jax.Array  # ()
    num_stale: jax.Array  # ()
    num_unmapped: jax.Array  # ()
    agents: dict[str, AgentMetrics]
    policies: dict[str, AgentMetrics]

    def __str__(self) -> str:
        """Formats results and returns of policies, and of agents that share one."""
        if not is_known(self.num_episodes):
            return repr(self)
        metrics = [*self.policies.items()]
        if len(self.policies) < len(self.agents):
            metrics += self.agents.items()
        return "\n".join(f"{x}: {y.results}, return {y.returns}" for x, y in metrics)


def evaluate_agents(
    collector: Collector | HostCollector,
    params: Any,
    key: chex.PRNGKey,
    num_episodes: int,
    *,
    max_episode_steps: int = checks.MAX_EPISODE_STEPS,
) -> AgentStats:
    """Plays exactly `num_episodes` and summarizes agents and policies.

    Jitted for a `Collector`.

    The episodes are the same as in `rollout.evaluate`, which reports team returns: the
    team return is 0 in every zero-sum game. This function reports results and returns
    of each agent and of each policy of a `policy_map`:

        print(rollout.agents.evaluate_agents(collector, params, key, 1000))

    A `HostCollector` with `on_fault="restart"` may lose some of the N episodes, as in
    `rollout.evaluate`: `num_episodes` is then smaller, and each fault is logged.
    `collector.fault_stats` does not count these faults.

    Args:
        collector: a collector of an environment with several agents.
        params: parameters of the policy.
        key: one typed key, the source of all randomness.
        num_episodes: N, at least 1. Static: one trace per value.
        max_episode_steps: number of steps after which an episode is truncated, at least
            1. Statistics include the returns of these episodes up to the truncation.

    Returns:
        Statistics as in `summarize_agents`; `num_unmapped` is 0.

    Raises:
        ValueError: if the environment has one agent, or for the reasons listed in
            `rollout.evaluate`.
    """
    checks.check_key(key)
    checks.check_collector(collector)
    checks.check_frozen(collector)
    num_episodes, per_env = checks.check_num_episodes(
        "num_episodes", num_episodes, collector.env
    )
    max_episode_steps = checks.check_max_episode_steps(max_episode_steps)
    run = _evaluate if collector.is_host else _evaluate_jitted
    return run(collector, params, key, num_episodes, per_env, max_episode_steps)


def _evaluate(
    collector: Collector | HostCollector,
    params: Any,
    key: chex.PRNGKey,
    num_episodes: int,
    per_env: bool,
    max_episode_steps: int,
) -> AgentStats:
    # Add the accumulator inside `jit`: its functions are new objects at every call, so
    # passing them to `jit` would compile again.
    collector = keep_agents(collector, params)
    carry = collector.init(key)
    _, episodes = collector.collect_episodes(
        carry,
        params,
        num_episodes,
        max_episode_steps=max_episode_steps,
        per_env=per_env,
    )
    return summarize_agents(episodes)


_evaluate_jitted = jax.jit(
    _evaluate, static_argnames=("num_episodes", "per_env", "max_episode_steps")
)


def keep_agents(
    collector: Collector | HostCollector, params: Any
) -> Collector | HostCollector:
    """Adds the accumulator that `summarize_agents` reads in `Episodes` to a collector.

    Args:
        collector: a collector of an environment with several agents.
        params: parameters of the policy.

    Raises:
        ValueError: if an accumulator of the collector already has the name.
    """
    layout_of(collector.env)  # raises if there is one agent
    if _NAME in dict(collector.accumulators):
        raise ValueError(
            f"`collector.accumulators` must not contain the name {_NAME!r}, which "
            "`evaluate_agents` adds. Rename the accumulator."
        )
    shapes = collector.replace(record_fn=None).row_shape(params)

    def init(num_envs: int) -> Any:
        # `record` provides the structure, shapes and dtypes; its values do not matter.
        row = trees.blank(shapes)
        info = agents_of(row)
        record = info, info.unassigned_reward, _policies_of(row)
        return trees.blank(record, (num_envs,), skip=1)

    def update(record: Any, transition: Transition) -> Any:
        info = agents_of(transition)
        return info, record[1] + info.unassigned_reward, _policies_of(transition)

    accumulators = {**dict(collector.accumulators), _NAME: Accumulator(init, update)}
    return collector.replace(accumulators=accumulators)


def summarize_agents(data: Transition | Episodes) -> AgentStats:
    """Summarizes agents and policies, inside or outside of `jit`.

    Returns, lengths and results cover the episodes that ended, from their first step. A
    trajectory of T steps is biased toward short episodes; `evaluate_agents` plays
    exactly N episodes instead.

    Args:
        data: a trajectory, `[T, B, ...]`, of an environment with several agents, whose
            masked-out rows are ignored; or the `Episodes` of a collector made by
            `rollout.agents.agent_stats.keep_agents`, for which `num_unmapped` is 0.

    Returns:
        Statistics, each `()`; means over no episodes are NaN.

    Raises:
        ValueError: if the environment of the data does not have several agents.
    """
    is_named, is_unmapped = isinstance(data.accumulated, dict), jnp.zeros((), bool)
    accumulated: dict[str, Any] = data.accumulated if is_named else {}
    if isinstance(data, Episodes):
        _check_kept(accumulated)
        info, unassigned_reward, policies = accumulated[_NAME]
        num_steps, num_actions = data.num_steps, info.agent_length
        ended = present(data)[:, None]
    else:
        info, mask, policies = agents_of(data), data.mask[..., None], _policies_of(data)
        unassigned_reward = jnp.where(mask, info.unassigned_reward, 0.0)
        num_steps, num_actions = _count(mask), info.acted & mask
        ended = data.done[..., None] & mask
        if policies:
            is_unmapped = num_actions & (policies[0] < 0)
    # An agent may win or lose before its first action.
    is_counted = ended & ((info.agent_length > 0) | (info.agent_return != 0))
    policy_flags = {}
    if policies:
        policy_id, policy_index = policies
        policy_flags = {
            name: is_counted & policy_index.select(name, policy_id)
            for name, *_ in policy_index.indices
        }
    # `names == name` is `[A]` bool and selects the column of one agent.
    names = np.array(info.layout.agents)
    agent_flags = {
        name: is_counted & jnp.broadcast_to(names == name, is_counted.shape)
        for name in info.layout.agents
    }
    per_agent = {k: x.value for k, x in accumulated.items() if isinstance(x, PerAgent)}
    metrics = functools.partial(_metrics, info, per_agent)
    return AgentStats(
        num_steps=num_steps,
        num_agent_steps=_count(num_actions),
        num_episodes=_count(ended),
        unassigned_reward=jnp.sum(unassigned_reward),
        num_stale=_count(ended & info.waiting),
        num_unmapped=_count(is_unmapped),
        agents={name: metrics(flag) for name, flag in agent_flags.items()},
        policies={name: metrics(flag) for name, flag in policy_flags.items()},
    )


def _check_kept(accumulated: dict[str, Any]) -> None:
    """Raises unless `Episodes` have the accumulator of `keep_agents`."""
    if _NAME not in accumulated:
        raise ValueError(
            "`data` must be a trajectory, or `Episodes` of a collector made by "
            "`rollout.agents.agent_stats.keep_agents`, got other `Episodes`."
        )


def _metrics(info: Any, per_agent: dict[str, Any], flag: jax.Array) -> AgentMetrics:
    """Computes the metrics of the agents in `flag`, `[..., A]` bool."""
    # Agents of one episode are not independent: an episode counts once, with the mean
    # over its agents in `flag`.
    num_agents = jnp.maximum(jnp.sum(flag, axis=-1), 1)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(flag, x, 0), axis=-1) / num_agents

    is_played, agent_return = jnp.any(flag, axis=-1), mean(info.agent_return)
    return AgentMetrics(
        results=WinDrawLoss(
            wins=_count(is_played & (agent_return > 0)),
            draws=_count(is_played & (agent_return == 0)),
            losses=_count(is_played & (agent_return < 0)),
        ),
        returns=moments(agent_return, is_played),
        lengths=moments(mean(info.agent_length), is_played),
        accumulated={
            name: moments(mean(x), is_played)
            for name, x in by_name(per_agent, flag.shape).items()
        },
    )


def _policies_of(transition: Transition) -> Any:
    """Returns `(policy_id, policy_index)` of a `policy_map`, or () without one."""
    extras = transition.extras
    is_mapped = isinstance(extras, MapExtras)
    return (extras.policy_id, extras.policy_index) if is_mapped else ()


def _count(flag: jax.Array) -> jax.Array:
    return jnp.sum(flag, dtype=jnp.int32)
