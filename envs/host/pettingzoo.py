"""`from_pettingzoo`: adapts PettingZoo environments with several agents.

`ParallelAdapter` and `TurnAdapter` give one environment the methods of
`gymnasium.Env`, so that `LocalEnvs` and worker processes can step it. Its action is the
joint action of all agents, and its observation contains the observations of all agents.
`MultiAgentHostEnvs` adds the values of each agent, as `rollout.envs.vectorize` does for
environments in JAX. This module does not import PettingZoo.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout.base import checks
from rollout.envs.host.arrays import (
    SpaceLeaves,
    leaf_at,
    leaf_writer,
    make_layout,
    space_like,
    split_action,
    writer,
)
from rollout.envs.host.local_envs import LocalEnvs, close
from rollout.envs.host.types import EnvFault, HostStep, HostVectorEnv
from rollout.envs.host.worker_envs import make_worker_envs
from rollout.envs.host.wrappers import HostWrapper
from rollout.envs.multi_agent import (
    ACTING,
    AgentGroup,
    AgentInfo,
    AgentLayout,
    Flag,
    MultiAgentInfo,
    group_agents,
    layout_of,
    pack_status,
    stacked_spaces,
    update_agents,
)
from rollout.envs.spaces import Discrete, as_space
from rollout.envs.types import AnySpace, ArrayTree

_STEP = "observations", "rewards", "terminations", "truncations", "infos"


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
        agents = _read_agents(env, groups, simultaneous, observe_info, record_info)
    finally:
        close(env)
    make_fns = [functools.partial(_adapt, make, agents)] * num_envs
    record: Any = {"record_info": _record_example(agents)}
    if num_workers:
        return MultiAgentHostEnvs(
            make_worker_envs(make_fns, num_workers, **record), agents
        )
    return MultiAgentHostEnvs(LocalEnvs(make_fns, **record), agents)


class Agents(NamedTuple):
    """The agents of a PettingZoo environment.

    Attributes:
        ids: PettingZoo's id of each agent, usually its name.
        layout: the agents and their groups.
        raw_spaces: observation and action space of an agent as PettingZoo returns
            them, by group.
        observation_spaces: space of one agent's observation, by group, with the keys of
            `observe_info`.
        action_spaces: space of one agent's action, by group.
        record_info: keys of `info` to record, with an example value.
        has_info: whether observations have keys of `info`.
    """

    ids: tuple[Any, ...]
    layout: AgentLayout
    raw_spaces: dict[str, tuple[Any, Any]]
    observation_spaces: dict[str, AnySpace]
    action_spaces: dict[str, AnySpace]
    record_info: Mapping[str, Any]
    has_info: bool


def _read_agents(
    env: Any,
    groups: Mapping[str, Sequence[Any]] | None,
    simultaneous: bool | None,
    observe_info: Mapping[str, Any] | None,
    record_info: Mapping[str, Any] | None,
) -> Agents:
    """Reads the agents, groups and spaces of an environment, and resets it."""
    names = "possible_agents", "observation_space", "action_space", "reset", "step"
    for name in names:
        if not hasattr(env, name):
            raise ValueError(
                "`make` must create a `ParallelEnv` or an `AECEnv` of PettingZoo, got "
                f"{type(env).__name__} without `{name}`."
            )
    ids = tuple(env.possible_agents)
    spaces = {x: _spaces_of(env, x) for x in ids}
    if groups is None:
        by_name = {str(x): spaces[x] for x in ids}
        groups = group_agents(*({x: y[i] for x, y in by_name.items()} for i in (0, 1)))
    for name, agents in groups.items():
        if isinstance(agents, str):
            raise ValueError(
                f"`groups[{name!r}]` must be a list of agents, got the str {agents!r}."
            )
    members = {x: tuple(map(str, y)) for x, y in groups.items()}
    raw_spaces: dict[str, tuple[Any, Any]] = {}
    for x, pair in spaces.items():
        for group in (name for name, agents in members.items() if str(x) in agents):
            first = raw_spaces.setdefault(group, pair)
            if not _are_equal(pair, first):
                raise ValueError(
                    f"`groups[{group!r}]` must have agents with equal spaces, got "
                    f"{first} and, for {x!r}, {pair}."
                )
    layouts = {
        group: make_layout(pair, observe_info, None)
        for group, pair in raw_spaces.items()
    }
    is_turn_based = hasattr(env, "last")
    if simultaneous is None:
        simultaneous = not is_turn_based and _starts_all_agents(env)
    elif simultaneous and is_turn_based:
        raise ValueError("`simultaneous` must be None or False for an `AECEnv`.")
    described = _Described(
        agents=tuple(map(str, ids)),
        groups=members,
        observation_spaces={x: layouts[x].obs.space for x in raw_spaces},
        action_spaces={x: layouts[x].action.space for x in raw_spaces},
        simultaneous=simultaneous,
    )
    return Agents(
        ids=ids,
        layout=layout_of(described),
        raw_spaces=raw_spaces,
        observation_spaces=described.observation_spaces,
        action_spaces=described.action_spaces,
        record_info=record_info or {},
        has_info=bool(observe_info),
    )


def _spaces_of(env: Any, agent: Any) -> tuple[Any, Any]:
    return env.observation_space(agent), env.action_space(agent)


def _are_equal(spaces: tuple[Any, Any], others: tuple[Any, Any]) -> bool:
    return tuple(map(as_space, spaces)) == tuple(map(as_space, others))


class _Described(NamedTuple):
    """The attributes of a `MultiAgentEnv` that `layout_of` reads."""

    agents: tuple[str, ...]
    groups: dict[str, tuple[str, ...]]
    observation_spaces: dict[str, AnySpace]
    action_spaces: dict[str, AnySpace]
    simultaneous: bool


def _starts_all_agents(env: Any) -> bool:
    """Resets a parallel environment; returns whether all agents act first."""
    try:
        env.reset(seed=0)
    except Exception as cause:
        raise EnvFault({0: cause}) from cause
    return set(env.agents) == set(env.possible_agents)


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


def _adapt(make: Callable[[], Any], agents: Agents) -> "_Adapter":
    """Creates an environment with the methods of `gymnasium.Env`."""
    env = make()
    base = TurnAdapter if hasattr(env, "last") else ParallelAdapter
    # `save` tests whether the class has these methods.
    has_state = hasattr(type(env), "save_state") and hasattr(type(env), "load_state")
    return (_WITH_STATE[base] if has_state else base)(env, agents)


class _Group(NamedTuple):
    """The agents of a group in an adapter.

    Attributes:
        name: name of the group.
        agents: ids of the agents.
        split: maps the actions of the group, `[A_g, ...]`, to a list.
        obs: arrays of the observations, `[A_g, ...]`, and their spaces.
        info: arrays of the recorded entries of `info`, `[A_g, ...]`.
    """

    name: str
    agents: tuple[Any, ...]
    split: Callable[[ArrayTree], Sequence[Any]]
    obs: list[tuple[np.ndarray, AnySpace]]
    info: list[np.ndarray]


class _Adapter:
    """A PettingZoo environment with the methods of `gymnasium.Env`.

    Args:
        env: a `ParallelEnv` or an `AECEnv`.
        agents: the agents of the environment.
    """

    def __init__(self, env: Any, agents: Agents) -> None:
        self.env, self._agents, layout = env, agents, agents.layout
        self._index = {agent: i for i, agent in enumerate(agents.ids)}
        spaces = stacked_spaces(layout, agents.observation_spaces, acting=True)
        self.observation_space = spaces
        self.action_space = stacked_spaces(layout, agents.action_spaces)
        shape = len(agents.ids)
        self._reward = np.zeros(shape, np.float32)
        self._acting, self._terminated = np.zeros(shape, bool), np.zeros(shape, bool)
        self._truncated = np.zeros(shape, bool)
        # Agents that have ended, and whether each of them terminated.
        self._ended: dict[Any, bool] = {}
        # Functions that write an observation, and a leaf of `info` by its path.
        self._obs_writers: dict[Any, Callable[[Any], None]] = {}
        self._info_writers: dict[Any, list[tuple[Any, Callable[[Any], None]]]] = {}
        self._obs: dict[str, Any] = {ACTING: self._acting}
        env_info: dict[str, Any] = {}
        self._groups = [self._make_group(x, env_info) for x in layout.groups]
        self._info: dict[str, Any] = {
            "reward": self._reward,
            "terminated": self._terminated,
            "truncated": self._truncated,
            "env": env_info,
        }

    def _make_group(self, group: AgentGroup, env_info: dict[str, Any]) -> _Group:
        """Allocates the arrays of a group and the functions that write to them."""
        agents, name = self._agents, group.name
        ids = tuple(agents.ids[i] for i in group.members)
        parts = SpaceLeaves(agents.observation_spaces[name], "obs")
        obs = [np.zeros((len(ids), *x.shape), x.dtype) for x in parts.spaces]
        info_parts = SpaceLeaves(space_like(agents.record_info), "info")
        info = [np.zeros((len(ids), *x.shape), x.dtype) for x in info_parts.spaces]
        self._obs[name] = parts.unflatten(obs)
        env_info[name] = info_parts.unflatten(info)
        for i, agent in enumerate(ids):
            title = f"the observation of {agent!r}"
            write = writer(SpaceLeaves(agents.observation_spaces[name], title), obs)
            self._obs_writers[agent] = functools.partial(write, i)
            self._info_writers[agent] = [
                (path, functools.partial(leaf_writer(x, f"the info of {agent!r}"), i))
                for path, x in zip(info_parts.paths, info, strict=True)
            ]
        split = split_action(agents.raw_spaces[name][1])
        return _Group(name, ids, split, list(zip(obs, parts.spaces, strict=True)), info)

    @property
    def render_mode(self) -> Any:
        """Mode of `render`."""
        return getattr(self.env, "render_mode", None)

    def render(self) -> Any:
        """Renders the environment."""
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()

    def _start(self) -> None:
        """Clears the values of the previous episode."""
        self._ended = {}
        for group in self._groups:
            for array, space in group.obs:
                array[:] = _ones(space)
        self._begin_step()
        self._check_spaces()

    def _check_spaces(self) -> None:
        """Raises if the space of an agent has changed."""
        for group in self._groups:
            first = self._agents.raw_spaces[group.name]
            for agent in group.agents:
                spaces = _spaces_of(self.env, agent)
                if spaces != first and not _are_equal(spaces, first):
                    raise ValueError(
                        f"the spaces of {agent!r} must not change, got {spaces} "
                        f"instead of {first}"
                    )

    def _split(self, action: Mapping[str, ArrayTree]) -> dict[Any, Any]:
        """Returns the action of each agent."""
        return {
            agent: x
            for group in self._groups
            for agent, x in zip(
                group.agents, group.split(action[group.name]), strict=True
            )
        }

    def _begin_step(self) -> None:
        """Clears the results of the previous step."""
        self._reward[:] = 0
        self._acting[:] = self._terminated[:] = self._truncated[:] = False
        for group in self._groups:
            for array in group.info:
                array[:] = 0

    def _result(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Returns the results of a step as `gymnasium.Env.step` does."""
        is_over = not self._acting.any()
        terminated = is_over and all(self._ended.values())
        reward = float(self._reward.sum())
        return self._obs, reward, terminated, is_over and not terminated, self._info

    def _add_reward(self, agent: Any, reward: Any) -> None:
        """Adds to the reward of an agent in this step."""
        index = self._position(agent, "`rewards`")
        if not isinstance(reward, float | int) and not _is_number(reward):
            raise ValueError(f"`rewards[{agent!r}]` must be a number, got {reward!r}")
        if not math.isfinite(reward):
            raise ValueError(f"`rewards[{agent!r}]` must be finite, got {reward}")
        self._reward[index] += reward

    def _position(self, agent: Any, name: str) -> int:
        """Returns the position of an agent; raises if it is unknown."""
        if agent not in self._index:
            raise ValueError(
                f"{name} must contain agents of `possible_agents`, got {agent!r}"
            )
        return self._index[agent]

    def _check_agents(self) -> list[Any]:
        """Returns `agents`; raises if an agent is unknown or repeated."""
        agents = list(self.env.agents)
        for agent in agents:
            self._position(agent, "`agents`")
        if len(set(agents)) < len(agents):
            raise ValueError(f"`agents` must not repeat an agent, got {agents}")
        return agents

    def _observe(self, agent: Any, obs: Any, info: Any) -> None:
        """Writes the observation and the info of an agent."""
        obs = {"obs": obs, "info": info} if self._agents.has_info else obs
        self._obs_writers[agent](obs)
        for path, write in self._info_writers[agent]:
            if path[0] in info:
                write(leaf_at(info, path))

    def _end(self, agent: Any, terminated: bool, truncated: bool) -> None:
        """Marks an agent as ended in this step."""
        index = self._index[agent]
        self._terminated[index], self._truncated[index] = terminated, truncated
        self._ended[agent] = bool(terminated)

    def _read_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Reads the values of an episode from a result of `save_state`."""
        flags = np.asarray(state["rollout/ended"])
        self._ended = {
            agent: bool(terminated)
            for agent, (ended, terminated) in zip(self._agents.ids, flags, strict=True)
            if ended
        }
        self._acting[:] = state["rollout/acting"]
        arrays = [x for group in self._groups for x, _ in group.obs]
        for number, array in enumerate(arrays):
            array[:] = state[f"rollout/obs_{number}"]
        return {x: y for x, y in state.items() if not x.startswith("rollout/")}

    def _write_state(self) -> dict[str, Any]:
        """Returns the values of an episode for `save_state`."""
        flags = [(x in self._ended, self._ended.get(x, False)) for x in self._index]
        arrays = [x for group in self._groups for x, _ in group.obs]
        state = {f"rollout/obs_{i}": array for i, array in enumerate(arrays)}
        return state | {"rollout/ended": flags, "rollout/acting": self._acting}


class ParallelAdapter(_Adapter):
    """A `ParallelEnv`: all agents in `agents` act at every step."""

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """Starts an episode; see `gymnasium.Env.reset`."""
        result = self.env.reset(seed=seed)
        if type(result) is not tuple or len(result) != 2:
            raise ValueError(
                "`reset` must return (observations, infos), got "
                f"{checks.describe(result)}"
            )
        observations, infos = _mappings(result, ("observations", "infos"))
        self._start()
        agents = self._check_agents()
        if not agents:
            raise ValueError("`agents` must not be empty after `reset`")
        if self._agents.layout.simultaneous and len(agents) < len(self._index):
            missing = next(x for x in self._index if x not in agents)
            raise ValueError(
                f"`agents` must have {missing!r} after `reset`, as in the first "
                "episode. If agents may start later, pass `simultaneous=False` to "
                "`from_pettingzoo`"
            )
        for agent in agents:
            self._acting[self._index[agent]] = True
            obs = _entry("observations", observations, agent)
            self._observe(agent, obs, self._info_of(infos, agent))
        return self._obs, {}

    def step(
        self, action: Mapping[str, ArrayTree]
    ) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes one step; see `gymnasium.Env.step`."""
        actions = self._split(action)
        # Environments assert that the keys are the agents that have not ended.
        acting = list(self.env.agents)
        result = self.env.step({agent: actions[agent] for agent in acting})
        if type(result) is not tuple or len(result) != len(_STEP):
            raise ValueError(
                f"`step` must return ({', '.join(_STEP)}), got "
                f"{checks.describe(result)}"
            )
        observations, rewards, terminations, truncations, infos = _mappings(
            result, _STEP
        )
        self._begin_step()
        for agent, reward in rewards.items():
            self._add_reward(agent, reward)
        remaining = self._check_agents()
        is_ended = {}
        for agent in acting:
            _entry("rewards", rewards, agent)
            terminated = _flag("terminations", terminations, agent)
            truncated = _flag("truncations", truncations, agent)
            is_ended[agent] = terminated or truncated
            if is_ended[agent]:
                self._end(agent, terminated, truncated)
                obs = _entry("observations", observations, agent)
                self._observe(agent, obs, self._info_of(infos, agent))
            elif agent not in remaining:
                raise ValueError(
                    f"{agent!r} must not leave `agents` without a flag in "
                    "`terminations` or `truncations`"
                )
        # Some environments keep all agents in `agents` after the end of the episode.
        if all(is_ended.values()) and set(remaining) == set(acting):
            remaining = []
        for agent in remaining:
            if agent in self._ended:
                raise ValueError(
                    f"{agent!r} must not be in `agents` after its end. Remove it, or "
                    "give the new agent another name"
                )
            if self._agents.layout.simultaneous and agent not in is_ended:
                raise ValueError(f"{agent!r} must act at every step")
            self._acting[self._index[agent]] = True
            obs = _entry("observations", observations, agent)
            self._observe(agent, obs, self._info_of(infos, agent))
        return self._result()

    def _info_of(self, infos: Mapping[Any, Any], agent: Any) -> Any:
        """Returns the info of an agent; many environments omit unused infos."""
        return infos.get(agent, {})


class TurnAdapter(_Adapter):
    """An `AECEnv`: a step is the turn of the agent `agent_selection`."""

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """Starts an episode; see `gymnasium.Env.reset`."""
        self.env.reset(seed=seed)
        self._start()
        self._skip_ended()
        if not self._acting.any():
            raise ValueError("an agent must act after `reset`, got no agent")
        return self._obs, {}

    def step(
        self, action: Mapping[str, ArrayTree]
    ) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes one turn; see `gymnasium.Env.step`."""
        action = self._split(action)
        self._begin_step()
        self._take_turn(action[self.env.agent_selection])
        self._skip_ended()
        return self._result()

    def _take_turn(self, action: Any) -> None:
        """Steps the selected agent and adds the rewards of all agents."""
        selected, old_totals = self.env.agent_selection, dict(self._totals())
        self.env.step(action)
        for agent, total in self._totals().items():
            # The total of the selected agent starts at 0, because its previous rewards
            # were returned by `last`.
            old = 0.0 if agent == selected else old_totals.get(agent, 0.0)
            self._add_reward(agent, total if not old else total - old)

    def _totals(self) -> Mapping[Any, Any]:
        """Returns the rewards of each agent since its last turn."""
        totals = getattr(self.env, "_cumulative_rewards", None)
        if not isinstance(totals, Mapping):
            raise ValueError(
                "`reset` must set `_cumulative_rewards`, a dict with the rewards of "
                f"each agent, got {checks.describe(totals)}"
            )
        return totals

    def _skip_ended(self) -> None:
        """Ends agents in turn until the selected agent can act."""
        while agents := self._check_agents():
            agent = self.env.agent_selection
            if agent not in agents:
                raise ValueError(
                    f"`agent_selection` must be in `agents`, got {agent!r}, and "
                    f"{agents}"
                )
            result = self.env.last()
            if type(result) is not tuple or len(result) != len(_STEP):
                raise ValueError(
                    "`last` must return (observation, reward, termination, truncation, "
                    f"info), got {checks.describe(result)}"
                )
            obs, _, terminated, truncated, info = result
            terminated = _as_flag("terminations", terminated, agent)
            truncated = _as_flag("truncations", truncated, agent)
            if agent in self._ended:
                raise ValueError(f"{agent!r} must not return to `agents` after its end")
            self._observe(agent, obs, info)
            if not (terminated or truncated):
                self._acting[self._index[agent]] = True
                return
            self._end(agent, terminated, truncated)
            self._take_turn(None)
            if agent in self.env.agents:
                raise ValueError(
                    f"{agent!r} must leave `agents` after its end, when it steps with "
                    "the action None"
                )


class _ParallelAdapterWithState(ParallelAdapter):
    """A `ParallelAdapter` whose environment can be saved."""

    def save_state(self) -> dict[str, Any]:
        """Returns the state of the environment as arrays."""
        return self.env.save_state() | self._write_state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores a result of `save_state`."""
        self.env.load_state(self._read_state(state))


class _TurnAdapterWithState(TurnAdapter):
    """A `TurnAdapter` whose environment can be saved."""

    save_state = _ParallelAdapterWithState.save_state
    load_state = _ParallelAdapterWithState.load_state


_WITH_STATE: dict[Any, Any] = {
    ParallelAdapter: _ParallelAdapterWithState,
    TurnAdapter: _TurnAdapterWithState,
}


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


def _ones(space: AnySpace) -> Any:
    """Returns a value of a space, ones if possible."""
    if isinstance(space, Discrete) or space.bounds is None:
        return getattr(space, "start", 1)
    return np.clip(1, *space.bounds)


def _is_number(value: Any) -> bool:
    return np.shape(value) == () and np.asarray(value).dtype.kind in "biuf"


def _mappings(values: Iterable[Any], names: Iterable[str]) -> Sequence[Any]:
    """Returns `values`; raises unless each of them is a dict."""
    values = tuple(values)
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"`{name}` must be a dict by agent, got {checks.describe(value)}"
            )
    return values


def _entry(name: str, values: Mapping[Any, Any], agent: Any) -> Any:
    """Returns the value of an agent; raises if it is missing."""
    if agent not in values:
        raise ValueError(f"`{name}` must have an entry for {agent!r}, got none")
    return values[agent]


def _flag(name: str, values: Mapping[Any, Any], agent: Any) -> bool:
    """Returns the flag of an agent; raises if it is missing or not a bool."""
    return _as_flag(name, _entry(name, values, agent), agent)


def _as_flag(name: str, value: Any, agent: Any) -> bool:
    if type(value) is bool:
        return value
    if np.shape(value) or np.asarray(value).dtype != bool:
        raise ValueError(f"`{name}[{agent!r}]` must be a bool, got {value!r}")
    return bool(value)
