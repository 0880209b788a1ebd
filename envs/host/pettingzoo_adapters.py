"""Adapters that give a PettingZoo environment the methods of `gymnasium.Env`.

The action is the joint action of all agents, and the observation contains the
observations of all agents.
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
    space_like,
    split_action,
    writer,
)
from rollout.envs.host.pettingzoo_agents import Agents, are_equal, spaces_of
from rollout.envs.multi_agent import (
    ACTING,
    AgentGroup,
    stacked_spaces,
)
from rollout.envs.spaces import Discrete
from rollout.envs.types import AnySpace, ArrayTree

_STEP = "observations", "rewards", "terminations", "truncations", "infos"


def adapt(make: Callable[[], Any], agents: Agents) -> "_Adapter":
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
                spaces = spaces_of(self.env, agent)
                if spaces != first and not are_equal(spaces, first):
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

    def _check_keys(self, name: str, entries: Mapping[Any, Any]) -> None:
        """Raises if a dict by agent has an unknown agent."""
        if not entries.keys() <= self._index.keys():
            for agent in entries:
                self._position(agent, name)

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
        self._check_keys("`observations`", observations)
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
        self._check_keys("`observations`", observations)
        self._check_keys("`terminations`", terminations)
        self._check_keys("`truncations`", truncations)
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
