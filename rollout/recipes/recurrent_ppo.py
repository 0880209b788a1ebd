"""Proximal policy optimization with a memory, for environments that hide something.

    python -m rollout.recipes.recurrent_ppo CartPole-v1

Copy this file and change it; it may change here, too.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

import rollout
from rollout.envs.wrappers import flatten_obs, mask_in
from rollout.recipes import training
from rollout.recipes.gradients import differentiate
from rollout.recipes.ppo import PPO, Config, loss


def masked(x, obs):
    """Puts the mask of actions, where there is one, beside what a cell shows."""
    mask = mask_in(obs)
    return x if mask is None else {"obs": x, "action_mask": mask}


class RecurrentPPO(PPO):
    """`PPO` whose observations pass a recurrent cell first; `train` is the same.

    Args:
        action_space: of the environment.
        config: a `Config`.
        cell: a flax module, `(memory, x)` to `(memory, x)`, such as `nn.GRUCell(64)`.
        empty: the number of lanes to the memory at the start of an episode.
        observation_space: of the environment, to flatten what it shows; None for
            observations that the cell takes as they are.
    """

    axis = 1  # minibatches of whole lanes

    def __init__(self, action_space, config, cell, empty, observation_space=None):
        self.cell, self.empty, self.space = cell, empty, observation_space
        super().__init__(action_space, config)

    def make_policy(self):
        functions = {"mode_fn": self.choose_mode, "value_fn": self.value_of}
        return rollout.recurrent_policy(self.choose, self.empty, **functions)

    def step(self, params, memory, obs):
        memory, x = self.cell.apply(params["cell"], memory, self.seen(obs))
        return memory, masked(x, obs)

    def seen(self, obs):
        return obs if self.space is None else flatten_obs(self.space, obs)

    def choose(self, params, obs, memory, key):
        after, x = self.step(params, memory, obs)
        action, extras = self.act(params["heads"], x, key)
        return action, after, extras | {"memory": memory}

    def choose_mode(self, params, obs, memory, key):
        after, x = self.step(params, memory, obs)
        return self.mode(params["heads"], x, key), after

    def predict(self, params, obs, memory=None):
        """Returns the most likely action for one observation, and the next memory.

        `memory` is None for the first observation of an episode.
        """
        one = jax.tree.map(lambda x: jnp.asarray(x)[None], obs)
        memory = self.empty(1) if memory is None else memory
        action, memory = self.choose_mode(params, one, memory, None)
        return jax.tree.map(lambda x: x[0], action), memory

    def value_of(self, params, obs, memory):
        return self.value(params["heads"], self.step(params, memory, obs)[1])

    def init(self, key, obs):
        make = jax.custom_batching.sequential_vmap(self.make_params)  # as in `PPO`
        params = make(key, obs)
        return params, self.optimizer.init(params)

    def make_params(self, key, obs):
        memory = self.empty(len(jax.tree.leaves(obs)[0]))
        (_, x), cell = self.cell.init_with_output(key, memory, self.seen(obs))
        return {"cell": cell, "heads": self.network.init(key, masked(x, obs))}

    def gradient(self, params, t, advantage):
        return differentiate(self.cost, params, t, advantage)

    def cost(self, params, t, advantage):
        def step(memory, obs):
            return self.step(params, memory, obs)

        start = jax.tree.map(lambda x: x[0], t.extras["memory"])
        rows = t.obs, t.first, self.empty
        _, x = rollout.policies.unroll(step, start, *rows)
        dist, value = self.network.apply(params["heads"], x)
        return loss(self.config, dist, value, t, advantage)


def main():
    def make(action_space, config, observation_space):
        cell, empty = nn.GRUCell(64), lambda num_envs: jnp.zeros((num_envs, 64))
        return RecurrentPPO(action_space, config, cell, empty, observation_space)

    columns = "kl", "entropy", "explained_variance"
    return training.run(make, Config(num_updates=40), columns)


if __name__ == "__main__":
    main()
