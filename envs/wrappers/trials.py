"""`Trials`: several episodes of one task in a row, for policies that learn to learn."""

from typing import Self

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs import trees
from rollout.envs.types import AnySpace, ArrayTree, EnvStep
from rollout.envs.wrappers.observations import space_with_previous, with_previous
from rollout.envs.wrappers.wrapper import Agent, Wrapper, WrapperState, cast_step


class Trials(Wrapper):
    """Plays `num_episodes` episodes of one task as one episode, a trial.

    Every episode of a trial starts with the key of the trial, so whatever `reset` draws
    is the task: the chances of a bandit, a goal, a maze. The next trial has another
    one. The observation is `{"obs": obs, "action": action, "reward": reward, "first":
    first}`, with the last action and reward also after an episode of the trial has
    ended, where `first` is True: with a recurrent policy, whose memory lasts for the
    trial, that is RL².

    The trial ends as its last episode does; endings of the others are no endings here.
    A trial resets the environment in every step, and keeps the reset where it is due.

    Attributes:
        env: the environment.
        num_episodes: episodes of a trial, an int of at least 1.

    Raises:
        ValueError: if `num_episodes` is not an int of at least 1.

    Source:
        "RL²: Fast Reinforcement Learning via Slow Reinforcement Learning", section 2,
        arXiv:1611.02779.
    """

    num_episodes: int = struct.field(pytree_node=False)
    number: jax.Array | None = None  # () int32 of the trial, see `at_episode`

    def _check(self) -> None:
        checks.int_between("num_episodes", self.num_episodes)

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`; the reward is unbounded."""
        return space_with_previous(Agent(self.env))

    def at_episode(self, number: jax.Array) -> Self:
        """Passes the number of the trial to the environment; see `Env`."""
        return super().at_episode(number).replace(number=number)

    def reset(self, key: chex.PRNGKey) -> tuple[WrapperState, ArrayTree]:
        """Starts a trial: `(state, obs)`, without a previous step."""
        state, obs = self.env.reset(key)
        # The key of the reset, as words: every episode of the trial begins with it,
        # which the checker of key reuse takes for a mistake.
        memory = jax.random.key_data(key), jnp.int32(0), self.number
        state = WrapperState(env_state=state, memory=memory)
        return state, with_previous(Agent(self.env), obs, jnp.bool_(True))

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step, into the trial's next episode where one has ended."""
        words, num_before, number = state.memory
        # An environment of numbered levels stays at the one of the trial.
        env = self.env if number is None else super().at_episode(number).env
        result = cast_step(self.env.step(key, state.env_state, action))
        ended = result.terminated | result.truncated
        num_ended = num_before + ended.astype(jnp.int32)
        # Endings of the others are hidden: a policy's memory must outlive them.
        is_last = num_ended >= self.num_episodes
        begins = ended & ~is_last
        # Also across an ending within the trial, where the first step is no first one.
        agent = Agent(self.env, action=action, reward=result.reward)
        start = jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))
        env_state, obs = trees.select(
            begins, env.reset(start), (result.state, result.obs)
        )
        return result.replace(
            state=WrapperState(env_state=env_state, memory=(words, num_ended, number)),
            obs=with_previous(agent, obs, begins),
            terminated=result.terminated & is_last,
            truncated=result.truncated & is_last,
        )
