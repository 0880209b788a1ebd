"""`from_pettingzoo`: adapts PettingZoo environments with several agents.

`read_agents` reads the agents and spaces of one environment, and `adapt` gives each
environment the methods of `gymnasium.Env`, so that `LocalEnvs` and worker processes can
step it. `MultiAgentHostEnvs` adds the values of each agent, as `rollout.envs.vectorize`
does for environments in JAX. This module does not import PettingZoo.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollout.base import checks
from rollout.envs.host.local_envs import LocalEnvs, close
from rollout.envs.host.pettingzoo_adapters import adapt
from rollout.envs.host.pettingzoo_agents import Agents, read_agents
from rollout.envs.host.types import EnvFault, HostStep, HostVectorEnv
from rollout.envs.host.worker_envs import make_worker_envs
from rollout.envs.host.wrappers import HostWrapper
from rollout.envs.multi_agent import (
    ACTING,
    AgentInfo,
    Flag,
    MultiAgentInfo,
    pack_status,
    update_agents,
)
from rollout.envs.types import ArrayTree


def from_pettingzoo(
    make: Callable[..., Any],
    num_envs: int,
    *,
    num_workers: int | None = None,
    groups: Mapping[str, Sequence[Any]] | None = None,
    simultaneous: bool | None = None,
    observe_info: Mapping[str, Any] | None = None,
    record_info: Mapping[str, Any] | None = None,
    **options: Any,
) -> HostVectorEnv:
    """Adapts PettingZoo environments, parallel or turn-based (AEC).

    Observations, actions and `info` have the structure that `rollout.envs.vectorize`
    gives a `MultiAgentEnv`: `obs` is `{group: [B, A_g, ...]}` with an additional entry
    "acting", `[B, A]` bool; an action is `{group: [B, A_g, ...]}`; the reward is the
    sum over the agents; and `info` is a `MultiAgentInfo` with the reward and the flags
    of each agent. An episode ends when no agent is left. It is terminated if all agents
    terminated, and otherwise truncated.

    In a turn-based environment, a step is one turn. The rewards of an agent until its
    next turn sum to the reward that `last` returns there. Turns of agents that have
    ended, which only accept None, are part of the previous step.

    The observation of an agent that does not act is its latest one. Before its first
    observation in an episode, it consists of ones, clipped to the space.

    A violation of PettingZoo's interface is a fault of the environment that names the
    agent: a missing entry, an unknown agent, an agent that leaves `agents` without a
    termination or a truncation, an agent that returns after its end.

    Args:
        make: function that creates a `ParallelEnv` or an `AECEnv`, such as
            `mpe2.simple_spread_v3.parallel_env`. It is called `num_envs` + 1 times: the
            first environment is only read and closed.
        num_envs: number of environments, B.
        num_workers: number of worker processes, as in `make_worker_envs`. None or 0
            steps the environments in this process.
        groups: agents by group, each agent in exactly one. The agents of a group have
            equal spaces. None groups all agents with equal spaces: a single group is
            named "agents", several groups are named after their agents.
        simultaneous: whether every agent that has not ended acts at every step. Actions
            then have immediate results. None is True for a parallel environment whose
            first reset starts all agents; pass False if some agents of such an
            environment may start later in other episodes.
        observe_info: keys of an agent's `info` to include in its observation, each with
            an example value: `{"action_mask": np.ones(5, bool)}`. An observation is
            then `{"obs": obs, "info": {key: value}}`.
        record_info: keys of an agent's `info` to record in `info.env`, `{group: {key:
            [B, A_g, ...]}}`, each with an example value. The recorded value is zero if
            a step does not return the key.
        **options: arguments of `make`.

    Returns:
        `B` host environments for a `rollout.HostCollector`, with `agents`, `groups`,
        `observation_spaces` and `action_spaces` like a `MultiAgentEnv`. They support
        `rebuild`, and `save` if the class of the environment defines `save_state` and
        `load_state`.

    Raises:
        EnvFault: if an environment cannot be created or reset.
        ValueError: if `make` does not create PettingZoo environments, `num_envs`,
            `num_workers`, `groups` or `simultaneous` is invalid, or a space does not
            consist of arrays.
    """
    num_envs = checks.check_int("num_envs", num_envs)
    if not callable(make):
        raise ValueError(
            "`make` must be a function that creates an environment, got "
            f"{checks.describe(make)}. Each of the `num_envs` environments needs a "
            "separate object."
        )
    make = functools.partial(make, **options) if options else make
    try:
        env = make()
    except Exception as cause:
        raise EnvFault({0: cause}) from cause
    try:
        agents = read_agents(env, groups, simultaneous, observe_info, record_info)
    finally:
        close(env)
    make_fns = [functools.partial(adapt, make, agents)] * num_envs
    record: Any = {"record_info": _record_example(agents)}
    if num_workers:
        return MultiAgentHostEnvs(
            make_worker_envs(make_fns, num_workers, **record), agents
        )
    return MultiAgentHostEnvs(LocalEnvs(make_fns, **record), agents)


def _record_example(agents: Agents) -> dict[str, Any]:
    """Returns examples of the entries of `info` that an adapter returns."""
    values = np.zeros(len(agents.ids), np.float32)
    flags = values.astype(bool)
    env_info = {
        group.name: _repeat(agents.record_info, len(group.members))
        for group in agents.layout.groups
    }
    example = {"reward": values, "terminated": flags, "truncated": flags}
    return example | ({"env": env_info} if agents.record_info else {})


def _repeat(example: Any, num: int) -> Any:
    """Stacks the arrays of an example `num` times."""
    if isinstance(example, Mapping):
        return {name: _repeat(x, num) for name, x in example.items()}
    return np.stack([np.asarray(example)] * num)


class MultiAgentHostEnvs(HostWrapper):
    """`B` environments with several agents; created by `from_pettingzoo`.

    Attributes:
        agents: names of all agents.
        groups: agents by group.
        observation_spaces: space of one agent's observation, by group.
        action_spaces: space of one agent's action, by group.
        layout: the agents and their groups.
    """

    def __init__(self, env: Any, agents: Agents) -> None:
        super().__init__(env)
        self.layout, self.agents = agents.layout, agents.layout.agents
        self.groups = {
            name: tuple(self.agents[i] for i in members)
            for name, members, *_ in self.layout.groups
        }
        self.observation_spaces = agents.observation_spaces
        self.action_spaces = agents.action_spaces
        shape = self.num_envs, len(self.agents)
        self._packed: Any = np.zeros(shape, np.uint32)
        self._agent_return: Any = np.zeros(shape, np.float32)
        values = AgentInfo(
            reward=self._agent_return,
            agent_return=self._agent_return,
            packed=self._packed,
            layout=self.layout,
        )
        self.info = MultiAgentInfo(values, env.info.get("env", {}))

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        """Starts an episode in some environments; see `HostVectorEnv`."""
        obs: Any = self.env.reset(seeds, mask)
        length = np.zeros(self._packed.shape, np.int32)
        packed = pack_status(length, {Flag.ACTS_NEXT: obs[ACTING]})
        self._packed[mask], self._agent_return[mask] = packed[mask], 0
        return obs

    def step(self, action: ArrayTree) -> HostStep:
        """Steps every environment with its action, `[B, ...]`, without resets."""
        return self._add_agents(self.env.step(action), slice(None))

    def receive(
        self, num_ready: int, timeout: float | None = None
    ) -> tuple[HostStep, np.ndarray]:
        """Waits until some environments are ready; see `AsyncHostVectorEnv`."""
        result, env_id = super().receive(num_ready, timeout)
        return self._add_agents(result, env_id), env_id

    def save(self) -> list[bytes] | None:
        """Saves the state of every environment; see `HostVectorEnv`."""
        if (saved := super().save()) is None:
            return None
        rows = zip(self._packed, self._agent_return, saved, strict=True)
        return [x.tobytes() + y.tobytes() + state for x, y, state in rows]

    def load(self, saved: Sequence[bytes], obs: ArrayTree) -> None:
        """Restores the state of every environment; see `HostVectorEnv`."""
        size = self._packed[0].nbytes
        super().load([state[2 * size :] for state in saved], obs)
        for lane, state in enumerate(saved):
            self._packed[lane] = np.frombuffer(state[:size], np.uint32)
            values = np.frombuffer(state[size : 2 * size], np.float32)
            self._agent_return[lane] = values

    def _add_agents(self, result: HostStep, index: Any) -> HostStep:
        """Replaces the info of a step by the values of each agent."""
        info: Any = result.info
        agents, _ = update_agents(
            self.layout,
            self._packed[index],
            self._agent_return[index],
            reward=info["reward"],
            terminated=info["terminated"],
            truncated=info["truncated"],
            acting=result.obs[ACTING],
        )
        self._packed[index] = agents.packed
        self._agent_return[index] = agents.agent_return
        return result._replace(info=MultiAgentInfo(agents, info.get("env", {})))
