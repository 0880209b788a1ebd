"""`_Joint`: lets the agents of one environment act together, as those of an `Env`.

All agents act as one, so steps, episodes, streams, checkpoints and devices work as with
any environment. The bookkeeping of each agent is kept next to the environment's own
state, and returned in `info.agents`.
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
    """State of one environment, with the bookkeeping of its `A` agents."""

    env_state: ArrayTree
    agent_return: jax.Array  # [A] float32
    packed: jax.Array  # [A] uint32, as in `AgentInfo`


class _Joint(Wrapper):
    """An `Env` in which all agents of one environment act together."""

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
        acting = self._each("acting", acting, bool)
        state = _JointState(
            env_state=env_state,
            agent_return=jnp.zeros(shape, jnp.float32),
            packed=pack_status(jnp.zeros(shape, jnp.int32), {Flag.ACTS_NEXT: acting}),
        )
        return state, self._observe(obs, acting)

    def step(self, key: chex.PRNGKey, state: _JointState, action: ArrayTree) -> EnvStep:
        result = self.env.step(key, state.env_state, action)
        what = "`env.step` must return a `rollout.envs.multi_agent.MultiAgentStep`"
        checks.kind(what, result, MultiAgentStep)
        reward = self._each("reward", result.reward, jnp.float32)
        # Agents earn before they act and after their end, too.
        agent_return = state.agent_return + reward
        flags = self._follow(state.packed, result)
        length = read_length(state.packed) + flags[Flag.ACTED].astype(jnp.int32)
        packed = pack_status(length, flags)
        has_terminated = flags[Flag.HAS_TERMINATED]
        # Once every agent has ended the episode is over, whatever the environment says.
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

    def _follow(
        self, packed: jax.Array, result: MultiAgentStep
    ) -> dict[Flag, jax.Array]:
        """Updates the flags of every agent after a step."""
        acted = read_flag(packed, Flag.ACTS_NEXT)
        has_terminated = read_flag(packed, Flag.HAS_TERMINATED)
        was_truncated = read_flag(packed, Flag.WAS_TRUNCATED)
        # An ending counts once: adapters may repeat the flags of agents already out.
        is_left = ~(has_terminated | was_truncated)
        terminated = self._each("terminated", result.terminated, bool) & is_left
        truncated = self._each("truncated", result.truncated, bool) & is_left
        goes_on = is_left & ~(terminated | truncated)
        if self.layout.simultaneous:
            acts_next = goes_on
        else:
            acts_next = self._each("acting", result.acting, bool) & goes_on
        # In a game of turns the reward of a move comes during the turns of the others.
        answers = acted | read_flag(packed, Flag.WAITING)
        return {
            Flag.ACTS_NEXT: acts_next,
            Flag.WAITING: answers & goes_on & ~acts_next,
            Flag.HAS_TERMINATED: has_terminated | terminated,
            Flag.WAS_TRUNCATED: was_truncated | truncated,
            Flag.ACTED: acted,
            Flag.TERMINATED: terminated,
            Flag.TRUNCATED: truncated,
            Flag.ANSWERS: answers,
        }

    def _observe(self, obs: Any, acting: jax.Array) -> dict[str, ArrayTree]:
        """Checks that observations are stacked by group, and adds who acts next."""
        names = {group.name for group in self.layout.groups}
        if not isinstance(obs, Mapping) or obs.keys() != names:
            got = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
            raise ValueError(
                f"`obs` must be a dict of the groups {', '.join(sorted(names))}, got "
                f"{got}."
            )
        for group in self.layout.groups:
            what = f"`obs` of the group {group.name!r} must have agents"
            checks.leading_axes(what, obs[group.name], (len(group.members),))
        return {**obs, ACTING: acting}

    def _stacked(self, spaces: Mapping[str, AnySpace]) -> dict[str, AnySpace]:
        """Returns the space of all members of each group."""
        return {
            name: Repeated(as_space(spaces[name], name), len(members))
            for name, members, *_ in self.layout.groups
        }

    def _each(self, name: str, value: Any, dtype: Any) -> jax.Array:
        """Checks that there is one value per agent, and casts them."""
        num_agents = len(self.layout.agents)
        if jnp.shape(value) != (num_agents,):
            raise ValueError(
                f"`{name}` must be one value per agent, shape ({num_agents},), got "
                f"{checks.describe(value)}."
            )
        return checks.flag(name, value) if dtype is bool else jnp.asarray(value, dtype)
