"""`Wrapper` and `VectorWrapper`: the base classes of all wrappers.

A wrapper is an `Env` that contains an `Env`: it is pure and a pytree. A wrapper changes
observations, actions, rewards or endings, but not the contract: `step` returns the true
successor, and termination and truncation are separate flags. Wrappers apply to a single
environment, before `vectorize`, and can be nested in any order:

    env = TimeLimit(ActionRepeat(make("Pendulum-v1"), 4), 50)

Some wrappers also support a `MultiAgentEnv`, before `vectorize`; all other wrappers
raise an error. A wrapper that changes observations subclasses `ObsWrapper` and handles
a single agent.

Counts and functions are static: a new value or a new lambda causes a new trace.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout.base import checks
from rollout.envs.multi_agent import has_agents
from rollout.envs.spaces import as_space
from rollout.envs.types import (
    AnySpace,
    ArrayTree,
    EnvStep,
    LaneIndex,
    Lanes,
    VectorEnv,
    at_episode,
    check_vector_env,
    strong,
)


class WrapperState(struct.PyTreeNode, kw_only=True):
    """State of a stateful wrapper.

    Attributes:
        env_state: state of the wrapped environment.
        memory: state of the wrapper, any pytree of arrays.
    """

    env_state: ArrayTree
    memory: ArrayTree


class BaseWrapper(struct.PyTreeNode):
    """Base class of all wrappers. It delegates spaces and agents to the environment.

    A subclass that supports several agents sets `for_agents` to "all", or to
    "simultaneous" if all agents must act at every step.
    """

    env: Any

    for_agents = ""

    def _check_agents(self) -> None:
        is_allowed = self.simultaneous or self.for_agents == "all"
        if has_agents(self.env) and not (self.for_agents and is_allowed):
            agents = (
                "whose agents act at every step" if self.for_agents else "of one agent"
            )
            raise ValueError(
                f"`env` must be an environment {agents} for `{type(self).__name__}`, "
                f"got {type(self.env).__name__} with {len(self.env.agents)} agents, "
                f"simultaneous={self.simultaneous}."
            )

    @property
    def _one(self) -> Any:
        """An environment with the spaces of a single wrapped environment."""
        return self.env

    @property
    def observation_space(self) -> AnySpace:
        """Space of one environment's `obs`."""
        return as_space(self._one.observation_space, "env.observation_space")

    @property
    def action_space(self) -> AnySpace:
        """Space of one environment's `action`."""
        return as_space(self._one.action_space, "env.action_space")

    # The following properties require an environment with several agents.

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of all agents."""
        return self.env.agents

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the agents in each group."""
        return self.env.groups

    @property
    def simultaneous(self) -> bool:
        """Whether every agent that has not ended acts at every step."""
        return getattr(self.env, "simultaneous", False)

    @property
    def observation_spaces(self) -> Mapping[str, AnySpace]:
        """Space of one agent's observation, by group."""
        return {x: as_space(y) for x, y in self._one.observation_spaces.items()}

    @property
    def action_spaces(self) -> Mapping[str, AnySpace]:
        """Space of one agent's action, by group."""
        return {x: as_space(y) for x, y in self._one.action_spaces.items()}


class Wrapper(BaseWrapper):
    """Base class of wrappers of a single environment, for custom wrappers.

    A subclass overrides `reset`, `step` or a space. All other members delegate to
    `env`, including `at_episode` and the renderer. A subclass is a pytree: options are
    fields, whose leaves may vary between lanes. `reset` and `step` of a stateful
    wrapper return a `WrapperState`. Options are validated in `_check`.

    Attributes:
        env: the wrapped environment.
    """

    env: Any  # an `Env`, or a `MultiAgentEnv` if `for_agents`

    def __post_init__(self) -> None:
        # jax builds pytrees with placeholders, which have no `step`.
        if not hasattr(self.env, "step"):
            return
        checks.check_single_env(self.env)
        self._check_agents()
        self._check()

    def _check(self) -> None:
        """Raises `ValueError` if an option is invalid.

        jax also calls it with leaves other than the user's values: with tracers, or
        with zeros in a `vmap` without mapped arguments. Validate values only if
        `checks.is_concrete` is True, and accept zeros.
        """

    def at_episode(self, number: jax.Array) -> Self:
        """Passes the episode number to the wrapped environment; see `Env`."""
        # The number may be a tracer, so it becomes a leaf of the wrapped environment.
        return self.replace(env=at_episode(self.env, number))

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode; returns `(state, obs)`."""
        return self.env.reset(key)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step; returns the true successor `obs` and `state`."""
        return self.env.step(key, state, action)


class AgentStep(NamedTuple):
    """The agent whose observation an `ObsWrapper` changes.

    Attributes:
        env: the wrapped environment.
        group: group of the agent; None in an environment with a single agent.
        number: `()` int32, position of the agent in `env.agents`.
        action: action of the agent in the last step; None at the start of an episode.
        reward: `()` float32, reward of the agent in the last step; None at the start.
        state: state of `env`.
        info: info of the last step; None at the start of an episode.
    """

    env: Any
    group: str | None = None
    number: jax.Array | int = 0
    action: ArrayTree = None
    reward: Any = None
    state: ArrayTree = None
    info: ArrayTree = None

    @property
    def observation_space(self) -> AnySpace:
        """Space of the agent's observation before the wrapper."""
        env, group = self.env, self.group
        space = env.observation_spaces[group] if group else env.observation_space
        return as_space(space, "env.observation_space")

    @property
    def action_space(self) -> AnySpace:
        """Space of the agent's action."""
        env, group = self.env, self.group
        space = env.action_spaces[group] if group else env.action_space
        return as_space(space, "env.action_space")


class ObsWrapper(Wrapper):
    """Base class of wrappers that change observations, written for a single agent.

    For several agents `show` is called once per group and mapped over the members with
    `jax.vmap`.
    """

    def space(self, agent: AgentStep) -> AnySpace:
        """Returns the space of the agent's new observation."""
        raise NotImplementedError

    def show(self, agent: AgentStep, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Returns the agent's new observation and the new memory.

        Args:
            agent: the agent, with its last action and reward.
            obs: observation of the agent before the wrapper.
            memory: memory returned by the previous call in the episode; None at the
                start of an episode.
        """
        raise NotImplementedError

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`."""
        return self.space(AgentStep(self.env))

    @property
    def observation_spaces(self) -> Mapping[str, AnySpace]:
        """Space of one agent's `obs`, by group."""
        return {group: self.space(AgentStep(self.env, group)) for group in self.groups}

    def reset(self, key: chex.PRNGKey) -> tuple:
        """Starts an episode; returns `(state, obs)`, and `acting` if multi-agent."""
        state, obs, *acting = self.env.reset(key)
        obs, memory = self._show_each(AgentStep(self.env, state=state), obs, None)
        return WrapperState(env_state=state, memory=memory), obs, *acting

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> Any:
        """Takes one step."""
        result = self.env.step(key, state.env_state, action)
        reward = jnp.asarray(result.reward, jnp.float32)
        agent = AgentStep(self.env, None, 0, action, reward, result.state, result.info)
        obs, memory = self._show_each(agent, result.obs, state.memory)
        state = WrapperState(env_state=result.state, memory=memory)
        return result.replace(state=state, obs=obs)

    def _show_each(self, agent: AgentStep, obs: Any, memory: Any) -> tuple[Any, Any]:
        """Calls `show` for each agent; `agent` has the stacked actions and rewards."""
        if not has_agents(self.env):
            return self.show(agent, obs, memory)
        # Groups have different spaces, so each group has a separate `vmap`. The reward
        # is one array `[A]` of all agents, so gather the members of the group.
        results, memories = {}, {}
        for group, members in self.groups.items():

            def show(obs: Any, memory: Any, attrs: Any, group: str = group) -> tuple:
                return self.show(agent._replace(group=group, **attrs), obs, memory)

            number = jnp.asarray([self.agents.index(x) for x in members], jnp.int32)
            attrs: dict[str, Any] = {"number": number}
            if memory is not None:
                attrs |= {"action": agent.action[group], "reward": agent.reward[number]}
            # Memory is None at the start of an episode, and None has no mapped axis.
            result = jax.vmap(show)(obs[group], memory and memory[group], attrs)
            results[group], memories[group] = result
        return results, memories


class VectorWrapper(BaseWrapper, VectorEnv):
    """Base class of wrappers of a `VectorEnv`. The default methods delegate."""

    env: VectorEnv

    for_agents = "all"

    def __post_init__(self) -> None:
        check_vector_env(self.env)
        self._check_agents()

    @property
    def num_envs(self) -> int:
        """B, the number of lanes."""
        return self.env.num_envs

    @property
    def sharding(self) -> Any:
        """Sharding of the lanes from `rollout.shard`; None if they are not sharded."""
        return self.env.sharding

    @property
    def learns(self) -> bool:
        """Whether observations depend on running (not fixed) statistics."""
        return self.env.learns

    def freeze(self, env_state: ArrayTree) -> Self:
        """Fixes the running statistics of the environments, for evaluation.

        Args:
            env_state: `carry.env_state` of the same wrappers, with any `num_envs`. Only
                its statistics are read.

        Returns:
            The same environments with the statistics of `env_state`, which are no
            longer updated, also after a `reset`. The returned environments accept
            carries of the original environments.
        """
        # A stateless wrapper has the state of the wrapped environment.
        return self.replace(env=self.env.freeze(env_state))

    def normalize_obs(self, obs: ArrayTree) -> ArrayTree:
        """Normalizes raw observations; see `NormalizeObs.normalize_obs`."""
        return self.env.normalize_obs(obs)

    def reset(self, keys: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode in every lane; returns `(state, obs)`."""
        return self.env.reset(keys)

    def step(self, keys: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step in every lane, without auto-reset."""
        return self.env.step(keys, state, action)

    def reset_done(
        self, key_fn: Callable[[LaneIndex], chex.PRNGKey], done: jax.Array, lanes: Lanes
    ) -> Lanes:
        """Starts new episodes in the done lanes."""
        return self.env.reset_done(key_fn, done, lanes)


def cast_step(result: EnvStep) -> EnvStep:
    """Casts the reward to float32 and the flags to bool, and drops weak types."""
    if result.raw_reward is not None:
        raise ValueError(
            "`env.step` must leave `raw_reward` as None, got a value. Only wrappers of "
            "a `VectorEnv` may set it."
        )
    return EnvStep(
        state=strong(result.state),
        obs=strong(result.obs),
        reward=checks.check_real("reward", result.reward).astype(jnp.float32),
        terminated=checks.check_flag("terminated", result.terminated),
        truncated=checks.check_flag("truncated", result.truncated),
        info=strong(result.info),
    )


def with_names(info: ArrayTree, added: dict[str, ArrayTree]) -> dict[str, ArrayTree]:
    """Adds entries to the `info` of a step, a dict without entries of these names."""
    if not isinstance(info, dict) or added.keys() & info.keys():
        got = sorted(info) if isinstance(info, dict) else type(info).__name__
        raise ValueError(
            f"`info` must be a dict without the names {', '.join(added)}, got {got}."
        )
    return {**added, **info}
