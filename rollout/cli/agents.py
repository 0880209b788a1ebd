"""Rows of the table for several agents: one per agent and one per policy."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.multi_agent import AgentLayout
from rollout.cli.types import Agents
from rollout.collector import Collector
from rollout.multi_agent.stats import summarize_agents
from rollout.types import Accumulator, Transition

_NAME = "agents"
_FIELDS = (
    *("reward", "agent_return", "agent_length", "acted", "waiting"),
    *("terminated", "truncated", "unassigned_reward"),
)


def layout_of(collector: Any) -> AgentLayout | None:
    """The agents of an environment; None if it has none."""
    return getattr(collector.env.num_envs, "agents", None)


def read(trajectory: Transition) -> dict[str, jax.Array]:
    """Keeps the fields that `join` reads; the others get no buffer."""
    info, stats = trajectory.info.agents, summarize_agents(trajectory)
    return {
        "episode_return": info.agent_return,
        "episode_length": info.agent_length,
        "num_steps": stats.num_agent_steps,
        "unassigned_reward": stats.unassigned_reward,
        "num_stale": stats.num_stale,
    }


def at_endings(fields: dict[str, np.ndarray], done: np.ndarray) -> dict:
    """Moves figures to NumPy, of the episodes that ended only."""
    ended = {x: fields[x][: done.shape[0]][done] for x in fields if fields[x].ndim}
    return {**fields, **ended}


def join(layout: AgentLayout, parts: Sequence[dict[str, np.ndarray]]) -> Agents:
    """Joins the parts of a run."""
    return Agents(
        layout=layout,
        episode_return=np.concatenate([part["episode_return"] for part in parts]),
        episode_length=np.concatenate([part["episode_length"] for part in parts]),
        num_steps=sum(int(part["num_steps"]) for part in parts),
        unassigned_reward=sum(float(part["unassigned_reward"]) for part in parts),
        num_stale=sum(int(part["num_stale"]) for part in parts),
    )


def unpack(trajectory: Transition) -> Transition:
    """Names what `info.agents` has packed in one word."""
    info = trajectory.info
    named = {name: getattr(info.agents, name) for name in _FIELDS}
    return trajectory.replace(info={"agents": named, "env": info.env})


def keep(collector: Collector, layout: AgentLayout) -> Collector:
    """Has the collector keep, per episode, what `kept` reads."""

    def init(num_envs: int) -> dict[str, jax.Array]:
        shape = (num_envs, len(layout.agents))
        return {
            "episode_return": jnp.zeros(shape, jnp.float32),
            "episode_length": jnp.zeros(shape, jnp.int32),
            "unassigned_reward": jnp.zeros(shape, jnp.float32),
            "waiting": jnp.zeros(shape, bool),
        }

    def update(
        figures: dict[str, jax.Array], transition: Transition
    ) -> dict[str, jax.Array]:
        info = transition.info.agents
        return {
            "episode_return": info.agent_return,
            "episode_length": info.agent_length,
            "unassigned_reward": figures["unassigned_reward"] + info.unassigned_reward,
            "waiting": info.waiting,
        }

    return collector.replace(accumulators={_NAME: Accumulator(init, update)})


def kept(layout: AgentLayout, accumulated: dict[str, dict[str, np.ndarray]]) -> Agents:
    """Reads what was kept of episodes, `[N, A]` each."""
    figures = accumulated[_NAME]
    return Agents(
        layout=layout,
        episode_return=figures["episode_return"],
        episode_length=figures["episode_length"],
        num_steps=int(figures["episode_length"].sum(dtype=np.int64)),
        unassigned_reward=float(figures["unassigned_reward"].sum(dtype=np.float64)),
        num_stale=int(figures["waiting"].sum()),
    )
