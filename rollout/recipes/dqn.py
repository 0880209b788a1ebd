"""Double DQN with prioritized replay (arXiv:1509.06461, 1511.05952), in JAX or not.

    python -m rollout.recipes.dqn CartPole-v1

Copy this file and change it; it may change here, too.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import rollout
from rollout.envs.spaces import as_space
from rollout.envs.wrappers import mask_in
from rollout.recipes import training
from rollout.recipes.training import State
from rollout.recipes.training import begin as begin
from rollout.recipes.training import train as train


class Config(NamedTuple):
    num_updates: int = 400
    num_envs: int = 16
    warmup: int = 64  # steps of each environment before the first update
    num_steps: int = 32  # of each environment in an update
    num_gradients: int = 32  # in an update, after these steps
    batch_size: int = 128
    learning_rate: float = 1e-3  # of the first update; falls to 0
    capacity: int = 100_000  # of the buffer
    n_step: int = 3
    gamma: float = 0.99
    exploration: float = 0.1  # part of the training in which epsilon falls from 1
    epsilon: float = 0.01  # after that
    beta: float = 0.4  # of the weights of the first update; rises to 1
    target_rate: float = 0.01
    hidden: int = 128
    activation: Any = nn.relu


class DQN:
    """Trains an agent by double DQN with n-step targets and prioritized replay.

    Args:
        action_space: of one environment, a `Discrete`.
        config: the settings.
        observation_space: of one environment, to flatten observations of any space, and
            for their `action_mask`; None if they are vectors.
        network: `(action_space, config)` to a module that maps observations to the
            values of all actions; None for two dense layers.
    """

    def __init__(self, action_space, config, observation_space=None, network=None):
        if not hasattr(action_space, "n"):
            raise ValueError(
                f"`action_space` must be a Discrete for DQN, got {action_space!r}: "
                "`rollout.recipes.ppo` takes any space, and `sac` a Box."
            )
        self.action_space, self.config = action_space, config
        mlp = training.dense(config, action_space.n, training.flat(observation_space))
        self.network: Any = network(action_space, config) if network else mlp
        num_gradients = config.num_updates * config.num_gradients
        rate = optax.cosine_decay_schedule(config.learning_rate, num_gradients)
        self.optimizer = optax.adam(rate)
        kind = rollout.buffers.PrioritizedReplayBuffer
        self.buffer = kind(config.capacity, config.num_envs)
        num_steps = int(config.num_updates * config.num_steps * config.exploration)
        epsilon: Any = optax.linear_schedule(1.0, config.epsilon, max(num_steps, 1))
        allowed = allowed_in if has_mask(observation_space) else None
        self.final_policy = greedy = rollout.stateless_policy(self.act)
        explore = rollout.epsilon_greedy
        self.policy = explore(greedy, action_space, epsilon, allowed_fn=allowed)

    def init(self, key, obs):
        params = self.network.init(key, obs)
        return params, params, self.optimizer.init(params)

    def values(self, params, obs):
        """Values all actions, `[..., n]`; those that are not allowed at -1e9."""
        values, mask = self.network.apply(params, obs), mask_in(obs)
        return values if mask is None else jnp.where(mask, values, -1e9)

    def act(self, params, obs, key):
        action = self.values(params, obs).argmax(-1)
        return self.action_space.start + action

    def predict(self, params, obs):
        """Returns the best action for one observation, without a lane axis."""
        one = jax.tree.map(lambda x: jnp.asarray(x)[None], obs)
        return self.act(params, one, None)[0]

    def loss(self, params, targets, batch):
        """Returns the loss of a batch, and the error of each row."""
        row, index = batch.experience, jnp.arange(batch.weights.size)
        best = self.values(params, row.next_obs).argmax(-1)  # double DQN
        next_value = self.network.apply(targets, row.next_obs)[index, best]
        target = row.reward + batch.discount * next_value
        action = row.action - self.action_space.start
        error = target - self.network.apply(params, row.obs)[index, action]
        return jnp.mean(batch.weights * optax.huber_loss(error)), error

    # In place, where the host calls it: the memory that it is given is deleted.
    @functools.partial(jax.jit, static_argnums=0, donate_argnames="memory", inline=True)
    def learn(self, learner, memory, t, key, beta):
        """Adds a trajectory `[T, B, ...]`, and takes the gradient steps."""
        config = self.config

        def step(state, key):
            (params, targets, opt_state), memory = state
            options = {"n_step": config.n_step, "gamma": config.gamma, "beta": beta}
            batch = self.buffer.sample(memory, key, config.batch_size, **options)
            grads, error = jax.grad(self.loss, has_aux=True)(params, targets, batch)
            # A little more, so that no row is forgotten.
            memory = self.buffer.update(memory, batch.indices, jnp.abs(error) + 0.01)
            change, opt_state = self.optimizer.update(grads, opt_state)
            params = optax.apply_updates(params, change)
            targets = optax.incremental_update(params, targets, config.target_rate)
            log = {"error": jnp.abs(error).mean()}
            return ((params, targets, opt_state), memory), log

        state = learner, self.buffer.add(memory, t)
        keys = jax.random.split(key, config.num_gradients)
        state, log = jax.lax.scan(step, state, keys)
        return *state, jax.tree.map(jnp.mean, log)

    def update(self, collector, state, key):
        """Collects, and learns from the buffer; returns the next state, and a log."""
        config, number = self.config, state.number + 1
        beta = config.beta + (1 - config.beta) * number / config.num_updates
        carry, t = collector.collect_steps(state.carry, state.params, config.num_steps)
        learner, memory, log = self.learn(state.learner, state.memory, t, key, beta)
        window = state.window.add(t)
        steps = (config.warmup + number * config.num_steps) * config.num_envs
        log |= {"return": window.return_mean, "steps": steps}
        return State(learner, carry, window, number, memory), log


def allowed_in(obs):
    return jnp.asarray(mask_in(obs), bool)  # Gymnasium's are int8


def has_mask(space):
    """Returns whether observations of a space, or None, have an `action_mask`."""
    if space is None:
        return False
    draw, key = as_space(space).sample, jax.random.key(0)
    return jax.eval_shape(lambda: mask_in(draw(key))) is not None


def main():
    return training.run(DQN, Config(), ["error"])


if __name__ == "__main__":
    main()
