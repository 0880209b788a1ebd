"""Several agents: who plays whom, what each experienced, and statistics of it."""

from rollout.multi_agent.joint import policy_map
from rollout.multi_agent.mapping import Roster, fixed_mapping
from rollout.multi_agent.members import Population, population
from rollout.multi_agent.stats import AgentFigures, AgentStats, summarize_agents
from rollout.multi_agent.transitions import (
    Pending,
    agent_transitions,
    for_policy,
    init_agent_transitions,
)

__all__ = [
    "AgentFigures",
    "AgentStats",
    "Pending",
    "Population",
    "Roster",
    "agent_transitions",
    "fixed_mapping",
    "for_policy",
    "init_agent_transitions",
    "policy_map",
    "population",
    "summarize_agents",
]
