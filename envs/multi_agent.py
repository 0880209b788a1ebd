"""The contract `MultiAgentEnv`, for several agents in one environment, and its types.

A `MultiAgentEnv` is one environment, a pure function of its state, in which some of its
agents act at every step: all that have not ended (simultaneous), one after the other
(turn-based), or any others. `vectorize` makes it a `VectorEnv`, whose `info` has
the values of single agents.
"""

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree

ACTING = "acting"  # the entry of `obs` with the agents that must act

_MOST_ACTIONS = 2**24 - 1


class Flag(enum.IntEnum):
    """Facts about an agent after a step: bits of a word."""

    ACTS_NEXT = 0
    WAITING = 1  # for the answer to an action
    HAS_TERMINATED = 2
    WAS_TRUNCATED = 3
    ACTED = 4  # this flag and the next three are about this step
    TERMINATED = 5
    TRUNCATED = 6
    ANSWERS = 7  # an action of the agent


class MultiAgentStep(struct.PyTreeNode, kw_only=True):
    """One step of a `MultiAgentEnv` of `A` agents.

    Attributes:
        state: the next environment state, not reset.
        obs: `{group: [A_g, ...]}`; an agent's observation is valid if it acts next or
            ended with this step, and meaningless otherwise.
        acting: `[A]` bool, the agents that must act next; at the end for all, those
            whose observation is valid. If `simultaneous`, it is not read.
        reward: `[A]` float32, also of agents that did not act.
        terminated: `[A]` bool, the agent's own task ended here, for good.
        truncated: `[A]` bool, the agent was cut from outside.
        episode_terminated: `()` bool, the task of all ended here.
        episode_truncated: `()` bool, the episode was cut from outside.
        info: any pytree of arrays, `{}` if there is none.
    """

    state: ArrayTree
    obs: dict[str, ArrayTree]  # {group: [A_g, ...]}
    acting: jax.Array  # [A]
    reward: jax.Array  # [A]
    terminated: jax.Array  # [A]
    truncated: jax.Array  # [A]
    episode_terminated: Any  # (), an array or a bool of Python
    episode_truncated: Any  # (), an array or a bool of Python
    info: ArrayTree = struct.field(default_factory=dict)


class MultiAgentEnv(Protocol):
    """ONE environment of `A` agents: pure, and it never resets itself.

    An implementation is a pytree whose leaves are the environment's parameters. It may
    have a class attribute `simultaneous`, True if every agent that has not ended acts
    at every step: then no action waits for its answer, and per-agent transitions cost
    no extra memory. It may have `at_episode`, as an `Env`.
    """

    @property
    def agents(self) -> tuple[str, ...]:
        """Every agent that can take part, in a fixed order."""
        ...

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Agents with equal spaces, stacked in one array: name to agents.

        Every agent is in one group.
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
        """Starts an episode: `(state, obs, acting)`, as in `MultiAgentStep`."""
        ...

    def step(
        self, key: chex.PRNGKey, state: ArrayTree, action: dict[str, jax.Array]
    ) -> MultiAgentStep:
        """Takes one step. `action` is `{group: [A_g, ...]}`, read for acting agents."""
        ...


class AgentGroup(NamedTuple):
    """Agents with equal spaces.

    Attributes:
        name: of the group.
        members: `A_g` positions in `AgentLayout.agents`.
        shape: of the action of one agent; None if that has several parts.
        dtype: of the action of one agent; None if that has several parts.
    """

    name: str
    members: tuple[int, ...]
    shape: tuple[int, ...] | None
    dtype: jnp.dtype | None


class AgentLayout(NamedTuple):
    """The agents of an environment and their order; static, hashable.

    Attributes:
        agents: the names, in the order of every `[A]` array.
        groups: the groups that they are stacked in.
        simultaneous: whether every agent that has not ended acts at every step.
    """

    agents: tuple[str, ...]
    groups: tuple[AgentGroup, ...]
    simultaneous: bool


class AgentInfo(struct.PyTreeNode, kw_only=True):
    """The values of single agents at a step, `[T, B, A]` in a trajectory.

    Attributes:
        reward: float32, the agent's own reward at this step.
        agent_return: float32, sum of its rewards in the episode so far.
        packed: uint32, count and flags that the properties read.
        layout: the agents.
    """

    reward: jax.Array  # [T, B, A]
    agent_return: jax.Array  # [T, B, A]
    packed: jax.Array  # [T, B, A]
    layout: AgentLayout = struct.field(pytree_node=False)

    @property
    def agent_length(self) -> jax.Array:
        """`[T, B, A]` int32, actions that the agent has taken in the episode so far.

        The count stops at 2^24 - 1.
        """
        return read_length(self.packed)

    @property
    def acted(self) -> jax.Array:
        """`[T, B, A]` bool, the agent acted at this step."""
        return read_flag(self.packed, Flag.ACTED)

    @property
    def waiting(self) -> jax.Array:
        """`[T, B, A]` bool, its last action has no answer yet after this step.

        The agent neither acts next nor has ended, so it has no observation here.
        """
        return read_flag(self.packed, Flag.WAITING)

    @property
    def terminated(self) -> jax.Array:
        """`[T, B, A]` bool, its own task ended at this step."""
        return read_flag(self.packed, Flag.TERMINATED)

    @property
    def truncated(self) -> jax.Array:
        """`[T, B, A]` bool, it alone was cut from outside at this step."""
        return read_flag(self.packed, Flag.TRUNCATED)

    @property
    def unassigned_reward(self) -> jax.Array:
        """`[T, B, A]` float32, the reward if it answers no action of the agent, else 0.

        That is so before the agent's first action, and after its end.
        """
        return jnp.where(read_flag(self.packed, Flag.ANSWERS), 0.0, self.reward)


class MultiAgentInfo(struct.PyTreeNode):
    """The `info` of a step of several agents in the lanes of `vectorize`.

    Attributes:
        agents: the values of single agents.
        env: the environment's own `info`.
    """

    agents: AgentInfo
    env: ArrayTree


def pack_status(length: jax.Array, flags: dict[Flag, jax.Array]) -> jax.Array:
    """Packs a count of 24 bits and the flags in one word.

    XLA:CPU pays for every array that a step or a reset writes.
    """
    # The count lies above the flags, so that one shift reads it.
    word = jnp.minimum(length, _MOST_ACTIONS).astype(jnp.uint32) << len(Flag)
    for flag, value in flags.items():
        word |= value.astype(jnp.uint32) << int(flag)
    return word


def read_flag(packed: jax.Array, flag: Flag) -> jax.Array:
    """Reads a flag, bool, from words of `pack_status`."""
    return (packed & (1 << int(flag))) != 0


def read_length(packed: jax.Array) -> jax.Array:
    """Reads the count, int32, from words of `pack_status`."""
    return (packed >> len(Flag)).astype(jnp.int32)


def has_agents(env: Any) -> bool:
    """Returns whether an environment is one of several agents."""
    return hasattr(env, "agents") and hasattr(env, "groups")


def layout_of(env: Any) -> AgentLayout:
    """Returns the agents of an environment.

    Args:
        env: a `MultiAgentEnv`, or a result of `vectorize` of one, wrapped or not.

    Raises:
        ValueError: if it is neither, or if its groups contradict its agents.
    """
    # Wrappers and lanes hold the environment that `vectorize` joined, which was checked
    # there.
    inner = env
    while inner is not None:
        layout = getattr(inner, "layout", None)
        if isinstance(layout, AgentLayout):
            return layout
        inner = getattr(inner, "env", None)
    # Not the spaces: an adapter may compute them, and fail if groups are wrong.
    if not has_agents(env):
        raise ValueError(
            "`env` must have several agents, as a `MultiAgentEnv` or the lanes of one "
            f"by `rollout.envs.vectorize`, got {type(env).__name__}."
        )
    return _make_layout(env)


def _make_layout(env: MultiAgentEnv) -> AgentLayout:
    """Checks agents, groups and spaces, and returns their layout."""
    agents, groups = tuple(env.agents), {x: tuple(y) for x, y in env.groups.items()}
    members = [agent for group in groups.values() for agent in group]
    is_partition = len(set(agents)) == len(agents) and sorted(members) == sorted(agents)
    if not agents or not is_partition or not all(groups.values()):
        raise ValueError(
            "`env.groups` must have every agent in one group, and agents in each, got "
            f"{groups} of the agents {agents}."
        )
    for name in ("observation_spaces", "action_spaces"):
        if set(getattr(env, name)) != set(groups):
            raise ValueError(
                f"`env.{name}` must have the groups {', '.join(groups)}, got "
                f"{', '.join(getattr(env, name))}."
            )
    if ACTING in groups:
        raise ValueError(
            f'`env.groups` must have other names than "{ACTING}", which is an entry of '
            "`obs`."
        )
    made = []
    for group, names in groups.items():
        space = as_space(env.action_spaces[group], group)
        dtype = None if space.dtype is None else jnp.dtype(space.dtype)
        at = tuple(map(agents.index, names))
        made.append(AgentGroup(group, at, space.shape, dtype))
    simultaneous = bool(getattr(env, "simultaneous", False))
    return AgentLayout(agents=agents, groups=tuple(made), simultaneous=simultaneous)
