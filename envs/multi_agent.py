"""Several agents in one environment: the contract, and lanes of such environments.

A `MultiAgentEnv` is one environment, a pure function of its state, in which some of its
agents act at every step: all that are left (simultaneous), one after the other
(turn-based), or any others. `vectorize_agents` makes it a `VectorEnv` like any other,
so that steps, episodes, streams, checkpoints and devices work at once. What belongs to
single agents stands in `info.agents`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self

import chex
import jax
import jax.numpy as jnp
from flax import struct

from envs import checks
from envs.spaces import Box, Dict, Repeated
from envs.types import EnvStep, Lanes, Space, VectorEnv
from envs.vectorize import vectorize
from envs.wrappers.base import VectorWrapper

ACTING = "acting"  # the entry of `obs` that says who must act

_FLAG = Box(0, 1, (), jnp.dtype(bool))
_NUM_FLAGS = 8
_MOST_ACTIONS = 2**24 - 1
# What is known of an agent after a step: four flags for the next step,
_ACTS_NEXT, _WAITING, _HAS_TERMINATED, _WAS_TRUNCATED = range(4)
# and four of this one.
_ACTED, _TERMINATED, _TRUNCATED, _ANSWERS = range(4, 8)


@struct.dataclass(kw_only=True)
class MultiAgentStep:
    """What one step of a `MultiAgentEnv` returns, of `A` agents.

    Attributes:
        state: the next environment state, not reset.
        obs: `{group: [A_g, ...]}`; an agent's is valid where it acts next or ended with
            this step, and void elsewhere.
        acting: `[A]` bool, who must act next, and whose observation is valid at the end
            for all. Where everyone left acts at every step, it is not read.
        reward: `[A]` float32, also to agents that did not act.
        terminated: `[A]` bool, the agent's own task ended here, for good.
        truncated: `[A]` bool, it was cut from outside.
        episode_terminated: `()` bool, the task of all ended here.
        episode_truncated: `()` bool, it was cut from outside.
        info: any pytree of arrays, `{}` if there is none.
    """

    state: chex.ArrayTree
    obs: dict[str, chex.ArrayTree]  # {group: [A_g, ...]}
    acting: jax.Array  # [A]
    reward: jax.Array  # [A]
    terminated: jax.Array  # [A]
    truncated: jax.Array  # [A]
    episode_terminated: jax.Array  # ()
    episode_truncated: jax.Array  # ()
    info: chex.ArrayTree = struct.field(default_factory=dict)


class MultiAgentEnv(Protocol):
    """ONE environment of `A` agents: pure, and it never resets itself.

    An implementation is a pytree whose leaves are the environment's parameters. It may
    have a class attribute `simultaneous`, True where every agent that has not ended
    acts at every step: then nothing ever waits for an answer, and what agents
    experienced costs no memory of its own. It may have `at_episode`, as an `Env`.

    Attributes:
        agents: every agent that can ever be there, in a fixed order.
        groups: agents with equal spaces, stacked in one array: name to agents. Every
            agent is in one group.
        observation_spaces: of one agent, by group.
        action_spaces: of one agent, by group.
    """

    agents: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    observation_spaces: Mapping[str, Space]
    action_spaces: Mapping[str, Space]

    def reset(
        self, key: chex.PRNGKey
    ) -> tuple[chex.ArrayTree, dict[str, chex.ArrayTree], jax.Array]:
        """Starts an episode: `(state, obs, acting)`, as in `MultiAgentStep`."""

    def step(
        self, key: chex.PRNGKey, state: chex.ArrayTree, action: dict[str, jax.Array]
    ) -> MultiAgentStep:
        """Takes one step. `action` is `{group: [A_g, ...]}`, void where nobody acts."""


class AgentGroup(NamedTuple):
    """Agents with equal spaces.

    Attributes:
        name: of the group.
        members: `A_g` positions in `AgentLayout.agents`.
        shape: of the action of one agent; None if that has several parts.
        dtype: of the action, likewise.
    """

    name: str
    members: tuple[int, ...]
    shape: tuple[int, ...] | None
    dtype: jnp.dtype | None


class AgentLayout(NamedTuple):
    """Who is in an environment and where; static, hashable.

    Attributes:
        agents: the names, in the order of every `[A]` array.
        groups: the groups they are stacked in.
        simultaneous: whether every agent that has not ended acts at every step.
    """

    agents: tuple[str, ...]
    groups: tuple[AgentGroup, ...]
    simultaneous: bool


class NumEnvs(int):
    """A number of lanes that also says who is in each: `policy.init` is given it."""

    agents: AgentLayout

    def __new__(cls, num_envs: int, agents: AgentLayout) -> Self:
        """So many lanes of these agents."""
        self = super().__new__(cls, num_envs)
        self.agents = agents
        return self


@struct.dataclass(kw_only=True)
class AgentInfo:
    """The part of a step that belongs to single agents, `[T, B, A]` in a trajectory.

    Attributes:
        reward: float32, the agent's own reward at this step.
        agent_return: float32, sum of its rewards in the episode so far.
        packed: uint32, which the properties are read from.
        layout: the agents.
    """

    reward: jax.Array  # [T, B, A]
    agent_return: jax.Array  # [T, B, A]
    packed: jax.Array  # [T, B, A]
    layout: AgentLayout = struct.field(pytree_node=False)

    @property
    def agent_length(self) -> jax.Array:
        """`[T, B, A]` int32, actions that the agent has taken in the episode so far.

        Beyond 2^24 - 1 it does not count on.
        """
        return _length(self.packed)

    @property
    def acted(self) -> jax.Array:
        """`[T, B, A]` bool, the agent acted at this step."""
        return _flag(self.packed, _ACTED)

    @property
    def waiting(self) -> jax.Array:
        """`[T, B, A]` bool, an action of its is still to be answered after this step.

        It neither acts next nor has ended, so it has no observation here.
        """
        return _flag(self.packed, _WAITING)

    @property
    def terminated(self) -> jax.Array:
        """`[T, B, A]` bool, its own task ended at this step."""
        return _flag(self.packed, _TERMINATED)

    @property
    def truncated(self) -> jax.Array:
        """`[T, B, A]` bool, it alone was cut from outside at this step."""
        return _flag(self.packed, _TRUNCATED)

    @property
    def unassigned_reward(self) -> jax.Array:
        """`[T, B, A]` float32, the reward, where it answers no action of the agent.

        So it is before its first action, and after its end.
        """
        return jnp.where(_flag(self.packed, _ANSWERS), 0.0, self.reward)


@struct.dataclass
class MultiAgentInfo:
    """The `info` of a step of `vectorize_agents`.

    Attributes:
        agents: what belongs to single agents.
        env: the environment's own `info`.
    """

    agents: AgentInfo
    env: chex.ArrayTree


def vectorize_agents(
    env: MultiAgentEnv, num_envs: int, *, auto_reset: str = "compact"
) -> VectorEnv:
    """Puts `num_envs` copies of an environment of several agents side by side.

    Args:
        env: the environment of `A` agents; its parameters are shared by all lanes.
        num_envs: B, at least 1.
        auto_reset: as in `vectorize`.

    Returns:
        A `VectorEnv` with the `agents`, `groups`, `observation_spaces` and
        `action_spaces` of `env`. Its `obs` is `{group: [B, A_g, ...]}`, and "acting",
        `[B, A]` bool, who must act; its action `{group: [B, A_g, ...]}`. The reward is
        the sum over the agents, in float32, the flags are those of the episode, and
        `info` is a `MultiAgentInfo`. The episode also ends when every agent has ended:
        it is terminated if all of them terminated, else truncated.

    Raises:
        ValueError: if an agent is in two groups or none, or a group without spaces, or
            called "acting"; as `vectorize` does. While tracing: if an observation or an
            action is not of the space of its group, or what is per agent not `[A]`.
    """
    checks.single(env)
    joint = _Joint(env=env, layout=_layout(env))
    return _VectorizedAgents(vectorize(joint, num_envs, auto_reset=auto_reset))


@struct.dataclass
class _VectorizedAgents(VectorWrapper):
    """Lanes of environments of several agents."""

    @property
    def num_envs(self) -> int:
        return NumEnvs(self.env.num_envs, self._joint.layout)

    @property
    def agents(self) -> tuple[str, ...]:
        return self._joint.layout.agents

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return dict(self._joint.env.groups)

    @property
    def observation_spaces(self) -> dict[str, Space]:
        return dict(self._joint.env.observation_spaces)

    @property
    def action_spaces(self) -> dict[str, Space]:
        return dict(self._joint.env.action_spaces)

    def reset(self, keys: chex.PRNGKey) -> tuple[chex.ArrayTree, chex.ArrayTree]:
        return self.env.reset(keys)

    def step(
        self, keys: chex.PRNGKey, state: chex.ArrayTree, action: chex.ArrayTree
    ) -> EnvStep:
        return self.env.step(keys, state, action)

    def reset_done(
        self, key_fn: Callable[[jax.Array], chex.PRNGKey], done: jax.Array, lanes: Lanes
    ) -> Lanes:
        return self.env.reset_done(key_fn, done, lanes)

    @property
    def _joint(self) -> "_Joint":
        env = self.env
        while not isinstance(env, _Joint):  # it may be spread over devices
            env = env.env
        return env


@struct.dataclass(kw_only=True)
class _JointState:
    """State of one environment, and what is known of its `A` agents."""

    env_state: chex.ArrayTree
    agent_return: jax.Array  # [A] float32
    packed: jax.Array  # [A] uint32, as in `AgentInfo`


@struct.dataclass(kw_only=True)
class _Joint:
    """An `Env` in which all agents of one environment act together."""

    env: MultiAgentEnv
    layout: AgentLayout = struct.field(pytree_node=False)

    @property
    def observation_space(self) -> Space:
        spaces = self._stack(self.env.observation_spaces)
        return Dict({**spaces, ACTING: Repeated(_FLAG, len(self.layout.agents))})

    @property
    def action_space(self) -> Space:
        return Dict(self._stack(self.env.action_spaces))

    def at_episode(self, number: jax.Array) -> Self:
        if not hasattr(self.env, "at_episode"):
            return self
        return self.replace(env=self.env.at_episode(number))

    def reset(self, key: chex.PRNGKey) -> tuple[_JointState, dict[str, Any]]:
        result = self.env.reset(key)
        if type(result) is not tuple or len(result) != 3:
            raise ValueError(
                "`env.reset` must return (state, obs, acting), got "
                f"{checks.describe(result)}."
            )
        env_state, obs, acting = result
        shape = (len(self.layout.agents),)
        acting = self._each("acting", acting, bool)
        if self.layout.simultaneous:
            acting = jnp.ones(shape, bool)
        state = _JointState(
            env_state=env_state,
            agent_return=jnp.zeros(shape, jnp.float32),
            packed=_pack(jnp.zeros(shape, jnp.int32), {_ACTS_NEXT: acting}),
        )
        return state, self._observe(obs, acting)

    def step(
        self, key: chex.PRNGKey, state: _JointState, action: chex.ArrayTree
    ) -> EnvStep:
        self._check_stacked("action", action, self.env.action_spaces, has_dtype=True)
        result = self.env.step(key, state.env_state, action)
        if not isinstance(result, MultiAgentStep):
            raise ValueError(
                "`env.step` must return an `envs.MultiAgentStep`, got "
                f"{checks.describe(result)}."
            )
        reward = self._each("reward", result.reward, jnp.float32)
        acted, waiting, has_terminated, was_truncated = (
            _flag(state.packed, bit)
            for bit in (_ACTS_NEXT, _WAITING, _HAS_TERMINATED, _WAS_TRUNCATED)
        )
        is_left = ~(has_terminated | was_truncated)
        terminated = self._each("terminated", result.terminated, bool) & is_left
        truncated = self._each("truncated", result.truncated, bool) & is_left
        has_terminated |= terminated
        was_truncated |= truncated
        goes_on = ~(has_terminated | was_truncated)
        acting = self._each("acting", result.acting, bool) & goes_on
        if self.layout.simultaneous:
            acting = goes_on
        answers = acted | waiting  # what happens here answers an action
        agent_return = state.agent_return + reward
        flags = {
            _ACTS_NEXT: acting,
            _WAITING: answers & goes_on & ~acting,
            _HAS_TERMINATED: has_terminated,
            _WAS_TRUNCATED: was_truncated,
            _ACTED: acted,
            _TERMINATED: terminated,
            _TRUNCATED: truncated,
            _ANSWERS: answers,
        }
        packed = _pack(_length(state.packed) + acted.astype(jnp.int32), flags)
        is_over, all_terminated = ~jnp.any(goes_on), jnp.all(has_terminated)
        return EnvStep(
            state=_JointState(
                env_state=result.state, agent_return=agent_return, packed=packed
            ),
            obs=self._observe(result.obs, acting),
            reward=jnp.sum(reward),
            terminated=result.episode_terminated | (is_over & all_terminated),
            truncated=result.episode_truncated | (is_over & ~all_terminated),
            info=MultiAgentInfo(
                AgentInfo(
                    reward=reward,
                    agent_return=agent_return,
                    packed=packed,
                    layout=self.layout,
                ),
                result.info,
            ),
        )

    def _observe(self, obs: Any, acting: jax.Array) -> dict[str, chex.ArrayTree]:
        self._check_stacked("obs", obs, self.env.observation_spaces)
        return {**obs, ACTING: acting}

    def _stack(self, spaces: Mapping[str, Space]) -> dict[str, Space]:
        return {
            group.name: Repeated(spaces[group.name], len(group.members))
            for group in self.layout.groups
        }

    def _each(self, name: str, value: Any, dtype: Any) -> jax.Array:
        """Refuses what is not one number per agent."""
        num_agents = len(self.layout.agents)
        if jnp.shape(value) != (num_agents,):
            raise ValueError(
                f"`{name}` must be one per agent, shape ({num_agents},), got "
                f"{checks.describe(value)}."
            )
        return jnp.asarray(value, dtype)

    def _check_stacked(
        self,
        name: str,
        value: Any,
        spaces: Mapping[str, Space],
        *,
        has_dtype: bool = False,
    ) -> None:
        """Refuses what is not stacked by group, or not of the groups' spaces."""
        names = sorted(group.name for group in self.layout.groups)
        if not isinstance(value, Mapping) or sorted(value) != names:
            got = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(
                f"`{name}` must be a dict of the groups {', '.join(names)}, got {got}."
            )
        for group in self.layout.groups:
            space = Repeated(spaces[group.name], len(group.members))
            _check_of_space(name, group.name, value[group.name], space, has_dtype)


def _check_of_space(
    name: str, group: str, value: chex.ArrayTree, space: Space, has_dtype: bool
) -> None:
    leaves, dtype = jax.tree.leaves(value), space.dtype if has_dtype else None
    if space.shape is None:  # of several parts: the environment itself must say
        fits = all(jnp.shape(x)[:1] == (space.num,) for x in leaves)
    else:
        fits = [jnp.shape(x) for x in leaves] == [space.shape]
        fits &= dtype is None or jnp.result_type(leaves[0]) == dtype
    if not fits:
        what = f"shape {space.shape or (space.num, '...')}"
        raise ValueError(
            f"`{name}` of the group {group!r} must be of "
            f"{what if dtype is None else f'{jnp.dtype(dtype).name} and {what}'}, got "
            f"{', '.join(map(checks.describe, leaves))}."
        )


def _layout(env: MultiAgentEnv) -> AgentLayout:
    """Refuses what is no order of agents in groups; returns it."""
    agents, groups = tuple(env.agents), {x: tuple(y) for x, y in env.groups.items()}
    members = [agent for group in groups.values() for agent in group]
    if not agents or len(set(agents)) != len(agents):
        raise ValueError(f"`env.agents` must be names, each once, got {agents}.")
    for agent in {*agents, *members}:
        if members.count(agent) != 1 or agent not in agents:
            its = [group for group, names in groups.items() if agent in names]
            what = ", ".join(its) if agent in agents else "and not in `env.agents`"
            raise ValueError(
                f"`env.groups` must have every agent in one group, got {agent!r} in "
                f"{what or 'none'}."
            )
    for name in ("observation_spaces", "action_spaces"):
        if set(getattr(env, name)) != set(groups):
            raise ValueError(
                f"`env.{name}` must have the groups {', '.join(groups)}, got "
                f"{', '.join(getattr(env, name))}."
            )
    if ACTING in groups:
        raise ValueError(
            f'`env.groups` must not have one called "{ACTING}", which `obs` says who '
            "acts by."
        )
    return AgentLayout(
        agents=agents,
        groups=tuple(
            _group(group, tuple(map(agents.index, names)), env.action_spaces[group])
            for group, names in groups.items()
        ),
        simultaneous=bool(getattr(env, "simultaneous", False)),
    )


def _group(name: str, members: tuple[int, ...], action_space: Space) -> AgentGroup:
    shape = getattr(action_space, "shape", None)
    dtype = None if shape is None else jnp.dtype(action_space.dtype)
    return AgentGroup(name, members, shape, dtype)


def _pack(length: jax.Array, flags: dict[int, jax.Array]) -> jax.Array:
    """A count of 24 bits and eight flags in one word.

    XLA:CPU pays for every array that a step or a reset writes.
    """
    word = jnp.minimum(length, _MOST_ACTIONS).astype(jnp.uint32) << _NUM_FLAGS
    for bit, flag in flags.items():
        word |= flag.astype(jnp.uint32) << bit
    return word


def _flag(packed: jax.Array, bit: int) -> jax.Array:
    return (packed & (1 << bit)) != 0


def _length(packed: jax.Array) -> jax.Array:
    return (packed >> _NUM_FLAGS).astype(jnp.int32)
