"""Environments on the host that show elements of any space, and take its actions."""

import copy

import gymnasium
import jax
import numpy as np

from rollout.envs.host.types import HostStep, HostVectorEnv
from rollout.envs.spaces import as_space

LENGTH = 4  # steps of an episode


class Sampled(gymnasium.Env):
    """Shows elements of a space, and fails at an action that is none of it."""

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


class Own(HostVectorEnv):
    """Environments of one's own, which do the same, in spaces of any library."""

    num_envs = 3

    def __init__(self, space):
        self.observation_space = self.action_space = space
        self.space = as_space(space)
        self.contain = jax.jit(jax.vmap(self.space.contains))
        self.sample = jax.jit(jax.vmap(self.space.sample))
        self.seeds, self.count = np.zeros((2, 3), np.int32)

    def reset(self, seeds, mask):
        self.seeds = np.where(mask, seeds.astype(np.int32), self.seeds)
        self.count = np.where(mask, 0, self.count)
        return self.show()

    def step(self, action):
        assert self.contain(action).all()
        assert (self.count < LENGTH).all()
        self.count = self.count + 1
        no, reward = np.zeros(3, bool), np.ones(3, np.float32)
        return HostStep(self.show(), reward, self.count == LENGTH, no, no, {})

    def show(self):
        keys = jax.vmap(lambda x, n: jax.random.fold_in(jax.random.key(x), n))
        return jax.tree.map(np.asarray, self.sample(keys(self.seeds, self.count)))
