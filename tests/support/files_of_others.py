"""Environments in the styles of other libraries, one small class per style."""

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout import envs

LIMIT = 6


class Arm(gymnasium.Env):
    """A Gymnasium environment that samples every value with the seed of the reset."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.MultiDiscrete([3, 2])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action):
        self.count += 1
        obs = self.np_random.random(2, np.float32)
        terminated = bool(obs[0] > 0.8)
        truncated = self.count == LIMIT and not terminated
        return obs, float(obs[1] + action.sum()), terminated, truncated, {}


class OldGym:
    """The interface of gym before 0.26: `seed`, `reset` without a seed, and `done`."""

    observation_space, action_space = Arm.observation_space, Arm.action_space

    def __init__(self):
        self.arm, self.next_seed = Arm(), None

    def seed(self, seed=None):
        self.next_seed = seed
        return [seed]

    def reset(self):
        seed, self.next_seed = self.next_seed, None
        return self.arm.reset(seed=seed)[0]

    def step(self, action):
        obs, reward, terminated, truncated, info = self.arm.step(action)
        if truncated:
            info["TimeLimit.truncated"] = True
        return obs, reward, terminated or truncated, info


class FromOldGym(gymnasium.Env):
    """The class on the page of host environments."""

    def __init__(self, env):
        self.env = env
        self.observation_space = env.observation_space
        self.action_space = env.action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.env.seed(seed)
        return self.env.reset(), {}

    def step(self, action):
        obs, reward, done, info = self.env.step(action)
        truncated = info.get("TimeLimit.truncated", False)
        return obs, reward, done and not truncated, truncated, info


@struct.dataclass
class Runners:
    """Several agents with separate time limits; each may end before the episode."""

    limits: Any = (2, 5, 3)
    agents = ("a", "b", "c")
    simultaneous = True

    @property
    def groups(self):
        return {"all": self.agents}

    @property
    def observation_spaces(self):
        return {"all": envs.Box(-9.0, 9.0, (2,))}

    @property
    def action_spaces(self):
        return {"all": envs.Discrete(2)}

    def reset(self, key):
        position = jnp.zeros(3, jnp.int32)
        return (position, jnp.int32(0)), self.observe(position, 0), jnp.ones(3, bool)

    def observe(self, position, time):
        time = jnp.broadcast_to(time, position.shape)
        return {"all": jnp.stack([position, time], axis=-1).astype(jnp.float32)}

    def step(self, key, state, action):
        position, time = state
        is_done = self.is_done(*state)
        position = position + jnp.where(is_done, 0, 2 * action["all"] - 1)
        time = time + 1
        at_goal, at_limit = jnp.abs(position) == 2, time >= jnp.asarray(self.limits)
        return envs.multi_agent.MultiAgentStep(
            state=(position, time),
            obs=self.observe(position, time),
            acting=~self.is_done(position, time),
            reward=jnp.where(is_done, 0.0, position.astype(jnp.float32)),
            terminated=at_goal & ~is_done,
            truncated=at_limit & ~is_done,
            episode_terminated=False,
            episode_truncated=False,
        )

    def is_done(self, position, time):
        return (jnp.abs(position) == 2) | (time >= jnp.asarray(self.limits))


@struct.dataclass
class TeamState:
    position: jax.Array
    step: jax.Array
    done: jax.Array


class Team:
    """`Runners` in the style of JaxMARL: dicts by agent, and one flag for endings."""

    agents = Runners.agents

    def __init__(self, limits):
        self.max_steps = limits
        self.limits = jnp.array(Runners().limits)

    def reset(self, key):
        state = TeamState(jnp.zeros(3, jnp.int32), jnp.int32(0), jnp.zeros(3, bool))
        return self.get_obs(state), state

    def get_obs(self, state):
        time = state.step
        return {
            x: jnp.float32([state.position[i], time]) for i, x in enumerate(self.agents)
        }

    def step_env(self, key, state, actions):
        action = jnp.stack([actions[x] for x in self.agents])
        position = state.position + jnp.where(state.done, 0, 2 * action - 1)
        time = state.step + 1
        done = state.done | (jnp.abs(position) == 2) | (time >= self.limits)
        reward = jnp.where(state.done, 0.0, position)
        state = TeamState(position, time, done)
        rewards, dones = (
            dict(zip(self.agents, x, strict=True)) for x in (reward, done)
        )
        return self.get_obs(state), state, rewards, {**dones, "__all__": done.all()}, {}

    def action_space(self, agent):
        return envs.Discrete(2)

    def observation_space(self, agent):
        return envs.Box(-9.0, 9.0, (2,))
