"""Proximal policy optimization (arXiv:1707.06347), for every space, in JAX or not.

    python -m rollout.recipes.ppo CartPole-v1

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
from rollout.envs.spaces import as_space
from rollout.envs.wrappers import mask_in
from rollout.recipes import training
from rollout.recipes.distributions import (
    Categorical,
    Gaussian,
    Joint,
    in_turn,
    num_values,
)
from rollout.recipes.gradients import gradient
from rollout.recipes.training import State
from rollout.recipes.training import begin as begin
from rollout.recipes.training import train as train


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


class ActorCritic(nn.Module):
    action_space: Any
    config: Config
    observation_space: Any = None  # flattened, if it is given

    @nn.compact
    def __call__(self, obs):
        mask, obs = mask_in(obs), training.flat(self.observation_space)(obs)

        def dense(x, size, scale):
            return nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))(x)

        def hidden():
            x = obs
            for _ in range(2):
                x = self.config.activation(dense(x, self.config.hidden, 2**0.5))
            return x

        value = dense(hidden(), 1, 1.0)[..., 0]
        x, space, parts, num_flags = hidden(), as_space(self.action_space), [], 0
        for part in space.leaves():
            counts, shape = num_values(part), part.shape
            size = max(1, counts.max(initial=0))
            outputs = dense(x, counts.size * size, 0.01)
            outputs = outputs.reshape(*value.shape, *shape, size)
            if jnp.issubdtype(part.dtype, jnp.floating):
                mean, name = outputs[..., 0], f"log_std_{len(parts)}"
                log_std = self.param(name, nn.initializers.zeros, shape)
                log_std = jnp.broadcast_to(log_std, mean.shape)
                bounds = tuple(in_turn(x, shape) for x in part.bounds)
                parts.append(Gaussian(mean, log_std, bounds, shape))
                continue
            # Entries with fewer values than others have logits that are not allowed.
            each = np.arange(size) < counts[..., None]
            flag = num_flags + np.cumsum(each).reshape(each.shape) - 1
            num_flags += each.sum()
            allowed = jnp.broadcast_to(each, outputs.shape)
            if mask is not None:
                flags = mask.reshape(*value.shape, -1).astype(bool)
                allowed &= flags[..., flag]
            logits = jnp.where(allowed, outputs, -1e9)
            start = in_turn(part.bounds[0], shape)
            parts.append(Categorical(logits, start, shape, part.dtype))
        if mask is not None and mask.size != value.size * num_flags:
            raise ValueError(
                f"`action_mask` must have {num_flags} flags, one for each value of an "
                f"action, got {mask.size // value.size}."
            )
        one = jax.tree.structure(jax.eval_shape(space.sample, jax.random.key(0)))
        is_leaf = jax.tree_util.treedef_is_leaf(one)
        return (parts[0] if is_leaf else Joint(parts, one)), value


def loss(config, dist, value, t, advantage, whole=None):
    """Returns the loss of a minibatch of transitions, and what to log.

    Of a part of a minibatch, its share in them: `whole` is `t, advantage` of all.
    """
    t_all, every = whole or (t, advantage)
    num_rows = jnp.maximum(t_all.mask.sum(), 1)  # all may be masked out

    def mean(x, mask=t.mask):
        return jnp.sum(x, where=mask) / num_rows

    def variance(x):  # of all rows
        return mean((x - mean(x, t_all.mask)) ** 2, t_all.mask)

    drawn = t.extras.get("drawn", t.action)
    log_ratio = dist.log_prob(drawn) - t.extras["log_prob"]
    ratio = jnp.exp(log_ratio)
    scaled = advantage - mean(every, t_all.mask)
    scaled /= jnp.sqrt(variance(every)) + 1e-8
    clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    gain = mean(jnp.minimum(ratio * scaled, clipped * scaled))
    old, target = t.extras["value"], t.extras["value"] + advantage
    near = old + jnp.clip(value - old, -config.value_clip, config.value_clip)
    error = mean(jnp.maximum((value - target) ** 2, (near - target) ** 2))
    entropy = mean(dist.entropy())
    explained = 1 - variance(every) / variance(t_all.extras["value"] + every)
    log = {
        "entropy": entropy,
        "kl": mean(ratio - 1 - log_ratio),
        "clip_fraction": mean(ratio != clipped),
        "explained_variance": mean(jnp.ones_like(value)) * explained,
    }
    cost = 0.5 * config.value_weight * error - config.entropy_weight * entropy
    return cost - gain, log


class PPO:
    """Trains an agent by proximal policy optimization (PPO).

    Args:
        action_space: of one environment.
        config: the settings.
        observation_space: of one environment, to flatten observations of any space;
            None if they are vectors.
        network: `(action_space, config)` to a module that maps observations to
            distributions and values, in place of `ActorCritic`.
    """

    axis = None  # of the trajectory that minibatches split; None: single rows

    def __init__(self, action_space, config, observation_space=None, network=None):
        self.config = config
        make = functools.partial(ActorCritic, observation_space=observation_space)
        self.network = (network or make)(action_space, config)
        counts = config.num_updates, config.num_epochs, config.num_minibatches
        rate = optax.linear_schedule(config.learning_rate, 0.0, math.prod(counts))
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        # Of all parameters as one vector, for a few large operations.
        self.optimizer = optax.flatten(optax.chain(clip, optax.adam(rate, eps=1e-5)))
        self.policy = self.final_policy = self.make_policy()

    def make_policy(self):
        def mode(*inputs):
            return self.mode(*inputs), ()  # an action may be a tuple itself

        functions = {"mode_fn": mode, "value_fn": self.value}
        return rollout.stateless_policy(self.act, **functions)

    def act(self, params, obs, key):
        dist, value = self.network.apply(params, obs)
        drawn = dist.sample(key)
        action = dist.bounded(drawn)
        extras = {"log_prob": dist.log_prob(drawn), "value": value}
        return action, extras | ({} if action is drawn else {"drawn": drawn})

    def mode(self, params, obs, key):
        dist = self.network.apply(params, obs)[0]
        return dist.bounded(dist.mode())

    def predict(self, params, obs):
        """Returns the most likely action for one observation, without a lane axis."""
        one = jax.tree.map(lambda x: jnp.asarray(x)[None], obs)
        return jax.tree.map(lambda x: x[0], self.mode(params, one, None))

    def value(self, params, obs):
        return self.network.apply(params, obs)[1]

    def init(self, key, *inputs):
        # Under `vmap` one seed at a time: on few CPU cores, the decompositions of
        # `orthogonal` wait for each other forever if they are batched (jax 0.10).
        params = jax.custom_batching.sequential_vmap(self.network.init)(key, *inputs)
        return params, self.optimizer.init(params)

    def cost(self, params, t, advantage, whole=None):
        dist, value = self.network.apply(params, t.obs)
        return loss(self.config, dist, value, t, advantage, whole)

    def gradient(self, params, t, advantage):
        """Differentiates the cost of a minibatch; returns also what to log."""
        return gradient(self.cost, params, t, advantage)

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def learn(self, learner, t, next_value, key):
        """Takes the gradient steps of one update from a trajectory `[T, B, ...]`."""

        def step(learner, rows):
            params, opt_state = learner
            grads, log = self.gradient(params, *rows)
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

    def update(self, collector, state, key):
        """Collects, and learns from it; returns the next state, and what to log."""
        if collector.policy != self.policy:  # such as one that adds noise
            raise ValueError(
                "`collector` must play `agent.policy`, got another policy: its "
                "`log_prob` may not be that of the action that it took."
            )
        params = state.params
        carry, t = collector.collect_steps(state.carry, params, self.config.num_steps)
        last_value = collector.value(carry, params)
        next_value = rollout.next_values(t, t.extras["value"], last_value)
        learner, log = self.learn(state.learner, t, next_value, key)
        window, number = state.window.add(t), state.number + 1
        log |= {"return": window.return_mean, "steps": number * t.mask.size}
        return State(learner, carry, window, number), log


def main():
    columns = "kl", "entropy", "explained_variance"
    return training.run(PPO, Config(num_updates=40), columns)


if __name__ == "__main__":
    main()
