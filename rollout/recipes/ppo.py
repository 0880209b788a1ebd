"""Proximal policy optimization (arXiv:1707.06347), for every space, in JAX or not.

    python -m rollout.recipes.ppo CartPole-v1

Copy this file and change it; it may change here, too.
"""

import argparse
import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import struct

import rollout
from rollout import envs
from rollout.envs.wrappers import flatten_obs, mask_in
from rollout.recipes.distributions import Joint


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


class Categorical(struct.PyTreeNode):
    logits: jax.Array  # [..., number of actions]
    start: int = struct.field(pytree_node=False, default=0)  # the smallest action

    def sample(self, key):
        return self.start + jax.random.categorical(key, self.logits)

    def mode(self):
        return self.start + self.logits.argmax(-1)

    def log_prob(self, action):
        cost = optax.softmax_cross_entropy_with_integer_labels
        return -cost(self.logits, action - self.start)

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
    observation_space: Any = None  # flattened, if it is given

    @nn.compact
    def __call__(self, obs):
        space, mask = self.action_space, mask_in(obs)
        if self.observation_space is not None:
            obs = flatten_obs(self.observation_space, obs)

        def mlp(num_outputs, scale):
            init, x = nn.initializers.orthogonal, obs
            for _ in range(2):
                x = nn.Dense(self.hidden, kernel_init=init(2**0.5))(x)
                x = self.activation(x)
            return nn.Dense(num_outputs, kernel_init=init(scale))(x)

        value = mlp(1, 1.0)[..., 0]
        if hasattr(space, "n"):
            logits = mlp(space.n, 0.01)
            logits = logits if mask is None else jnp.where(mask, logits, -1e9)
            return Categorical(logits, space.start), value
        is_flat = len(space.shape or ()) == 1 and hasattr(space, "low")
        if is_flat and jnp.issubdtype(space.dtype, jnp.floating):
            mean = mlp(space.shape[0], 0.01)
            log_std = self.param("log_std", nn.initializers.zeros, mean.shape[-1:])
            return Gaussian(mean, jnp.broadcast_to(log_std, mean.shape)), value
        sizes = Joint(space)
        log_std = self.param("log_std", nn.initializers.zeros, (sizes.num_reals,))
        log_std = jnp.broadcast_to(log_std, (*value.shape, sizes.num_reals))
        return Joint(space, mlp(sizes.num_outputs, 0.01), log_std, mask), value


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

    def __init__(self, action_space, config, observation_space=None):
        self.config, sizes = config, (config.hidden, config.activation)
        self.network = ActorCritic(action_space, *sizes, observation_space)
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

    def cost(self, params, t, advantage):
        dist, value = self.network.apply(params, t.obs)
        return loss(self.config, dist, value, t, advantage)

    @functools.partial(jax.jit, static_argnums=0, inline=True)
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


class State(NamedTuple):
    """Everything that a training goes on from; a pytree for `rollout.checkpoint`."""

    learner: Any  # parameters, state of the optimizer
    carry: Any
    window: Any  # of the last 100 episodes
    number: Any  # of updates so far

    @property
    def params(self):
        return self.learner[0]


def begin(agent, collector, keys):
    """Returns the state of a training that begins, from two keys."""
    carry = collector.init(keys[0])
    learner, window = agent.init(keys[1], carry.obs), rollout.EpisodeWindow.create(100)
    return State(learner, carry, window, jnp.int32(0))


def train(agent, collector, key, state=None, num_updates=None):
    """Trains, in JAX inside `jit` or outside, on the host outside.

    Args:
        agent: a `PPO`.
        collector: a `Collector` or a `HostCollector` of its policy.
        key: of the whole training.
        state: of an earlier call with the same key, to go on from; None to begin.
        num_updates: by default `config.num_updates`, those of the whole training.

    Returns:
        The last `State`, and a log, `[num_updates]` by name.
    """

    def update(state, key):
        params = state.params
        carry, t = collector.collect_steps(state.carry, params, agent.config.num_steps)
        last_value = collector.value(carry, params)
        next_value = rollout.next_values(t, t.extras["value"], last_value)
        learner, log = agent.learn(state.learner, t, next_value, key)
        window, number = state.window.add(t), state.number + 1
        log |= {"return": window.return_mean, "steps": number * t.mask.size}
        return State(learner, carry, window, number), log

    *first, key = jax.random.split(key, 3)
    state = begin(agent, collector, first) if state is None else state
    keys = jax.random.split(key, agent.config.num_updates)
    size = num_updates or agent.config.num_updates
    keys = jax.lax.dynamic_slice_in_dim(keys, state.number, size)
    if isinstance(collector, rollout.Collector):
        return jax.lax.scan(update, state, keys)
    logs = []
    for key in keys:
        state, log = update(state, key)
        logs.append(log)
    return state, jax.tree.map(lambda *x: jnp.stack(x), *logs)


def make_env(env_id, num_envs, normalize):
    """Makes environments of any suite, or `gymnasium:` and an id of Gymnasium."""
    suite, _, name = env_id.rpartition(":")
    if suite == "gymnasium":
        env = envs.from_gymnasium(functools.partial(make_host, name), num_envs)
        return envs.NormalizeHost(env) if normalize else env
    env = envs.make(env_id)
    space = env.action_space
    if hasattr(space, "low") and jnp.issubdtype(space.dtype, jnp.floating):
        env = envs.RescaleAction(env)  # a Gaussian draws beyond every bound
    env = envs.vectorize(env, num_envs)
    return envs.NormalizeReward(envs.NormalizeObs(env)) if normalize else env


def make_host(env_id):
    import gymnasium

    env = gymnasium.make(env_id, render_mode="rgb_array")
    is_box = isinstance(env.action_space, gymnasium.spaces.Box)
    return gymnasium.wrappers.ClipAction(env) if is_box else env


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("env_id", help="such as CartPole-v1 or gymnasium:CartPole-v1")
    for name in ("num_updates", "num_envs", "num_steps", "learning_rate", "gamma"):
        default = getattr(Config(num_updates=40), name)
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--normalize", action="store_true", help="obs and rewards")
    parser.add_argument("--resume", action="store_true", help="from agent.checkpoint")
    options = vars(parser.parse_args())
    env_id, seed, normalize, resume = (
        options.pop(name) for name in ("env_id", "seed", "normalize", "resume")
    )
    config, key = Config(**options), jax.random.key(seed)
    env = make_env(env_id, config.num_envs, normalize)
    is_host = not hasattr(env, "reset_done")
    agent = PPO(env.action_space, config, env.observation_space)
    kind: Any = rollout.HostCollector if is_host else rollout.Collector
    collector = kind(env=env, policy=agent.policy)
    state = begin(agent, collector, jax.random.split(key, 3)[:2])
    run = functools.partial(train, agent, collector)
    run = run if is_host else jax.jit(run, static_argnames="num_updates")
    # Host environments cannot all be saved: they begin new episodes.
    keep = lambda state: state._replace(carry=()) if is_host else state  # noqa: E731
    lines = ["steps,return,kl,entropy,explained_variance"]
    if resume:
        saved = rollout.checkpoint.restore("agent.checkpoint", keep(state))
        state = saved._replace(carry=state.carry) if is_host else saved
        with open("agent.csv") as file:
            lines = file.read().splitlines()[: 1 + int(state.number)]
    while (left := config.num_updates - int(state.number)) > 0:
        state, log = run(key, state, num_updates=min(10, left))
        columns = [np.asarray(log[name]).tolist() for name in lines[0].split(",")]
        lines += [",".join(map(str, row)) for row in zip(*columns, strict=True)]
        with open("agent.csv", "w") as file:
            file.write("\n".join(lines) + "\n")
        rollout.checkpoint.save("agent.checkpoint", keep(state))
        print(f"{log['steps'][-1]:>12,} steps, return {log['return'][-1]:.6g}")
    judge = collector.freeze(state.carry) if normalize else collector
    print(rollout.evaluate(judge, key, state.params, num_episodes=100))
    curve = np.loadtxt("agent.csv", delimiter=",", skiprows=1, ndmin=2)
    plt.plot(curve[:, 0], curve[:, 1])
    plt.gca().set(xlabel="environment steps", ylabel="mean return, last 100 episodes")
    plt.savefig("agent.png")
    try:
        path, limit = "agent.gif", {"max_episode_steps": 200}
        rollout.record_gif(judge, key, state.params, path, **limit)
    except Exception as error:  # an environment may have no drawing
        print(f"no GIF: {error}")


if __name__ == "__main__":
    main()
