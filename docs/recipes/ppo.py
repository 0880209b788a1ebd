"""Proximal policy optimization (arXiv:1707.06347), discrete and continuous."""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import rollout


class Config(NamedTuple):
    num_updates: int = 60
    num_envs: int = 64
    num_steps: int = 128  # of each environment in an update
    num_epochs: int = 4
    num_minibatches: int = 8
    learning_rate: float = 2.5e-3  # of the first update; falls to 0
    gamma: float = 0.99
    lam: float = 0.95  # of the advantages
    clip: float = 0.2  # of the ratio of probabilities
    value_clip: float = jnp.inf
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_grad_norm: float = 0.5
    hidden: int = 64
    activation: Any = nn.tanh


class Categorical(NamedTuple):
    logits: jax.Array  # [..., number of actions]

    def sample(self, key):
        return jax.random.categorical(key, self.logits)

    def mode(self):
        return self.logits.argmax(-1)

    def log_prob(self, action):
        cost = optax.softmax_cross_entropy_with_integer_labels
        return -cost(self.logits, action)

    def entropy(self):
        log_probs = jax.nn.log_softmax(self.logits)
        return -(jnp.exp(log_probs) * log_probs).sum(-1)


class Gaussian(NamedTuple):
    mean: jax.Array  # [..., size of the action]
    log_std: jax.Array

    def sample(self, key):
        noise = jax.random.normal(key, self.mean.shape)
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self):
        return self.mean

    def log_prob(self, action):
        logpdf = jax.scipy.stats.norm.logpdf
        return logpdf(action, self.mean, jnp.exp(self.log_std)).sum(-1)

    def entropy(self):
        return (self.log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e)).sum(-1)


class ActorCritic(nn.Module):
    action_space: Any
    hidden: int
    activation: Any

    @nn.compact
    def __call__(self, obs):
        def mlp(num_outputs, scale):
            init, x = nn.initializers.orthogonal, obs
            for _ in range(2):
                x = nn.Dense(self.hidden, kernel_init=init(2**0.5))(x)
                x = self.activation(x)
            return nn.Dense(num_outputs, kernel_init=init(scale))(x)

        value = mlp(1, 1.0)[..., 0]
        if hasattr(self.action_space, "n"):
            return Categorical(mlp(self.action_space.n, 0.01)), value
        mean = mlp(self.action_space.shape[0], 0.01)
        log_std = self.param("log_std", nn.initializers.zeros, mean.shape[-1:])
        return Gaussian(mean, jnp.broadcast_to(log_std, mean.shape)), value


def loss(config, dist, value, t, advantage):
    """Returns the loss of a minibatch of transitions, and what to log."""

    def mean(x):
        return x.mean(where=t.mask)

    log_ratio = dist.log_prob(t.action) - t.extras["log_prob"]
    ratio = jnp.exp(log_ratio)
    scaled = (advantage - mean(advantage)) / (advantage.std(where=t.mask) + 1e-8)
    clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    gain = mean(jnp.minimum(ratio * scaled, clipped * scaled))
    old, target = t.extras["value"], t.extras["value"] + advantage
    near = old + jnp.clip(value - old, -config.value_clip, config.value_clip)
    error = mean(jnp.maximum((value - target) ** 2, (near - target) ** 2))
    entropy = mean(dist.entropy())
    log = {
        "entropy": entropy,
        "kl": mean(ratio - 1 - log_ratio),
        "clip_fraction": mean(ratio != clipped),
        "explained_variance": 1
        - advantage.var(where=t.mask) / target.var(where=t.mask),
    }
    cost = 0.5 * config.value_weight * error - config.entropy_weight * entropy
    return cost - gain, log


class PPO:
    """A policy, a critic, and how they learn; parameters are arguments."""

    axis = None  # of the trajectory that minibatches split; None: single rows

    def __init__(self, action_space, config):
        self.config = config
        self.network = ActorCritic(action_space, config.hidden, config.activation)
        counts = config.num_updates, config.num_epochs, config.num_minibatches
        rate = optax.linear_schedule(config.learning_rate, 0.0, math.prod(counts))
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        # Of all parameters as one vector, for a few large operations.
        self.optimizer = optax.flatten(optax.chain(clip, optax.adam(rate, eps=1e-5)))
        self.policy = self.make_policy()

    def make_policy(self):
        functions = {"mode_fn": self.mode, "value_fn": self.value}
        return rollout.stateless_policy(self.act, **functions)

    def act(self, params, obs, key):
        dist, value = self.network.apply(params, obs)
        action = dist.sample(key)
        return action, {"log_prob": dist.log_prob(action), "value": value}

    def mode(self, params, obs, key):
        return self.network.apply(params, obs)[0].mode()

    def value(self, params, obs):
        return self.network.apply(params, obs)[1]

    def init(self, key, *inputs):
        # Under `vmap` one seed at a time: on few CPU cores, the decompositions of
        # `orthogonal` wait for each other forever if they are batched (jax 0.10).
        params = jax.custom_batching.sequential_vmap(self.network.init)(key, *inputs)
        return params, self.optimizer.init(params)

    def cost(self, params, t, advantage):
        dist, value = self.network.apply(params, t.obs)
        return loss(self.config, dist, value, t, advantage)

    def learn(self, learner, t, next_value, key):
        """Takes the gradient steps of one update from a trajectory `[T, B, ...]`."""

        def step(learner, rows):
            params, opt_state = learner
            grads, log = jax.grad(self.cost, has_aux=True)(params, *rows)
            change, opt_state = self.optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, change), opt_state), log

        config = self.config
        value, flags = t.extras["value"], (t.terminated, t.truncated)
        options = {"gamma": config.gamma, "lam": config.lam, "mask": t.mask}
        advantage = rollout.gae(t.reward, value, next_value, *flags, **options)
        counts = config.num_minibatches, config.num_epochs
        learner, log = rollout.scan_minibatches(
            step, learner, key, (t, advantage), *counts, axis=self.axis
        )
        return learner, jax.tree.map(jnp.mean, log)


def train(agent, collector, key):
    """Trains from a key on: returns parameters, the last carry, and a log by update."""

    def update(state, key):
        carry, window, learner = state
        carry, t = collector.collect_steps(carry, learner[0], agent.config.num_steps)
        last_value = collector.value(carry, learner[0])
        next_value = rollout.next_values(t, t.extras["value"], last_value)
        learner, log = agent.learn(learner, t, next_value, key)
        window = window.add(t)
        log |= {"return": window.return_mean, "steps": carry.step * t.mask.shape[1]}
        return (carry, window, learner), log

    carry_key, agent_key, key = jax.random.split(key, 3)
    carry = collector.init(carry_key)
    learner = agent.init(agent_key, carry.obs)
    keys = jax.random.split(key, agent.config.num_updates)
    state = carry, rollout.EpisodeWindow.create(100), learner
    (carry, _, (params, _)), log = jax.lax.scan(update, state, keys)
    return params, carry, log
