"""Agents, groups and spaces of a PettingZoo environment."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollout.envs.host.arrays import make_layout
from rollout.envs.host.types import EnvFault
from rollout.envs.multi_agent import AgentLayout, group_agents, layout_of
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace


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


def read_agents(
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
    spaces = {x: spaces_of(env, x) for x in ids}
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
            if not are_equal(pair, first):
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


def spaces_of(env: Any, agent: Any) -> tuple[Any, Any]:
    """Returns the observation and action space of an agent."""
    return env.observation_space(agent), env.action_space(agent)


def are_equal(spaces: tuple[Any, Any], others: tuple[Any, Any]) -> bool:
    """Returns whether two agents have equal spaces."""
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
