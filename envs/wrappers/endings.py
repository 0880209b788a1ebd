"""Wrappers that change endings, for example `TimeLimit`, `FixedLength` and `Trials`."""

from typing import Any, Self

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout.base import checks, trees
from rollout.envs.multi_agent import MultiAgentStep
from rollout.envs.types import AnySpace, ArrayTree, EnvStep
from rollout.envs.wrappers.observations import space_with_previous, with_previous
from rollout.envs.wrappers.wrapper import (
    AgentStep,
    Wrapper,
    WrapperState,
    cast_step,
    with_names,
)


class TimeLimit(Wrapper):
    """Truncates episodes after `num_steps` steps.

    The flags of the environment remain set: episodes may end earlier, and both flags
    are set if the environment terminates at the limit. For several agents the wrapper
    truncates the episode of all agents.

    Attributes:
        env: the environment.
        num_steps: maximum length of an episode in steps, an int of at least 1.

    Raises:
        ValueError: if `num_steps` is not an int of at least 1.
    """

    num_steps: int = struct.field(pytree_node=False)

    for_agents = "all"

    def _check(self) -> None:
        checks.check_int("num_steps", self.num_steps)

    def reset(self, key: chex.PRNGKey) -> tuple:
        """Starts an episode; returns `(state, obs)`, and `acting` if multi-agent."""
        state, *outputs = self.env.reset(key)
        memory = jnp.zeros((), jnp.int32)
        return WrapperState(env_state=state, memory=memory), *outputs

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> Any:
        """Takes one step, and truncates at the limit."""
        result = self.env.step(key, state.env_state, action)
        step_count = state.memory + 1
        at_limit = step_count >= self.num_steps
        state = WrapperState(env_state=result.state, memory=step_count)
        if isinstance(result, MultiAgentStep):
            # Set the flag of the episode: per-agent flags would end single agents only.
            truncated = result.episode_truncated | at_limit
            return result.replace(state=state, episode_truncated=truncated)
        # Convert the flags, which may be Python bools.
        result = cast_step(result)
        return result.replace(state=state, truncated=result.truncated | at_limit)


class FixedLength(Wrapper):
    """Truncates every episode after exactly `num_steps` steps.

    The wrapper ignores the endings of the environment and continues to step it. The
    environment must support steps after an ending, as `RecommendationEnv` does. `info`
    must be a dict. The wrapper adds the entry `left`, `()` bool, True if the
    environment ended at this step or before.

    Attributes:
        env: the environment.
        num_steps: length of every episode in steps, an int of at least 1.

    Raises:
        ValueError: if `num_steps` is not an int of at least 1.
    """

    num_steps: int = struct.field(pytree_node=False)

    def _check(self) -> None:
        checks.check_int("num_steps", self.num_steps)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode; returns `(state, obs)`."""
        state, obs = self.env.reset(key)
        memory = jnp.zeros((), jnp.int32), jnp.bool_(False)
        return WrapperState(env_state=state, memory=memory), obs

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step.

        Raises:
            ValueError: while tracing, if `info` is not a dict or contains `left`.
        """
        result = cast_step(self.env.step(key, state.env_state, action))
        step_count, had_left = state.memory
        step_count += 1
        # The flag stays set: the user is absent for the rest of the episode.
        has_left = had_left | result.terminated | result.truncated
        return result.replace(
            state=WrapperState(env_state=result.state, memory=(step_count, has_left)),
            terminated=jnp.bool_(False),
            truncated=step_count >= self.num_steps,
            info=with_names(result.info, {"left": has_left}),
        )


class TruncateOnNonFinite(Wrapper):
    """Truncates an episode if an observation or a reward is not finite.

    A diverging simulation then affects only the current episode. The last finite
    observation replaces the non-finite observation, the reward is 0, and the step is
    truncated, not terminated. `info` must be a dict. The wrapper adds the entry
    `faulty`, `()` bool.

    Attributes:
        env: the environment. Apply wrappers that store observations after this wrapper.
    """

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode; returns `(state, obs)`."""
        state, obs = self.env.reset(key)
        return WrapperState(env_state=state, memory=obs), obs

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step.

        Raises:
            ValueError: while tracing, if `info` is not a dict or contains `faulty`.
        """
        result = cast_step(self.env.step(key, state.env_state, action))
        faulty = jnp.bool_(False)
        for x in jax.tree.leaves((result.obs, result.reward)):
            if jnp.issubdtype(x.dtype, jnp.floating):
                faulty |= ~jnp.all(jnp.isfinite(x))
        # Keep the non-finite state: the reset after the truncation replaces it.
        obs = trees.select(faulty, state.memory, result.obs)
        return result.replace(
            state=WrapperState(env_state=result.state, memory=obs),
            obs=obs,
            reward=jnp.where(faulty, 0.0, result.reward),
            terminated=result.terminated & ~faulty,
            truncated=result.truncated | faulty,
            info=with_names(result.info, {"faulty": faulty}),
        )


class Trials(Wrapper):
    """Plays `num_episodes` episodes of one task as one episode, a trial.

    All episodes of a trial use the same reset key. The values that `reset` samples are
    therefore the task of the trial, for example the probabilities of a bandit, a goal
    or a maze. The next trial has a different task.

    The observation becomes `{"obs": obs, "action": action, "reward": reward, "first":
    first}`. `first` is True at the start of each episode of the trial. The last action
    and reward are zero only at the start of the trial. Combine the wrapper with a
    recurrent policy, whose memory lasts for a trial, to implement RL².

    A trial ends with its last episode and has the flags of that ending. The endings of
    earlier episodes are hidden. The wrapper resets the environment at every step and
    uses the result only if an episode has ended.

    Attributes:
        env: the environment.
        num_episodes: number of episodes per trial, an int of at least 1.

    Raises:
        ValueError: if `num_episodes` is not an int of at least 1.

    Source:
        "RL²: Fast Reinforcement Learning via Slow Reinforcement Learning", section 2,
        arXiv:1611.02779.
    """

    num_episodes: int = struct.field(pytree_node=False)
    number: jax.Array | None = None  # () int32, number of the trial, see `at_episode`

    def _check(self) -> None:
        checks.check_int("num_episodes", self.num_episodes)

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`; the reward is unbounded."""
        return space_with_previous(AgentStep(self.env))

    def at_episode(self, number: jax.Array) -> Self:
        """Passes the number of the trial to the environment; see `Env`."""
        return super().at_episode(number).replace(number=number)

    def reset(self, key: chex.PRNGKey) -> tuple[WrapperState, ArrayTree]:
        """Starts a trial without a previous step; returns `(state, obs)`."""
        state, obs = self.env.reset(key)
        # Store the words of the reset key: every episode of the trial reuses the key,
        # which the key-reuse checker would report.
        memory = jax.random.key_data(key), jnp.int32(0), self.number
        state = WrapperState(env_state=state, memory=memory)
        return state, with_previous(AgentStep(self.env), obs, jnp.bool_(True))

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step; starts the next episode of the trial if an episode ends."""
        words, num_episodes, number = state.memory
        # An environment with numbered levels keeps the level of the trial.
        env = self.env if number is None else super().at_episode(number).env
        result = cast_step(self.env.step(key, state.env_state, action))
        done = result.terminated | result.truncated
        num_ended = num_episodes + done.astype(jnp.int32)
        # Hide the endings of earlier episodes, so that the policy keeps its state.
        is_last = num_ended >= self.num_episodes
        is_first = done & ~is_last
        # Pass the last action and reward also to the first step of the next episode.
        agent = AgentStep(self.env, action=action, reward=result.reward)
        reset_key = jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))
        env_state, obs = trees.select(
            is_first, env.reset(reset_key), (result.state, result.obs)
        )
        return result.replace(
            state=WrapperState(env_state=env_state, memory=(words, num_ended, number)),
            obs=with_previous(agent, obs, is_first),
            terminated=result.terminated & is_last,
            truncated=result.truncated & is_last,
        )
