"""Records that the commands hand to the report and the figures."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from envs.multi_agent import AgentLayout
from envs.types import ArrayTree, Env
from rollout.stats import CollectStats
from rollout.types import Episodes


class Agents(NamedTuple):
    """Statistics of `A` agents: over `E` episodes that ended, and over all steps."""

    layout: AgentLayout
    episode_return: np.ndarray  # [E, A] float32
    episode_length: np.ndarray  # [E, A] int32, actions
    num_steps: int  # actions, in all steps
    unassigned_reward: float  # in all steps
    num_stale: int  # agents that an episode ended for without an observation

    def select(self, figure: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Takes a figure, `[E, A]`, by agent and by policy, of those who acted."""
        groups, has_acted = self.layout.groups, self.episode_length > 0
        columns = {name: [i] for i, name in enumerate(self.layout.agents)}
        if len(groups) > 1:  # a policy plays a group, and has its name
            columns |= {f"policy {x.name}": list(x.members) for x in groups}
        for name, its in columns.items():
            yield name, figure[:, its][has_acted[:, its]]


class Ended(NamedTuple):
    """The `E` episodes that ended, in the order in which they did."""

    step: np.ndarray  # [E] int, steps of each lane until then, the last one included
    terminated: np.ndarray  # [E] bool, False where it was only truncated
    episode_return: np.ndarray  # [E] float32
    episode_length: np.ndarray  # [E] int32


class Result(NamedTuple):
    """Result of collecting a number of steps."""

    num_steps: int  # T, rows of every lane
    num_void: int  # rows of all lanes together that are no step
    ended: Ended
    trajectory: dict[str, np.ndarray]  # [T, B, ...] by name, {} unless it is saved
    compile_time: float  # s
    run_time: float  # s
    is_interrupted: bool
    agents: Agents | None  # None where one acts alone


class Played(NamedTuple):
    """Exactly N episodes, as NumPy arrays."""

    episodes: Episodes  # [N], in the order in which they started
    stats: CollectStats
    num_rows: int  # steps of all lanes together, the idle ones included
    compile_time: float  # s
    run_time: float  # s
    agents: Agents | None = None  # None where one acts alone


class Recorded(NamedTuple):
    """One episode of `T` steps, as NumPy arrays."""

    env: Env
    states: ArrayTree  # [T + 1, ...]
    rewards: np.ndarray  # [T] float32
    episodes: Episodes  # [1]
