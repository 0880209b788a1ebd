"""`summarize_agents`: statistics of each agent and each policy, over ended episodes."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout import checks
from rollout.agents.mapping import MapExtras
from rollout.agents.transitions import agents_of
from rollout.collector import Collector
from rollout.envs import trees
from rollout.envs.multi_agent import layout_of
from rollout.moments import Moments, is_known, moments, moments_by_name, xp_of
from rollout.stats import present
from rollout.types import Accumulator, Episodes, PerAgent, Transition

_NAME = "agents"  # of the accumulator


class WinDrawLoss(struct.PyTreeNode, kw_only=True):
    """Results of games: a win is a return above 0, a loss one below, a draw one of 0.

    Where two agents of a game have the same policy, both count for it.

    Attributes:
        wins: `()` int32, how many there are.
        draws: `()` int32, likewise.
        losses: `()` int32, likewise.
    """

    wins: jax.Array  # ()
    draws: jax.Array  # ()
    losses: jax.Array  # ()

    def interval(self, name: str) -> tuple[jax.Array, jax.Array]:
        """Computes the 95 % confidence interval of the share of "wins", say.

        Returns:
            Both ends, in [0, 1], also for shares of 0 and 1. "Probable inference, the
            law of succession, and statistical inference" (Wilson, 1927).
        """
        xp, z = xp_of(self), 1.959964
        n = xp.maximum(self.wins + self.draws + self.losses, 1) * 1.0
        share = getattr(self, name) / n
        # Wilson's interval is not centred on the share: it is pulled towards one half.
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
            parts += [f"{getattr(self, name):,} {name} ({low:.1f} to {high:.1f} %)"]
        return ", ".join(parts)


class AgentMetrics(struct.PyTreeNode, kw_only=True):
    """Metrics of one agent or one policy, over the episodes in which it acted.

    Attributes:
        returns: of its undiscounted returns.
        lengths: of the number of its actions.
        results: wins, draws and losses, by the sign of the return.
        accumulated: of each `PerAgent` value that is one number per agent, by its path
            in `accumulated`, joined by "/".
    """

    returns: Moments
    lengths: Moments
    results: WinDrawLoss
    accumulated: dict[str, Moments] = struct.field(default_factory=dict)


class AgentStats(struct.PyTreeNode, kw_only=True):
    """Statistics per agent.

    `print` shows the results of every policy, or else of every agent.

    Attributes:
        num_steps: `()` int32, environment steps over all lanes, idle ones not counted.
        num_agent_steps: `()` int32, actions that agents took in these steps.
        num_episodes: `()` int32, episodes that ended, also if they began before.
        unassigned_reward: `()` float32, in these steps, the sum of rewards that answer
            no action: from before an agent's first action and from after its end. With
            `agent_transitions` no learner sees them; where agents win or lose together,
            take `team_transitions`.
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

    def __str__(self) -> str:
        """Formats the results and the mean return of each policy, or each agent."""
        if not is_known(self.num_episodes):
            return repr(self)
        metrics = self.policies or self.agents
        lines = [f"{x}: {y.results}, return {y.returns}" for x, y in metrics.items()]
        return "\n".join(lines)


def evaluate_agents(
    collector: Collector,
    params: Any,
    key: chex.PRNGKey,
    num_episodes: int,
    *,
    max_episode_steps: int = checks.MAX_EPISODE_STEPS,
) -> AgentStats:
    """Plays exactly `num_episodes`, and summarizes agents and policies. Jitted.

    It plays the episodes of `rollout.evaluate`, whose return is that of the team: 0 in
    every game that one wins and the other loses. Here each agent and each policy of a
    `policy_map` has its own results and returns:

        print(rollout.agents.evaluate_agents(collector, params, key, 1000))

    Args:
        collector: with an environment of several agents.
        params: parameters of the policy.
        key: one typed key: the source of all randomness.
        num_episodes: N, at least 1. Static: one trace per value.
        max_episode_steps: steps of an episode after which it is cut, at least 1; cut
            episodes count with the returns until then.

    Returns:
        Statistics, as of `summarize_agents`; `num_unmapped` is 0.

    Raises:
        ValueError: if the environment has one agent, or as `rollout.evaluate` does.
    """
    checks.typed_key(key)
    checks.collects_in_jax(collector)
    checks.statistics_are_fixed(collector)
    num_episodes = checks.int_between("num_episodes", num_episodes)
    max_episode_steps = checks.max_episode_steps(max_episode_steps)
    return _evaluate(collector, params, key, num_episodes, max_episode_steps)


@functools.partial(jax.jit, static_argnames=("num_episodes", "max_episode_steps"))
def _evaluate(
    collector: Collector,
    params: Any,
    key: chex.PRNGKey,
    num_episodes: int,
    max_episode_steps: int,
) -> AgentStats:
    # Inside of `jit`: its functions are new ones at every call, and would compile
    # again.
    collector = keep_agents(collector, params)
    carry = collector.init(key)
    _, episodes = collector.collect_episodes(
        carry, params, num_episodes, max_episode_steps=max_episode_steps
    )
    return summarize_agents(episodes)


def keep_agents(collector: Collector, params: Any) -> Collector:
    """Adds the accumulator that `summarize_agents` reads in `Episodes` to a collector.

    Args:
        collector: with an environment of several agents.
        params: parameters of the policy.
    """
    layout_of(collector.env)  # raises if there is one agent
    shapes = collector.replace(record_fn=None).row_shape(params)

    def init(num_envs: int) -> Any:
        # Its values do not matter: `kept` has its structure, shapes and dtypes.
        row = trees.blank(shapes)
        info = agents_of(row)
        kept = info, info.unassigned_reward, _policies_of(row)
        return trees.blank(kept, (num_envs,), skip=1)

    def update(kept: Any, transition: Transition) -> Any:
        info = agents_of(transition)
        return info, kept[1] + info.unassigned_reward, _policies_of(transition)

    accumulators = {**dict(collector.accumulators), _NAME: Accumulator(init, update)}
    return collector.replace(accumulators=accumulators)


def summarize_agents(data: Transition | Episodes) -> AgentStats:
    """Summarizes agents and policies, inside or outside of `jit`.

    Returns, lengths and results are those of the episodes that ended, each counted
    whole. Short episodes are favoured; `evaluate_agents` plays exactly N.

    Args:
        data: a trajectory, `[T, B, ...]`, of an environment of several agents;
            masked-out rows do not count. Or the `Episodes` of a collector made by
            `rollout.agents.agent_stats.keep_agents`: then `num_unmapped` is 0.

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
    took_part = ended & ((info.agent_length > 0) | (info.agent_return != 0))
    of_policies = {}
    if policies:
        policy_id, policy_index = policies
        of_policies = {
            name: took_part & policy_index.select(name, policy_id)
            for name, *_ in policy_index.indices
        }
    # `[A]`, compared with one name at a time: the columns of that agent.
    names = np.array(info.layout.agents)
    agents = {
        name: took_part & jnp.broadcast_to(names == name, took_part.shape)
        for name in info.layout.agents
    }
    own = {name: x.value for name, x in accumulated.items() if isinstance(x, PerAgent)}

    def metrics(flag: jax.Array) -> AgentMetrics:
        return AgentMetrics(
            results=WinDrawLoss(
                wins=_count(flag & (info.agent_return > 0)),
                draws=_count(flag & (info.agent_return == 0)),
                losses=_count(flag & (info.agent_return < 0)),
            ),
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


def _policies_of(transition: Transition) -> Any:
    """Returns `(policy_id, policy_index)` of a `policy_map`, or ()."""
    extras = transition.extras
    is_mapped = isinstance(extras, MapExtras)
    return (extras.policy_id, extras.policy_index) if is_mapped else ()


def _count(flag: jax.Array) -> jax.Array:
    return jnp.sum(flag, dtype=jnp.int32)
