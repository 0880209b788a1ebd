"""PPO and DQN made of this library, for `learning_compared.py`.

Networks, losses and settings are those of PureJaxRL's `ppo.py` and `dqn.py`. Each
training is one program, from a key to parameters.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import rollout


class PPO(NamedTuple):
    """Settings of PPO, by default those of PureJaxRL's `ppo.py`."""

    env_id: str
    num_updates: int
    num_envs: int = 4
    num_steps: int = 128
    num_minibatches: int = 4
    num_epochs: int = 4
    learning_rate: float = 2.5e-4  # falls linearly to 0
    entropy: float = 0.01
    hidden: int = 64
    activation: str = "tanh"
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    value: float = 0.5
    max_grad_norm: float = 0.5

    @property
    def total_steps(self) -> int:
        """Environment steps of a training."""
        return self.num_updates * self.num_steps * self.num_envs

    def rate(self, count: jax.Array) -> jax.Array:
        """The learning rate after so many gradient steps: constant within an update."""
        update = count // (self.num_minibatches * self.num_epochs)
        return self.learning_rate * (1 - update / self.num_updates)


class DQN(NamedTuple):
    """Settings of DQN, by default those of PureJaxRL's `dqn.py`."""

    env_id: str
    num_updates: int  # environment steps of each lane
    num_envs: int = 10
    capacity: int = 10_000
    batch_size: int = 128
    learning_rate: float = 2.5e-4
    last_epsilon: float = 0.05  # from 1, after half of the steps
    learning_starts: int = 10_000
    target_period: int = 500  # environment steps
    hidden: tuple[int, int] = (120, 84)
    gamma: float = 0.99

    @property
    def total_steps(self) -> int:
        """Environment steps of a training."""
        return self.num_updates * self.num_envs


class Learner(NamedTuple):
    """A training, and the policy that it learns.

    Attributes:
        train: a key to parameters.
        act: `(params, obs, key)` to actions, `[B, ...]`: drawn with PPO, greedy with
            DQN.
        init: of ours with PPO, two keys to what `update` carries.
        update: `(carried, key)` to the same and None.
    """

    train: Callable[[jax.Array], Any]
    act: Callable[[Any, jax.Array, jax.Array], jax.Array]
    init: Callable[[jax.Array, jax.Array], Any] | None = None
    update: Callable[[Any, jax.Array], tuple[Any, None]] | None = None


def make_env(env_id: str) -> Any:
    """Makes an environment whose observations are flat."""
    if env_id.startswith("brax:"):
        return rollout.envs.make(env_id, backend="positional")
    return rollout.envs.TransformObs(rollout.envs.make(env_id), jnp.ravel)


def pick(values: jax.Array, action: jax.Array) -> jax.Array:
    """Picks the value of each action, `[..., A]` to `[...]`.

    By a product, because the gradient of an index is a scatter, which XLA turns into a
    loop over the rows on a CPU.
    """
    return (values * jax.nn.one_hot(action, values.shape[-1])).sum(axis=-1)


class Categorical(NamedTuple):
    """A distribution over discrete actions."""

    logits: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        """Draws actions."""
        return jax.random.categorical(key, self.logits)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Computes the log-probability of actions."""
        return pick(jax.nn.log_softmax(self.logits), action)

    def entropy(self) -> jax.Array:
        """Computes the entropy."""
        every = jax.nn.log_softmax(self.logits)
        return -(jnp.exp(every) * every).sum(axis=-1)


class Gaussian(NamedTuple):
    """A diagonal normal distribution."""

    mean: jax.Array
    log_std: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        """Draws actions, which may leave the space."""
        noise = jax.random.normal(key, self.mean.shape)
        return self.mean + jnp.exp(self.log_std) * noise

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Computes the log-probability of actions."""
        logpdf = jax.scipy.stats.norm.logpdf
        return logpdf(action, self.mean, jnp.exp(self.log_std)).sum(axis=-1)

    def entropy(self) -> jax.Array:
        """Computes the entropy."""
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(axis=-1)


class ActorCritic(nn.Module):
    """Two networks of two layers, orthogonal weights."""

    action_space: Any
    hidden: int
    activation: str

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[Any, jax.Array]:
        """Maps `[..., D]` observations to a distribution and `[...]` values."""
        orthogonal = nn.initializers.orthogonal

        def mlp(size: int, scale: float) -> jax.Array:
            x = obs
            for _ in range(2):
                x = nn.Dense(self.hidden, kernel_init=orthogonal(math.sqrt(2)))(x)
                x = getattr(nn, self.activation)(x)
            return nn.Dense(size, kernel_init=orthogonal(scale))(x)

        if hasattr(self.action_space, "n"):
            return Categorical(mlp(self.action_space.n, 0.01)), mlp(1, 1.0)[..., 0]
        (size,) = self.action_space.shape
        mean = mlp(size, 0.01)
        log_std = self.param("log_std", nn.initializers.zeros, (size,))
        return Gaussian(mean, jnp.broadcast_to(log_std, mean.shape)), mlp(1, 1.0)[
            ..., 0
        ]


def make_optimizer(config: PPO) -> optax.GradientTransformation:
    """Makes PPO's optimizer."""
    adam = optax.adam(config.rate, eps=1e-5)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam)


def ppo_step(network: ActorCritic, config: PPO, state: Any, batch: Any) -> Any:
    """One gradient step of `(params, opt_state)` on rows `(obs, extras, gae)`."""

    def loss(params: Any) -> jax.Array:
        obs, old, gae = batch
        pi, value = network.apply(params, obs)
        target = gae + old["value"]
        near = old["value"] + (value - old["value"]).clip(-config.clip, config.clip)
        error = jnp.maximum(jnp.square(value - target), jnp.square(near - target))
        ratio = jnp.exp(pi.log_prob(old["action"]) - old["log_prob"])
        clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
        gae = (gae - gae.mean()) / (gae.std() + 1e-8)
        gain = jnp.minimum(ratio * gae, clipped * gae).mean()
        bonus = config.entropy * pi.entropy().mean()
        return 0.5 * config.value * error.mean() - gain - bonus

    params, opt_state = state
    grads = jax.grad(loss)(params)
    updates, opt_state = make_optimizer(config).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def ppo(config: PPO, *, limit_is_failure: bool = False, **options: Any) -> Learner:
    """Makes PPO; with `limit_is_failure` it takes a time limit for a termination."""
    env = rollout.envs.vectorize(make_env(config.env_id), config.num_envs, **options)
    network = ActorCritic(env.action_space, config.hidden, config.activation)
    optimizer = make_optimizer(config)

    def act(params: Any, obs: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        pi, value = network.apply(params, obs)
        action = pi.sample(key)
        extras = {"action": action, "log_prob": pi.log_prob(action), "value": value}
        # A robot takes actions in [-1, 1]; the loss is that of the action drawn.
        legal = action if hasattr(env.action_space, "n") else action.clip(-1.0, 1.0)
        return legal, extras

    def critic(params: Any, obs: jax.Array, state: Any) -> jax.Array:
        return network.apply(params, obs)[1]

    policy = rollout.stateless_policy(act)
    collector = rollout.Collector(env=env, policy=policy, value_fn=critic)

    def update(state: Any, key: jax.Array) -> tuple[Any, None]:
        carry, params, opt_state = state
        carry, t = collector.collect_steps(carry, params, config.num_steps)
        if limit_is_failure:
            t = t.replace(terminated=t.done, truncated=jnp.zeros_like(t.truncated))
        next_value = rollout.next_values(t, critic(params, carry.obs, ()))
        gae = rollout.gae(t, next_value, gamma=config.gamma, lam=config.lam)
        batch = t.obs, t.extras, gae

        def learn(state: Any, minibatch: Any) -> tuple[Any, None]:
            return ppo_step(network, config, state, minibatch), None

        counts = config.num_minibatches, config.num_epochs
        state = params, opt_state
        learnt, _ = rollout.scan_minibatches(learn, state, key, batch, *counts)
        return (carry, *learnt), None

    def init(init_key: jax.Array, carry_key: jax.Array) -> Any:
        carry = collector.init(carry_key)
        params = network.init(init_key, carry.obs)
        return carry, params, optimizer.init(params)

    def train(key: jax.Array) -> Any:
        init_key, carry_key, update_key = jax.random.split(key, 3)
        state = init(init_key, carry_key)
        keys = jax.random.split(update_key, config.num_updates)
        return jax.lax.scan(update, state, keys)[0][1]

    return Learner(train, lambda *args: act(*args)[0], init, update)


class QNetwork(nn.Module):
    """The values of all actions."""

    num_actions: int
    hidden: tuple[int, int]

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Maps `[..., D]` observations to `[..., A]` values."""
        for size in self.hidden:
            obs = nn.relu(nn.Dense(size)(obs))
        return nn.Dense(self.num_actions)(obs)


def dqn(config: DQN, *, limit_is_failure: bool = False) -> Learner:
    """Makes DQN; with `limit_is_failure` it takes a time limit for a termination."""
    env = rollout.envs.vectorize(make_env(config.env_id), config.num_envs)
    network = QNetwork(env.action_space.n, config.hidden)
    optimizer = optax.adam(config.learning_rate)
    buffer = rollout.buffers.ReplayBuffer(config.capacity, config.num_envs)

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        return network.apply(params, obs).argmax(axis=-1)

    fall = optax.linear_schedule(1.0, config.last_epsilon, config.num_updates // 2)
    num_first = config.learning_starts // config.num_envs
    policy = rollout.epsilon_greedy(
        rollout.stateless_policy(act),
        env.action_space,
        lambda step: jnp.where(step < num_first, 1.0, fall(step)),
    )
    collector = rollout.Collector(env=env, policy=policy)

    def loss(params: Any, target_params: Any, t: rollout.Transition) -> jax.Array:
        next_value = network.apply(target_params, t.next_obs).max(axis=-1)
        is_over = t.done if limit_is_failure else t.terminated
        target = t.reward + config.gamma * (1 - is_over) * next_value
        value = pick(network.apply(params, t.obs), t.action)
        return jnp.square(value - target).mean()

    def update(target_params: Any, state: Any, key: jax.Array) -> tuple[Any, None]:
        carry, params, opt_state, ring = state
        carry, ring = collector.fold_steps(carry, params, buffer.add, ring, num_steps=1)
        batch = buffer.sample(ring, key, config.batch_size).experience
        grads = jax.grad(loss)(params, target_params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (carry, optax.apply_updates(params, updates), opt_state, ring), None

    def period(state: Any, keys: jax.Array) -> tuple[Any, None]:
        return jax.lax.scan(functools.partial(update, state[1]), state, keys)

    def train(key: jax.Array) -> Any:
        init_key, carry_key, sample_key = jax.random.split(key, 3)
        carry = collector.init(carry_key)
        params = network.init(init_key, carry.obs)
        ring = buffer.init(collector, params)
        carry, ring = collector.fold_steps(
            carry, params, buffer.add, ring, num_steps=num_first
        )
        length = config.target_period // config.num_envs
        num_periods = (config.num_updates - num_first) // length
        keys = jax.random.split(sample_key, (num_periods, length))
        state = carry, params, optimizer.init(params), ring
        return jax.lax.scan(period, state, keys)[0][1]

    return Learner(train, act)


def make(config: PPO | DQN, **options: Any) -> Learner:
    """Makes the learner of these settings."""
    return ppo(config, **options) if isinstance(config, PPO) else dqn(config, **options)
