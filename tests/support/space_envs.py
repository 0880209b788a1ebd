"""Host environments whose observations and actions are elements of any space."""

import copy

import gymnasium
import jax
import numpy as np

from rollout.envs.host.types import HostStep, HostVectorEnv
from rollout.envs.spaces import as_space

LENGTH = 4  # steps of an episode


class Sampled(gymnasium.Env):
    """Observes samples of a space, and raises for actions outside the space."""

    def __init__(self, space):
        self.observation_space = copy.deepcopy(space)
        self.action_space = copy.deepcopy(space)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        assert self.count < LENGTH
        self.count += 1
        obs = self.observation_space.sample()
        return obs, 1.0, self.count == LENGTH, False, {}


class SampledVectorEnv(HostVectorEnv):
    """Three `Sampled` environments as a `HostVectorEnv`, for spaces of any library."""

    num_envs = 3

    def __init__(self, space):
        self.observation_space = self.action_space = space
        self.space = as_space(space)
        self.contains = jax.jit(jax.vmap(self.space.contains))
        self.sample = jax.jit(jax.vmap(self.space.sample))
        self.seeds, self.count = np.zeros((2, 3), np.int32)

    def reset(self, seeds, mask):
        self.seeds = np.where(mask, seeds.astype(np.int32), self.seeds)
        self.count = np.where(mask, 0, self.count)
        return self.observe()

    def step(self, action):
        assert self.contains(action).all()
        assert (self.count < LENGTH).all()
        self.count = self.count + 1
        zeros, reward = np.zeros(3, bool), np.ones(3, np.float32)
        return HostStep(self.observe(), reward, self.count == LENGTH, zeros, zeros, {})

    def observe(self):
        keys = jax.vmap(lambda x, n: jax.random.fold_in(jax.random.key(x), n))
        return jax.tree.map(np.asarray, self.sample(keys(self.seeds, self.count)))
