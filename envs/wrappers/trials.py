"""`Trials`: plays several episodes of one task in a row, for meta-learning policies."""

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

    All episodes of a trial use the same reset key. The values that `reset` samples are
    therefore the task of the trial, for example the probabilities of a bandit, a goal
    or a maze. The next trial has a different task.

    The observation becomes `{"obs": obs, "action": action, "reward": reward, "first":
    first}`. `first` is True at the start of each episode of the trial. The last action
    and reward are zero only at the start of the trial. Combine the wrapper with a
    recurrent policy, whose memory lasts for a trial, to implement RL².

    A trial has the ending of its last episode and hides the endings of its previous
    episodes. The wrapper resets the environment at every step and uses the result only
    if an episode has ended.

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
        checks.int_between("num_episodes", self.num_episodes)

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`; the reward is unbounded."""
        return space_with_previous(Agent(self.env))

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
        return state, with_previous(Agent(self.env), obs, jnp.bool_(True))

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step; starts the next episode of the trial if an episode ends."""
        words, num_episodes, number = state.memory
        # An environment with numbered levels keeps the level of the trial.
        env = self.env if number is None else super().at_episode(number).env
        result = cast_step(self.env.step(key, state.env_state, action))
        done = result.terminated | result.truncated
        num_ended = num_episodes + done.astype(jnp.int32)
        # Hide the endings of earlier episodes: the policy's memory must survive them.
        is_last = num_ended >= self.num_episodes
        begins = done & ~is_last
        # Pass the last action and reward also to the first step of the next episode.
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
