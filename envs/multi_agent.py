"""The `MultiAgentEnv` contract for environments with several agents.

A `MultiAgentEnv` is a single environment and a pure function of its state. At every
step all agents that have not ended act (simultaneous), or one agent acts (turn-based),
or any other set of agents acts. `vectorize` converts it to a `VectorEnv` whose `info`
contains the values of each agent.
"""

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout.envs.spaces import Box, Dict, Repeated, as_space
from rollout.envs.types import AnySpace, ArrayTree, wrapped_env

ACTING = "acting"  # entry of `obs`: which agents must act

_MAX_ACTIONS = 2**24 - 1
_FLAG = Box(0, 1, (), jnp.dtype(bool))


class Flag(enum.IntEnum):
    """Bit positions of the flags of an agent after a step."""

    ACTS_NEXT = 0
    WAITING = 1  # the agent's last action has no result yet
    HAS_TERMINATED = 2
    WAS_TRUNCATED = 3
    ACTED = 4  # this flag and the next three flags describe the current step
    TERMINATED = 5
    TRUNCATED = 6
    ANSWERS = 7  # the step contributes to the result of an action of the agent


class MultiAgentStep(struct.PyTreeNode, kw_only=True):
    """Result of one step of a `MultiAgentEnv` with `A` agents.

    Attributes:
        state: the next environment state, not reset.
        obs: `{group: [A_g, ...]}`; an agent's observation is valid if the agent acts
            next or ended at this step, and arbitrary otherwise.
        acting: `[A]` bool, the agents that must act next; at the end of the episode,
            the agents whose observation is valid. It is not read if `simultaneous`.
        reward: `[A]` float32, also for agents that did not act.
        terminated: `[A]` bool, the task of the agent ended permanently.
        truncated: `[A]` bool, the agent was cut off, for example by a time limit.
        episode_terminated: `()` bool, the task of all agents ended.
        episode_truncated: `()` bool, the episode was cut off.
        info: any pytree of arrays; `{}` if there is no info.
    """

    state: ArrayTree
    obs: dict[str, ArrayTree]  # {group: [A_g, ...]}
    acting: jax.Array  # [A]
    reward: jax.Array  # [A]
    terminated: jax.Array  # [A]
    truncated: jax.Array  # [A]
    episode_terminated: Any  # (), an array or a Python bool
    episode_truncated: Any  # (), an array or a Python bool
    info: ArrayTree = struct.field(default_factory=dict)


class MultiAgentEnv(Protocol):
    """A single environment with `A` agents. It is pure and never resets itself.

    An implementation is a pytree whose leaves are the environment's parameters. It may
    define a class attribute `simultaneous`, True if every agent that has not ended acts
    at every step. Every action then has an immediate result, and per-agent transitions
    need no extra memory. It may define `at_episode`, as in `Env`.
    """

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of all possible agents, in a fixed order."""
        ...

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Agents by group. A group has equal spaces and is stacked in one array.

        Every agent belongs to exactly one group.
        """
        ...

    @property
    def observation_spaces(self) -> Mapping[str, AnySpace]:
        """Space of one agent's observation, by group."""
        ...

    @property
    def action_spaces(self) -> Mapping[str, AnySpace]:
        """Space of one agent's action, by group."""
        ...

    def reset(
        self, key: chex.PRNGKey
    ) -> tuple[ArrayTree, dict[str, ArrayTree], jax.Array]:
        """Starts an episode; returns `(state, obs, acting)`, as in `MultiAgentStep`."""
        ...

    def step(
        self, key: chex.PRNGKey, state: ArrayTree, action: dict[str, jax.Array]
    ) -> MultiAgentStep:
        """Takes one step. `action` is `{group: [A_g, ...]}`, used for acting agents."""
        ...


class AgentGroup(NamedTuple):
    """Agents with equal spaces.

    Attributes:
        name: name of the group.
        members: positions of the `A_g` agents in `AgentLayout.agents`.
        shape: shape of one agent's action; None if the action has several parts.
        dtype: dtype of one agent's action; None if the action has several parts.
    """

    name: str
    members: tuple[int, ...]
    shape: tuple[int, ...] | None
    dtype: jnp.dtype | None


class AgentLayout(NamedTuple):
    """The agents of an environment and their order; static and hashable.

    Attributes:
        agents: names of the agents, in the order of every `[A]` array.
        groups: groups of agents whose values are stacked.
        simultaneous: whether every agent that has not ended acts at every step.
    """

    agents: tuple[str, ...]
    groups: tuple[AgentGroup, ...]
    simultaneous: bool


class AgentInfo(struct.PyTreeNode, kw_only=True):
    """The values of each agent at a step, `[T, B, A]` in a trajectory.

    Attributes:
        reward: float32, reward of the agent at this step.
        agent_return: float32, sum of the agent's rewards in the episode so far.
        packed: uint32, packed count and flags, read by the properties.
        layout: the agents and their groups.
    """

    reward: jax.Array  # [T, B, A]
    agent_return: jax.Array  # [T, B, A]
    packed: jax.Array  # [T, B, A]
    layout: AgentLayout = struct.field(pytree_node=False)

    @property
    def agent_length(self) -> jax.Array:
        """`[T, B, A]` int32, number of the agent's actions in the episode so far.

        The count saturates at 2^24 - 1.
        """
        return read_length(self.packed)

    @property
    def acted(self) -> jax.Array:
        """`[T, B, A]` bool, the agent acted at this step."""
        return read_flag(self.packed, Flag.ACTED)

    @property
    def waiting(self) -> jax.Array:
        """`[T, B, A]` bool, the agent's last action has no result yet.

        The agent does not act next and has not ended, so its observation is not valid.
        """
        return read_flag(self.packed, Flag.WAITING)

    @property
    def terminated(self) -> jax.Array:
        """`[T, B, A]` bool, the task of the agent ended at this step."""
        return read_flag(self.packed, Flag.TERMINATED)

    @property
    def truncated(self) -> jax.Array:
        """`[T, B, A]` bool, the agent was truncated individually at this step."""
        return read_flag(self.packed, Flag.TRUNCATED)

    @property
    def unassigned_reward(self) -> jax.Array:
        """`[T, B, A]` float32, reward that belongs to no action of the agent, else 0.

        Such rewards occur before the agent's first action and after its end.
        """
        return jnp.where(read_flag(self.packed, Flag.ANSWERS), 0.0, self.reward)


class MultiAgentInfo(struct.PyTreeNode):
    """The `info` of a multi-agent step in the lanes of `vectorize`.

    Attributes:
        agents: the values of each agent.
        env: the `info` of the environment.
    """

    agents: AgentInfo
    env: ArrayTree


def update_agents(
    layout: AgentLayout,
    packed: Any,
    agent_return: Any,
    *,
    reward: Any,
    terminated: Any,
    truncated: Any,
    acting: Any,
) -> tuple[AgentInfo, dict[Flag, Any]]:
    """Updates the values of each agent after a step, with jax or NumPy arrays.

    Args:
        layout: the agents and their groups.
        packed: `[..., A]` uint32, the words before the step, as in `AgentInfo`.
        agent_return: `[..., A]` float32, the returns before the step.
        reward: `[..., A]` float32, rewards of the step.
        terminated: `[..., A]` bool, as in `MultiAgentStep`.
        truncated: `[..., A]` bool, as in `MultiAgentStep`.
        acting: `[..., A]` bool, as in `MultiAgentStep`.

    Returns:
        The values of each agent after the step, and their flags, `[..., A]` bool.
    """
    acted = read_flag(packed, Flag.ACTS_NEXT)
    has_terminated = read_flag(packed, Flag.HAS_TERMINATED)
    was_truncated = read_flag(packed, Flag.WAS_TRUNCATED)
    # Count an ending once: adapters may repeat the flags of agents that have ended.
    was_active = ~(has_terminated | was_truncated)
    terminated, truncated = terminated & was_active, truncated & was_active
    is_active = was_active & ~(terminated | truncated)
    acts_next = is_active if layout.simultaneous else acting & is_active
    # In a turn-based game an agent is rewarded for a move while other agents act.
    answers = acted | read_flag(packed, Flag.WAITING)
    flags = {
        Flag.ACTS_NEXT: acts_next,
        Flag.WAITING: answers & is_active & ~acts_next,
        Flag.HAS_TERMINATED: has_terminated | terminated,
        Flag.WAS_TRUNCATED: was_truncated | truncated,
        Flag.ACTED: acted,
        Flag.TERMINATED: terminated,
        Flag.TRUNCATED: truncated,
        Flag.ANSWERS: answers,
    }
    info = AgentInfo(
        reward=reward,
        # Agents also receive rewards before their first action and after their end.
        agent_return=agent_return + reward,
        packed=pack_status(read_length(packed) + acted.astype(jnp.int32), flags),
        layout=layout,
    )
    return info, flags


def pack_status(length: Any, flags: dict[Flag, Any]) -> Any:
    """Packs a 24-bit count and the flags into one word, with jax or NumPy arrays.

    On XLA:CPU, a step is faster if it writes fewer arrays.
    """
    # The count occupies the bits above the flags, so one shift reads it.
    word = length.clip(max=_MAX_ACTIONS).astype(jnp.uint32) << len(Flag)
    for flag, value in flags.items():
        word |= value.astype(jnp.uint32) << int(flag)
    return word


def read_flag(packed: jax.Array, flag: Flag) -> jax.Array:
    """Reads a flag as bool from the words of `pack_status`."""
    return (packed & (1 << int(flag))) != 0


def read_length(packed: jax.Array) -> jax.Array:
    """Reads the count as int32 from the words of `pack_status`."""
    return (packed >> len(Flag)).astype(jnp.int32)


def group_agents(
    observation_spaces: Mapping[str, AnySpace], action_spaces: Mapping[str, AnySpace]
) -> dict[str, tuple[str, ...]]:
    """Groups agents with equal spaces and names the groups.

    A single group is named "agents". Several groups are named after their agents
    without the numbers ("adversary" for "adversary_0" and "adversary_1"), or after the
    first agent of each group if these names are ambiguous.

    Args:
        observation_spaces: space of each agent's observation, by agent.
        action_spaces: space of each agent's action, by agent.
    """
    groups: dict[Any, list[str]] = {}
    for agent, space in observation_spaces.items():
        pair = as_space(space, agent), as_space(action_spaces[agent], agent)
        groups.setdefault(pair, []).append(agent)
    members = [tuple(names) for names in groups.values()]
    if len(members) == 1:
        return {"agents": members[0]}
    # Name groups after their agents without numbers, if these names are unique.
    stems = [{name.rstrip("0123456789_") for name in names} for names in members]
    prefixes = [stem.pop() if len(stem) == 1 else "" for stem in stems]
    is_clear = len(set(prefixes)) == len(prefixes) and not {"", ACTING} & set(prefixes)
    names = prefixes if is_clear else [x[0] for x in members]
    return dict(zip(names, members, strict=True))


def has_agents(env: Any) -> bool:
    """Returns whether an environment has the multi-agent interface."""
    return hasattr(env, "agents") and hasattr(env, "groups")


def layout_of(env: Any) -> AgentLayout:
    """Returns the agents of an environment and their groups.

    Args:
        env: a `MultiAgentEnv`, or a `VectorEnv` that `vectorize` created from one; it
            may be wrapped.

    Raises:
        ValueError: if `env` has no agents, or if the groups do not match the agents.
    """
    # Wrappers and lanes contain the `_Joint` environment, whose layout `vectorize` has
    # already validated.
    inner = env
    while inner is not None:
        layout = getattr(inner, "layout", None)
        if isinstance(layout, AgentLayout):
            return layout
        inner = wrapped_env(inner)
    # `has_agents` does not read the spaces: an adapter may compute them and fail if the
    # groups are wrong.
    if not has_agents(env):
        raise ValueError(
            "`env` must have several agents, for example a `MultiAgentEnv` or a result "
            f"of `rollout.envs.vectorize` for one, got {type(env).__name__}."
        )
    return _make_layout(env)


def stacked_spaces(
    layout: AgentLayout, spaces: Mapping[str, AnySpace], *, acting: bool = False
) -> Dict:
    """Returns the space of all agents, stacked by group.

    Args:
        layout: the agents and their groups.
        spaces: space of one agent, by group.
        acting: whether to add the entry "acting", `[A]` bool.
    """
    stacked: dict[str, AnySpace] = {
        name: Repeated(as_space(spaces[name], name), len(members))
        for name, members, *_ in layout.groups
    }
    if acting:
        stacked[ACTING] = Repeated(_FLAG, len(layout.agents))
    return Dict(stacked)


def _make_layout(env: MultiAgentEnv) -> AgentLayout:
    """Validates agents, groups and spaces, and returns the layout."""
    agents, groups = tuple(env.agents), {x: tuple(y) for x, y in env.groups.items()}
    members = [agent for group in groups.values() for agent in group]
    is_partition = len(set(agents)) == len(agents) and sorted(members) == sorted(agents)
    if not agents or not is_partition or not all(groups.values()):
        raise ValueError(
            "`env.groups` must contain every agent in exactly one group and no empty "
            f"group, got {groups} for the agents {agents}."
        )
    for name in ("observation_spaces", "action_spaces"):
        if set(getattr(env, name)) != set(groups):
            raise ValueError(
                f"`env.{name}` must have the groups {', '.join(groups)}, got "
                f"{', '.join(getattr(env, name))}."
            )
    if ACTING in groups:
        raise ValueError(
            f'`env.groups` must not contain the name "{ACTING}", which is reserved for '
            "an entry of `obs`. Rename the group."
        )
    layouts = []
    for group, names in groups.items():
        space = as_space(env.action_spaces[group], group)
        dtype = None if space.dtype is None else jnp.dtype(space.dtype)
        positions = tuple(map(agents.index, names))
        layouts.append(AgentGroup(group, positions, space.shape, dtype))
    simultaneous = bool(getattr(env, "simultaneous", False))
    return AgentLayout(agents=agents, groups=tuple(layouts), simultaneous=simultaneous)
