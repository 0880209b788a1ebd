"""`Wrapper` and `VectorWrapper`: the base classes of all wrappers.

A wrapper is an `Env` around an `Env`, pure, and a pytree like it. It changes
observations, actions, rewards or endings, never the contract: `obs` and `state` of a
step are the true successor, and the two endings stay apart. Wrappers go around ONE
environment, before `vectorize`, and around each other in any order:

    env = TimeLimit(ActionRepeat(make("Pendulum-v1"), 4), 50)

Some also go around a `MultiAgentEnv`, before `vectorize`; others refuse it. One that
changes observations is an `ObsWrapper`, written for one agent.

Counts and functions are static: another value, or a new lambda, is traced again.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
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
    """State of a wrapper that remembers something.

    Attributes:
        env_state: state of the wrapped environment.
        memory: the wrapper's own state, any pytree of arrays.
    """

    env_state: ArrayTree
    memory: ArrayTree


class BaseWrapper(struct.PyTreeNode):
    """Base of all wrappers: has the spaces and the agents of the wrapped environment.

    A subclass that serves several agents sets `for_agents`: "all"; or "simultaneous" if
    they must act at every step.
    """

    env: Any

    for_agents = ""

    def _check_agents(self) -> None:
        acts = self.simultaneous or self.for_agents == "all"
        if has_agents(self.env) and not (self.for_agents and acts):
            kind = (
                "whose agents act at every step" if self.for_agents else "of one agent"
            )
            raise ValueError(
                f"`env` must be an environment {kind} for `{type(self).__name__}`, got "
                f"{type(self.env).__name__} with {len(self.env.agents)}, "
                f"simultaneous={self.simultaneous}."
            )

    @property
    def _one(self) -> Any:
        """An environment that has the spaces of the wrapped one."""
        return self.env

    @property
    def observation_space(self) -> AnySpace:
        """Space of one environment's `obs`."""
        return as_space(self._one.observation_space, "env.observation_space")

    @property
    def action_space(self) -> AnySpace:
        """Space of one environment's `action`."""
        return as_space(self._one.action_space, "env.action_space")

    # Of an environment of several agents.

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents."""
        return self.env.agents

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Agents with equal spaces, by group."""
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
    """Base of wrappers of one environment: passes everything on.

    A subclass with options checks them in `_check`.
    """

    env: Any  # an `Env`, or a `MultiAgentEnv` if `for_agents`

    def __post_init__(self) -> None:
        # A placeholder that jax builds pytrees with has no `step`.
        if not hasattr(self.env, "step"):
            return
        checks.single(self.env)
        self._check_agents()
        self._check()

    def _check(self) -> None:
        """Raises `ValueError` if an option is not as it must be.

        It is called with other leaves than the user's, too: tracers, or the zeros of a
        `vmap` in which nothing is mapped. So values are checked by `checks.is_known`,
        and zeros must pass.
        """

    def at_episode(self, number: jax.Array) -> Self:
        """Passes the number of the episode to the wrapped environment; see `Env`."""
        # The number may be a tracer: it becomes a leaf of the environment inside.
        return self.replace(env=at_episode(self.env, number))

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`."""
        return self.env.reset(key)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step; `obs` and `state` are the true successor."""
        return self.env.step(key, state, action)


class Agent(NamedTuple):
    """The agent whose observation an `ObsWrapper` changes.

    Attributes:
        env: the wrapped environment.
        group: the group of the agent; None if it is the only agent.
        number: `()` int32, its position in `env.agents`.
        action: its action in the last step; None at the start of an episode.
        reward: `()` float32, its reward in the last step; None at the start.
        state: the state of `env`.
        info: that of the last step; None at the start of an episode.
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
        """Space of what the agent sees without the wrapper."""
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
    """Base of wrappers that change observations, written for one agent.

    With several agents, `show` is called once per group, mapped over its members by
    `jax.vmap`.
    """

    def space(self, agent: Agent) -> AnySpace:
        """Space of what the agent sees."""
        raise NotImplementedError

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Returns what the agent sees instead of `obs`, and the new memory.

        Args:
            agent: the agent, with its last action and reward.
            obs: what it sees without the wrapper.
            memory: what the last call in the episode returned; None at its start.
        """
        raise NotImplementedError

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`."""
        return self.space(Agent(self.env))

    @property
    def observation_spaces(self) -> Mapping[str, AnySpace]:
        """Space of one agent's `obs`, by group."""
        return {group: self.space(Agent(self.env, group)) for group in self.groups}

    def reset(self, key: chex.PRNGKey) -> tuple:
        """Starts an episode: `(state, obs)`, or with several agents and `acting`."""
        state, obs, *acting = self.env.reset(key)
        obs, memory = self._show_each(Agent(self.env, state=state), obs, None)
        return WrapperState(env_state=state, memory=memory), obs, *acting

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> Any:
        """Takes one step."""
        result = self.env.step(key, state.env_state, action)
        reward = jnp.asarray(result.reward, jnp.float32)
        every = Agent(self.env, None, 0, action, reward, result.state, result.info)
        obs, memory = self._show_each(every, result.obs, state.memory)
        state = WrapperState(env_state=result.state, memory=memory)
        return result.replace(state=state, obs=obs)

    def _show_each(self, every: Agent, obs: Any, memory: Any) -> tuple[Any, Any]:
        """Calls `show` for each agent; `every` has the actions and rewards of all."""
        if not has_agents(self.env):
            return self.show(every, obs, memory)
        # Groups differ in their spaces, so each is mapped over by itself. The reward is
        # one array of all agents, `[A]`, of which a group takes its members.
        shown, memories = {}, {}
        for group, members in self.groups.items():

            def show(obs: Any, memory: Any, own: Any, group: str = group) -> tuple:
                return self.show(every._replace(group=group, **own), obs, memory)

            number = jnp.asarray([self.agents.index(x) for x in members], jnp.int32)
            own: dict[str, Any] = {"number": number}
            if memory is not None:
                own |= {"action": every.action[group], "reward": every.reward[number]}
            # At a start there is no memory, and `None` has no axis to map.
            made = jax.vmap(show)(obs[group], memory and memory[group], own)
            shown[group], memories[group] = made
        return shown, memories


class VectorWrapper(BaseWrapper, VectorEnv):
    """Base of wrappers of a `VectorEnv`: passes everything on."""

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
        """Sharding of the lanes, if `rollout.shard` made one; else None."""
        return self.env.sharding

    @property
    def learns(self) -> bool:
        """Whether observations depend on statistics that are not fixed yet."""
        return self.env.learns

    def freeze(self, env_state: ArrayTree) -> Self:
        """Fixes what the environments learn, to evaluate with it.

        Args:
            env_state: `carry.env_state` of the same wrappers, around any number of
                environments. Only the statistics in it are read.

        Returns:
            The same environments, which use the statistics of `env_state` and never
            change them, also after a `reset`. They accept carries of these.
        """
        # A wrapper that keeps no state of its own has the state of the wrapped one.
        return self.replace(env=self.env.freeze(env_state))

    def normalize_obs(self, obs: ArrayTree) -> ArrayTree:
        """Normalises raw observations; see `NormalizeObs.normalize_obs`."""
        return self.env.normalize_obs(obs)

    def reset(self, keys: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode in every lane: `(state, obs)`."""
        return self.env.reset(keys)

    def step(self, keys: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step in every lane, without auto-reset."""
        return self.env.step(keys, state, action)

    def reset_done(
        self, key_fn: Callable[[LaneIndex], chex.PRNGKey], done: jax.Array, lanes: Lanes
    ) -> Lanes:
        """Starts a new episode in the lanes whose episode is over."""
        return self.env.reset_done(key_fn, done, lanes)


def cast_step(result: EnvStep) -> EnvStep:
    """Casts the reward to float32 and the flags to bool, and drops weak types."""
    if result.raw_reward is not None:
        raise ValueError(
            "`env.step` must leave `raw_reward` as None, got one of a single "
            "environment: only wrappers of a `VectorEnv` have it."
        )
    return EnvStep(
        state=strong(result.state),
        obs=strong(result.obs),
        reward=checks.real("reward", result.reward).astype(jnp.float32),
        terminated=checks.flag("terminated", result.terminated),
        truncated=checks.flag("truncated", result.truncated),
        info=strong(result.info),
    )


def with_names(info: ArrayTree, added: dict[str, ArrayTree]) -> dict[str, ArrayTree]:
    """Adds values to the `info` of a step, a dict that has none of these names."""
    if not isinstance(info, dict) or added.keys() & info.keys():
        got = sorted(info) if isinstance(info, dict) else type(info).__name__
        raise ValueError(
            f"`info` must be a dict without the names {', '.join(added)}, got {got}."
        )
    return {**added, **info}
