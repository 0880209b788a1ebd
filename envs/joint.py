"""`_Joint`: converts a `MultiAgentEnv` to an `Env` with one joint action.

Steps, episodes, streams, checkpoints and sharding therefore work as with any `Env`. The
statistics of each agent are stored next to the environment state and returned in
`info.agents`.
"""

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs.multi_agent import (
    ACTING,
    AgentInfo,
    AgentLayout,
    Flag,
    MultiAgentEnv,
    MultiAgentInfo,
    MultiAgentStep,
    pack_status,
    read_flag,
    read_length,
)
from rollout.envs.spaces import Box, Dict, Repeated, as_space
from rollout.envs.types import AnySpace, ArrayTree, EnvStep
from rollout.envs.wrappers.wrapper import Wrapper

_FLAG = Box(0, 1, (), jnp.dtype(bool))


class _JointState(struct.PyTreeNode, kw_only=True):
    """State of one environment and statistics of its `A` agents."""

    env_state: ArrayTree
    agent_return: jax.Array  # [A] float32
    packed: jax.Array  # [A] uint32, as in `AgentInfo`


class _Joint(Wrapper):
    """An `Env` whose action is the joint action of all agents."""

    env: MultiAgentEnv
    layout: AgentLayout = struct.field(pytree_node=False)

    for_agents = "all"

    @property
    def observation_space(self) -> AnySpace:
        spaces = self._stacked(self.env.observation_spaces)
        return Dict({**spaces, ACTING: Repeated(_FLAG, len(self.layout.agents))})

    @property
    def action_space(self) -> AnySpace:
        return Dict(self._stacked(self.env.action_spaces))

    def reset(self, key: chex.PRNGKey) -> tuple[_JointState, dict[str, Any]]:
        result = self.env.reset(key)
        if type(result) is not tuple or len(result) != 3:
            raise ValueError(
                "`env.reset` must return (state, obs, acting), got "
                f"{checks.describe(result)}."
            )
        env_state, obs, acting = result
        shape = (len(self.layout.agents),)
        if self.layout.simultaneous:
            acting = jnp.ones(shape, bool)
        acting = self._per_agent("acting", acting, bool)
        state = _JointState(
            env_state=env_state,
            agent_return=jnp.zeros(shape, jnp.float32),
            packed=pack_status(jnp.zeros(shape, jnp.int32), {Flag.ACTS_NEXT: acting}),
        )
        return state, self._observe(obs, acting)

    def step(self, key: chex.PRNGKey, state: _JointState, action: ArrayTree) -> EnvStep:
        result = self.env.step(key, state.env_state, action)
        condition = "`env.step` must return a `rollout.envs.multi_agent.MultiAgentStep`"
        checks.kind(condition, result, MultiAgentStep)
        reward = self._per_agent("reward", result.reward, jnp.float32)
        # Agents also receive rewards before their first action and after their end.
        agent_return = state.agent_return + reward
        flags = self._update_flags(state.packed, result)
        length = read_length(state.packed) + flags[Flag.ACTED].astype(jnp.int32)
        packed = pack_status(length, flags)
        has_terminated = flags[Flag.HAS_TERMINATED]
        # The episode is over when every agent has ended, even if the environment does
        # not set an episode flag.
        all_done = jnp.all(has_terminated | flags[Flag.WAS_TRUNCATED])
        all_terminated = jnp.all(has_terminated)
        return EnvStep(
            state=_JointState(
                env_state=result.state, agent_return=agent_return, packed=packed
            ),
            obs=self._observe(result.obs, flags[Flag.ACTS_NEXT]),
            reward=jnp.sum(reward),
            terminated=result.episode_terminated | (all_done & all_terminated),
            truncated=result.episode_truncated | (all_done & ~all_terminated),
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

    def _update_flags(
        self, packed: jax.Array, result: MultiAgentStep
    ) -> dict[Flag, jax.Array]:
        """Updates the flags of every agent after a step."""
        acted = read_flag(packed, Flag.ACTS_NEXT)
        has_terminated = read_flag(packed, Flag.HAS_TERMINATED)
        was_truncated = read_flag(packed, Flag.WAS_TRUNCATED)
        # Count an ending once: adapters may repeat the flags of agents that have ended.
        was_active = ~(has_terminated | was_truncated)
        terminated = self._per_agent("terminated", result.terminated, bool) & was_active
        truncated = self._per_agent("truncated", result.truncated, bool) & was_active
        is_active = was_active & ~(terminated | truncated)
        if self.layout.simultaneous:
            acts_next = is_active
        else:
            acts_next = self._per_agent("acting", result.acting, bool) & is_active
        # In a turn-based game an agent is rewarded for a move while other agents act.
        answers = acted | read_flag(packed, Flag.WAITING)
        return {
            Flag.ACTS_NEXT: acts_next,
            Flag.WAITING: answers & is_active & ~acts_next,
            Flag.HAS_TERMINATED: has_terminated | terminated,
            Flag.WAS_TRUNCATED: was_truncated | truncated,
            Flag.ACTED: acted,
            Flag.TERMINATED: terminated,
            Flag.TRUNCATED: truncated,
            Flag.ANSWERS: answers,
        }

    def _observe(self, obs: Any, acting: jax.Array) -> dict[str, ArrayTree]:
        """Checks that observations are stacked by group, and adds the acting agents."""
        names = {group.name for group in self.layout.groups}
        if not isinstance(obs, Mapping) or obs.keys() != names:
            got = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
            raise ValueError(
                f"`obs` must be a dict of the groups {', '.join(sorted(names))}, got "
                f"{got}."
            )
        for group in self.layout.groups:
            condition = f"`obs` of the group {group.name!r} must have agents"
            checks.leading_axes(condition, obs[group.name], (len(group.members),))
        return {**obs, ACTING: acting}

    def _stacked(self, spaces: Mapping[str, AnySpace]) -> dict[str, AnySpace]:
        """Returns the stacked space of every group, by name."""
        return {
            name: Repeated(as_space(spaces[name], name), len(members))
            for name, members, *_ in self.layout.groups
        }

    def _per_agent(self, name: str, value: Any, dtype: Any) -> jax.Array:
        """Checks that an array has one value per agent, and casts it."""
        num_agents = len(self.layout.agents)
        if jnp.shape(value) != (num_agents,):
            raise ValueError(
                f"`{name}` must be one value per agent, shape ({num_agents},), got "
                f"{checks.describe(value)}."
            )
        return checks.flag(name, value) if dtype is bool else jnp.asarray(value, dtype)
