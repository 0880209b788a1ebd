"""Multi-agent policies, transitions and statistics.

`policy_map` combines single-agent policies, and `shared_policy` shares one policy among
all agents; `mapping` assigns policies to agents; `population` evaluates one policy with
many sets of parameters; `transitions` converts a trajectory to the transitions of each
agent; `agent_stats` computes statistics of agents and policies.
"""

from rollout.agents.agent_stats import (
    AgentMetrics,
    AgentStats,
    WinDrawLoss,
    evaluate_agents,
    summarize_agents,
)
from rollout.agents.mapping import MapExtras, static_mapping
from rollout.agents.policy_map import policy_map, policy_state, random_policy_map
from rollout.agents.population import Population
from rollout.agents.shared_policy import share_policy
from rollout.agents.transitions import (
    AgentTransition,
    Pending,
    agent_transitions,
    last_values,
    select_policy,
    team_transitions,
)
from rollout.types import PerAgent

__all__ = [
    "AgentMetrics",
    "AgentStats",
    "AgentTransition",
    "MapExtras",
    "Pending",
    "PerAgent",
    "Population",
    "WinDrawLoss",
    "agent_transitions",
    "evaluate_agents",
    "last_values",
    "policy_map",
    "policy_state",
    "random_policy_map",
    "select_policy",
    "share_policy",
    "static_mapping",
    "summarize_agents",
    "team_transitions",
]
