"""Environments as other people write them, a small file of each kind."""

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout import envs

LIMIT = 6


class Arm(gymnasium.Env):
    """Of Gymnasium: everything is drawn from the seed of the reset."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.MultiDiscrete([3, 2])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action):
        self.count += 1
        obs = self.np_random.random(2, np.float32)
        fell = bool(obs[0] > 0.8)
        late = self.count == LIMIT and not fell
        return obs, float(obs[1] + action.sum()), fell, late, {}


class OldGym:
    """As in gym before 0.26: `seed`, `reset` without it, and a single `done`."""

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
    """The class of the page of environments on the host."""

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
    """Several agents, each with a time limit of its own, which may end first."""

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
        place = jnp.zeros(3, jnp.int32)
        return (place, jnp.int32(0)), self.see(place, 0), jnp.ones(3, bool)

    def see(self, place, time):
        time = jnp.broadcast_to(time, place.shape)
        return {"all": jnp.stack([place, time], axis=-1).astype(jnp.float32)}

    def step(self, key, state, action):
        place, time = state
        is_over = self.is_over(*state)
        place = place + jnp.where(is_over, 0, 2 * action["all"] - 1)
        time = time + 1
        arrived, late = jnp.abs(place) == 2, time >= jnp.asarray(self.limits)
        return envs.multi_agent.MultiAgentStep(
            state=(place, time),
            obs=self.see(place, time),
            acting=~self.is_over(place, time),
            reward=jnp.where(is_over, 0.0, place.astype(jnp.float32)),
            terminated=arrived & ~is_over,
            truncated=late & ~is_over,
            episode_terminated=False,
            episode_truncated=False,
        )

    def is_over(self, place, time):
        return (jnp.abs(place) == 2) | (time >= jnp.asarray(self.limits))


@struct.dataclass
class TeamState:
    place: jax.Array
    step: jax.Array
    done: jax.Array


class Team:
    """The same in JaxMARL's style: dicts by agent, and one flag for both endings."""

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
            x: jnp.float32([state.place[i], time]) for i, x in enumerate(self.agents)
        }

    def step_env(self, key, state, actions):
        action = jnp.stack([actions[x] for x in self.agents])
        place = state.place + jnp.where(state.done, 0, 2 * action - 1)
        time = state.step + 1
        done = state.done | (jnp.abs(place) == 2) | (time >= self.limits)
        reward = jnp.where(state.done, 0.0, place)
        state = TeamState(place, time, done)
        rewards, dones = (
            dict(zip(self.agents, x, strict=True)) for x in (reward, done)
        )
        return self.get_obs(state), state, rewards, {**dones, "__all__": done.all()}, {}

    def action_space(self, agent):
        return envs.Discrete(2)

    def observation_space(self, agent):
        return envs.Box(-9.0, 9.0, (2,))
