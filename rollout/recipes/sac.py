"""Soft actor-critic with a learned temperature (arXiv:1812.05905), in JAX or not.

    python -m rollout.recipes.sac Pendulum-v1

Copy this file and change it; it may change here, too.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import rollout
from rollout.recipes import training
from rollout.recipes.distributions import bounded, unbounded
from rollout.recipes.gradients import differentiate
from rollout.recipes.training import State
from rollout.recipes.training import begin as begin
from rollout.recipes.training import train as train


class Config(NamedTuple):
    num_updates: int = 20
    num_envs: int = 1
    warmup: int = 1000  # steps of each environment before the first update
    num_steps: int = 1000  # of each environment in an update
    num_gradients: int = 1  # after each of these steps
    batch_size: int = 128
    learning_rate: float = 1e-3
    capacity: int = 100_000  # of the buffer
    gamma: float = 0.99
    reward_scale: float = 0.1
    target_rate: float = 0.005
    hidden: int = 64
    activation: Any = nn.relu


class SAC:
    """Trains an agent by soft actor-critic (SAC).

    Args:
        action_space: of one environment, a `Box` of floats of any shape. Where its
            bounds are infinite, actions are in [-1, 1].
        config: the settings.
        observation_space: of one environment, to flatten observations of any space;
            None if they are vectors.
        network: `(action_space, config)` to two modules; None for dense layers. One
            maps observations to means and logarithms of deviations, side by side; the
            other one observations and actions, `[..., size]`, to a value, `[..., 1]`.
    """

    def __init__(self, action_space, config, observation_space=None, network=None):
        is_float = jnp.issubdtype(getattr(action_space, "dtype", int), jnp.floating)
        if not is_float or not hasattr(action_space, "low"):
            raise ValueError(
                f"`action_space` must be a Box of floats for SAC, got {action_space!r}:"
                " `rollout.recipes.ppo` takes any space, and `dqn` a Discrete."
            )
        self.action_space, self.config = action_space, config
        self.bounds = np.asarray(action_space.low), np.asarray(action_space.high)
        self.size = math.prod(action_space.shape)
        see = training.flat(observation_space)
        both = lambda obs, action: jnp.concatenate([see(obs), action], -1)  # noqa: E731
        actor = training.dense(config, 2 * self.size, see)
        pair: Any = actor, training.dense(config, 1, both)
        self.actor, self.critic = network(action_space, config) if network else pair
        self.optimizer = optax.adam(config.learning_rate)
        self.buffer = rollout.buffers.ReplayBuffer(config.capacity, config.num_envs)
        self.policy = rollout.stateless_policy(self.act, mode_fn=self.mode)
        self.final_policy = rollout.greedy(self.policy)

    def init(self, key, obs):
        """Returns parameters, those of the critics' targets, the optimizer's state."""
        actor_key, *keys = jax.random.split(key, 3)
        action = jnp.zeros((len(jax.tree.leaves(obs)[0]), self.size))
        init = lambda key: self.critic.init(key, obs, action)  # noqa: E731
        critics, log_alpha = jax.vmap(init)(jnp.stack(keys)), jnp.zeros(())
        actor = self.actor.init(actor_key, obs)
        params = {"actor": actor, "critics": critics, "log_alpha": log_alpha}
        return params, critics, self.optimizer.init(params)

    def draw(self, params, obs, key):
        """Draws actions, `[..., size]`, and returns their log-probabilities."""
        outputs = self.actor.apply(params["actor"], obs)
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        noise, log_std = jax.random.normal(key, mean.shape), jnp.clip(log_std, -5, 2)
        raw = mean + jnp.exp(log_std) * noise
        log_slope = 2 * (jnp.log(2.0) - raw - jax.nn.softplus(-2 * raw))  # of tanh
        log_prob = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi) - log_slope
        return jnp.tanh(raw), log_prob.sum(-1)

    def act(self, params, obs, key):
        return self.scaled(self.draw(params, obs, key)[0])

    def mode(self, params, obs, key):
        mean = self.actor.apply(params["actor"], obs)[..., : self.size]
        return self.scaled(jnp.tanh(mean))

    def scaled(self, action):
        """Maps `[S, size]` of [-1, 1] to actions of the environment."""
        action = action.reshape(len(action), *self.action_space.shape)
        return bounded(action, *self.bounds)

    def predict(self, params, obs):
        """Returns the most likely action for one observation, without a lane axis."""
        one = jax.tree.map(lambda x: jnp.asarray(x)[None], obs)
        return self.mode(params, one, None)[0]

    def values(self, critics, obs, action):
        """Returns the values of both critics, `[2, S]`."""
        value = jax.vmap(self.critic.apply, (0, None, None))
        return value(critics, obs, action)[..., 0]

    def loss(self, params, fixed, targets, row, keys):
        """Returns the loss of a batch, to differentiate by `params` alone."""
        config, alpha = self.config, jnp.exp(fixed["log_alpha"])
        action, log_prob = self.draw(fixed, row.next_obs, keys[0])
        next_value = self.values(targets, row.next_obs, action).min(0)
        discount = config.gamma * (1.0 - row.terminated)  # also where it was truncated
        reward = config.reward_scale * row.reward
        target = reward + discount * (next_value - alpha * log_prob)
        done = unbounded(row.action, *self.bounds).reshape(len(row.action), -1)
        error = self.values(params["critics"], row.obs, done) - target[None]
        action, log_prob = self.draw(params, row.obs, keys[1])
        value = self.values(fixed["critics"], row.obs, action).min(0)
        gain = value - alpha * log_prob
        # The temperature holds the entropy near -size.
        surplus = self.size - jax.lax.stop_gradient(log_prob)
        cost = (error**2).sum(0) - gain + params["log_alpha"] * surplus
        log = {"error": jnp.abs(error).mean(), "entropy": -log_prob.mean()}
        return cost.mean(), log | {"alpha": alpha}

    # In place, where the host calls it: the memory that it is given is deleted.
    @functools.partial(jax.jit, static_argnums=0, donate_argnames="memory", inline=True)
    def learn(self, learner, memory, t, key):
        """Adds a trajectory `[T, B, ...]`, and takes the gradient steps."""
        memory = self.buffer.add(memory, t)  # before it is read, so in place

        def step(learner, keys):
            params, targets, opt_state = learner
            batch: Any = self.buffer.sample(memory, keys[0], self.config.batch_size)
            row = batch.experience
            inputs = params, params, targets, row, keys[1:]
            grads, log = differentiate(self.loss, *inputs)
            change, opt_state = self.optimizer.update(grads, opt_state)
            params: Any = optax.apply_updates(params, change)
            rate = self.config.target_rate
            targets = optax.incremental_update(params["critics"], targets, rate)
            return (params, targets, opt_state), log

        keys = jax.random.split(key, (self.config.num_gradients, 3))
        learner, log = jax.lax.scan(step, learner, keys)
        return learner, memory, jax.tree.map(jnp.mean, log)

    def update(self, collector, state, key):
        """Steps and learns, `num_steps` times; returns the next state, and a log."""
        config = self.config

        def step(state, key):
            learner, memory, carry = state
            carry, t = collector.collect_steps(carry, learner[0], 1)
            learner, memory, log = self.learn(learner, memory, t, key)
            return (learner, memory, carry), (t, log)

        keys = jax.random.split(key, config.num_steps)
        begun = state.learner, state.memory, state.carry
        ended, (t, log) = training.scan(collector, step, begun, keys)
        learner, memory, carry = ended
        window = state.window.add(jax.tree.map(lambda x: x[:, 0], t))
        number = state.number + 1
        steps = (config.warmup + number * config.num_steps) * config.num_envs
        log = jax.tree.map(jnp.mean, log)
        log |= {"return": window.return_mean, "steps": steps}
        return State(learner, carry, window, number, memory), log


def main():
    return training.run(SAC, Config(), ["error", "entropy", "alpha"])


if __name__ == "__main__":
    main()
