"""`TimeLimit`, `FixedLength`, `TruncateOnNonFinite`: wrappers that change endings."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs import trees
from rollout.envs.multi_agent import MultiAgentStep
from rollout.envs.types import ArrayTree, EnvStep
from rollout.envs.wrappers.wrapper import Wrapper, WrapperState, cast_step, with_names


class TimeLimit(Wrapper):
    """Truncates an episode after `num_steps` steps, if it has not ended before.

    The environment's own flags stay set: it may truncate earlier, and at the limit both
    flags are set if it also terminates there. With several agents it truncates the
    episode of all.

    Attributes:
        env: the environment.
        num_steps: limit in steps, an int of at least 1.

    Raises:
        ValueError: if `num_steps` is not an int of at least 1.
    """

    num_steps: int = struct.field(pytree_node=False)

    for_agents = "all"

    def _check(self) -> None:
        checks.int_between("num_steps", self.num_steps)

    def reset(self, key: chex.PRNGKey) -> tuple:
        """Starts an episode: `(state, obs)`, or with several agents and `acting`."""
        state, *shown = self.env.reset(key)
        memory = jnp.zeros((), jnp.int32)
        return WrapperState(env_state=state, memory=memory), *shown

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> Any:
        """Takes one step, and truncates at the limit."""
        result = self.env.step(key, state.env_state, action)
        num_taken = state.memory + 1
        at_length = num_taken >= self.num_steps
        state = WrapperState(env_state=result.state, memory=num_taken)
        if isinstance(result, MultiAgentStep):
            # The episode of all: flags of single agents would end those alone.
            cut = result.episode_truncated | at_length
            return result.replace(state=state, episode_truncated=cut)
        # Its flags may be bools of Python.
        result = cast_step(result)
        return result.replace(state=state, truncated=result.truncated | at_length)


class FixedLength(Wrapper):
    """Ends every episode after exactly `num_steps` steps, as a truncation.

    The wrapper ignores the environment's own endings and keeps stepping it, so it must
    go on after one, as `RecommendationEnv` does. `info` must be a dict, and gains
    `left`, `()` bool, True if the environment ended by itself at this step or before.

    Attributes:
        env: the environment.
        num_steps: length of every episode in steps, an int of at least 1.

    Raises:
        ValueError: if `num_steps` is not an int of at least 1.
    """

    num_steps: int = struct.field(pytree_node=False)

    def _check(self) -> None:
        checks.int_between("num_steps", self.num_steps)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`."""
        state, obs = self.env.reset(key)
        memory = jnp.zeros((), jnp.int32), jnp.bool_(False)
        return WrapperState(env_state=state, memory=memory), obs

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step.

        Raises:
            ValueError: while tracing, if `info` is not a dict, or has a `left`.
        """
        result = cast_step(self.env.step(key, state.env_state, action))
        num_before, had_left = state.memory
        num_taken = num_before + 1
        # Once true it stays so: the user is away for the rest of the episode.
        has_left = had_left | result.terminated | result.truncated
        return result.replace(
            state=WrapperState(env_state=result.state, memory=(num_taken, has_left)),
            terminated=jnp.bool_(False),
            truncated=num_taken >= self.num_steps,
            info=with_names(result.info, {"left": has_left}),
        )


class TruncateOnNonFinite(Wrapper):
    """Truncates an episode at a step whose observation or reward is not finite.

    An environment that blows up then spoils only its own episode. The last finite
    observation replaces the faulty one, the reward is 0, and the step is truncated, not
    terminated. `info` must be a dict, and gains `faulty`, `()` bool.

    Attributes:
        env: the environment. Wrappers that remember observations go around this one.
    """

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`."""
        state, obs = self.env.reset(key)
        return WrapperState(env_state=state, memory=obs), obs

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step.

        Raises:
            ValueError: while tracing, if `info` is not a dict, or has a `faulty`.
        """
        result = cast_step(self.env.step(key, state.env_state, action))
        faulty = jnp.bool_(False)
        for x in jax.tree.leaves((result.obs, result.reward)):
            if jnp.issubdtype(x.dtype, jnp.floating):
                faulty |= ~jnp.all(jnp.isfinite(x))
        # The state stays faulty: the reset after the truncation replaces it.
        obs = trees.select(faulty, state.memory, result.obs)
        return result.replace(
            state=WrapperState(env_state=result.state, memory=obs),
            obs=obs,
            reward=jnp.where(faulty, 0.0, result.reward),
            terminated=result.terminated & ~faulty,
            truncated=result.truncated | faulty,
            info=with_names(result.info, {"faulty": faulty}),
        )
