"""Recurrent PPO: proximal policy optimization (arXiv:1707.06347) with a memory.

    python -m rollout.recipes.recurrent_ppo CartPole-v1

Use it in environments whose observations hide part of the state. The order is the
paper's: config, network, rollout, advantages, loss, update. Copy this file and change
it.
"""

import dataclasses
import functools
from typing import Any, Self

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

import rollout
from rollout.distributions import ActionDistribution
from rollout.envs.spaces import EnvSpec, env_spec
from rollout.envs.types import AnySpace, ArrayTree
from rollout.envs.wrappers import flatten_obs, mask_in, normalize_obs
from rollout.minibatches import mean_gradient
from rollout.platform import dot_general
from rollout.training import make_collector, scan_updates


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters, named as in PureJaxRL and Stable-Baselines3."""

    num_updates: int = 60
    num_steps: int = 128  # steps per environment in each update
    num_epochs: int = 4
    num_minibatches: int = 8  # of whole environments, so it divides their number
    learning_rate: float | optax.Schedule = 2.5e-3  # schedule: of gradient steps
    anneal_lr: bool = True  # decays a number linearly to 0 over `num_updates`
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_eps: float = 0.2
    clip_range_vf: float | None = None  # clip range of the value function
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    max_grad_norm: float = 0.5
    target_kl: float | None = None  # an update stops beyond 1.5 times this KL
    cell: str = "GRUCell"  # name of a cell of `flax.linen`, or "OptimizedLSTMCell"
    memory_size: int = 64
    hidden_layer_sizes: tuple[int, ...] = (64, 64)  # of actor and critic
    activation: str = "tanh"  # name of a function of `flax.linen`

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some hyperparameters changed."""
        return dataclasses.replace(self, **changes)


class MLP(nn.Module):
    """A multilayer perceptron, `[..., num_inputs]` to `[..., num_outputs]`."""

    hidden_layer_sizes: tuple[int, ...]
    num_outputs: int
    output_scale: float
    activation: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the hidden layers and the output layer."""

        def dense(size: int, scale: float) -> nn.Dense:
            kernel_init = nn.initializers.orthogonal(scale)
            return nn.Dense(size, kernel_init=kernel_init, dot_general=dot_general)

        for size in self.hidden_layer_sizes:
            x = getattr(nn, self.activation)(dense(size, 2**0.5)(x))
        return dense(self.num_outputs, self.output_scale)(x)


class ActorCritic(nn.Module):
    """A recurrent cell, followed by a multilayer perceptron each for actor and critic.

    The actor and the critic share the cell.
    """

    distribution: ActionDistribution
    observation_space: AnySpace
    cell: str
    memory_size: int
    hidden_layer_sizes: tuple[int, ...]
    activation: str

    def setup(self) -> None:
        """Creates the layers."""
        sizes, num_log_stds = self.hidden_layer_sizes, self.distribution.num_log_stds
        num_outputs = self.distribution.num_params - num_log_stds
        self.recurrent_cell = getattr(nn, self.cell)(self.memory_size)
        self.actor = MLP(sizes, num_outputs, 0.01, self.activation)
        self.critic = MLP(sizes, 1, 1.0, self.activation)
        if num_log_stds:  # standard deviations do not depend on the observation
            zeros = nn.initializers.zeros
            self.log_std = self.param("log_std", zeros, (num_log_stds,))

    @nn.nowrap
    def initialize_memory(self, num_envs: int) -> ArrayTree:
        """Returns the memory at the start of an episode, `[num_envs, memory_size]`."""
        cell = getattr(nn, self.cell)(self.memory_size, parent=None)
        return cell.initialize_carry(jax.random.key(0), (num_envs, self.memory_size))

    def encode(self, memory: ArrayTree, obs: ArrayTree) -> tuple[ArrayTree, jax.Array]:
        """Maps memory and `[B, *shape]` observations to memory and features."""
        obs = flatten_obs(self.observation_space, obs)
        return self.recurrent_cell(memory, obs)

    def heads(self, features: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `[..., memory_size]` features to `[..., num_params]` and `[...]`."""
        value, outputs = self.critic(features)[..., 0], self.actor(features)
        if num_log_stds := self.distribution.num_log_stds:
            log_std = jnp.broadcast_to(self.log_std, (*value.shape, num_log_stds))
            outputs = jnp.concatenate([outputs, log_std], axis=-1)
        return outputs, value

    def __call__(
        self, memory: ArrayTree, obs: ArrayTree
    ) -> tuple[ArrayTree, tuple[jax.Array, jax.Array]]:
        """Maps memory and observations to memory and `(outputs, value)`."""
        memory, features = self.encode(memory, obs)
        return memory, self.heads(features)


class TrainState(struct.PyTreeNode):
    """All state of a training, a pytree for `rollout.checkpoint`."""

    params: ArrayTree
    opt_state: optax.OptState
    carry: rollout.Carry
    window: rollout.EpisodeWindow  # the last 100 episodes
    key: chex.PRNGKey
    num_updates: jax.Array  # () int32, updates so far


class Batch(struct.PyTreeNode):
    """Sequences of the loss, `[T, M, ...]`: all steps of `M` environments."""

    initial_memory: ArrayTree  # [1, M, ...], memory before the first step
    first: jax.Array  # True for the first step of an episode, which resets the memory
    obs: ArrayTree
    raw_action: ArrayTree  # sampled action before postprocessing
    log_prob: jax.Array  # log-probability when the action was sampled
    value: jax.Array
    advantage: jax.Array
    target: jax.Array  # of the value function
    weight: jax.Array  # 1 for valid rows, 0 for masked-out rows


@functools.lru_cache
def make_policy(network: nn.Module, distribution: ActionDistribution) -> rollout.Policy:
    """Makes the policy. Memoized, so that equal agents share compiled programs."""

    def sample(
        params: ArrayTree, obs: ArrayTree, memory: ArrayTree, key: chex.PRNGKey
    ) -> Any:
        memory, (outputs, value) = network.apply(params, memory, obs)
        raw_action = distribution.sample(outputs, key, mask_in(obs))
        log_prob = distribution.log_prob(outputs, raw_action, mask_in(obs))
        extras = {"raw_action": raw_action, "log_prob": log_prob, "value": value}
        return distribution.postprocess(raw_action), memory, extras

    def mode(
        params: ArrayTree, obs: ArrayTree, memory: ArrayTree, key: chex.PRNGKey
    ) -> Any:
        memory, (outputs, _) = network.apply(params, memory, obs)
        raw_action = distribution.mode(outputs, mask_in(obs))
        return distribution.postprocess(raw_action), memory, ()

    def value(params: ArrayTree, obs: ArrayTree, memory: ArrayTree) -> jax.Array:
        _, (_, value) = network.apply(params, memory, obs)
        return value

    return rollout.recurrent_policy(
        sample, network.initialize_memory, mode_fn=mode, value_fn=value
    )


@dataclasses.dataclass(frozen=True)
class RecurrentPPO:
    """Proximal policy optimization with a recurrent policy.

        agent = RecurrentPPO(env, Config())
        state = agent.init(jax.random.key(0))
        state, metrics = jax.jit(agent.train)(state)

    Agents are immutable and compare by value. In host environments, call `train`
    outside of `jit`.

    Attributes:
        env: `B` environments, such as those of `rollout.envs.make_vec` or
            `rollout.envs.from_gymnasium`.
        config: hyperparameters.
        network: a flax module that maps `(memory, obs)` to `(memory, (outputs,
            value))`, with the methods `initialize_memory`, `encode` and `heads` of
            `ActorCritic`. The loss calls `encode` step by step, and `heads` once for
            all steps. None for an `ActorCritic`.
    """

    env: Any
    config: Config = Config()
    network: nn.Module | None = None

    def replace(self, **changes: Any) -> Self:
        """Returns another agent with some attributes changed."""
        return dataclasses.replace(self, **changes)

    @functools.cached_property
    def spec(self) -> EnvSpec:
        """The spaces of a single environment."""
        return self.env if isinstance(self.env, EnvSpec) else env_spec(self.env)

    @functools.cached_property
    def distribution(self) -> ActionDistribution:
        """The distribution over actions whose parameters the network outputs."""
        return ActionDistribution(self.spec.action_space)

    @functools.cached_property
    def model(self) -> nn.Module:
        """The network, by default an `ActorCritic`."""
        if self.network is not None:
            return self.network
        config = self.config
        return ActorCritic(
            self.distribution,
            self.spec.observation_space,
            config.cell,
            config.memory_size,
            config.hidden_layer_sizes,
            config.activation,
        )

    @functools.cached_property
    def policy(self) -> rollout.Policy:
        """The policy that collects: it samples actions."""
        return make_policy(self.model, self.distribution)

    @functools.cached_property
    def eval_policy(self) -> rollout.Policy:
        """The policy to evaluate: it takes the most likely action."""
        return rollout.greedy(self.policy)

    @functools.cached_property
    def collector(self) -> rollout.Collector | rollout.HostCollector:
        """The collector of `policy` in `env`."""
        return make_collector(self.env, self.policy)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam with clipped gradients."""
        config, schedule = self.config, self.config.learning_rate
        if config.anneal_lr and not callable(schedule):
            num_gradients = config.num_epochs * config.num_minibatches
            schedule = optax.linear_schedule(
                schedule, 0.0, config.num_updates * num_gradients
            )
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        adam = optax.adam(schedule, eps=1e-5)
        # Flatten the parameters: few large operations are faster than many small ones.
        return optax.flatten(optax.chain(clip, adam))

    def init(self, key: chex.PRNGKey) -> TrainState:
        """Initializes the parameters and starts an episode in every environment."""
        carry_key, params_key, key = jax.random.split(key, 3)
        carry = self.collector.init(carry_key)
        # One program instead of many small ones.
        state = jax.jit(self.init_learner)(params_key, carry.obs)
        return state.replace(carry=carry, key=key)

    def init_learner(self, key: chex.PRNGKey, obs: ArrayTree) -> TrainState:
        """Initializes everything but the carry."""
        # Under `vmap` one seed at a time: on jax 0.10, batched decompositions of
        # `orthogonal` deadlock on few CPU cores.
        memory = self.model.initialize_memory(self.spec.num_envs)
        init = jax.custom_batching.sequential_vmap(self.model.init)
        params = init(key, memory, obs)
        return TrainState(
            params=params,
            opt_state=self.optimizer.init(params),
            carry=(),
            window=rollout.EpisodeWindow.create(100),
            key=key,
            num_updates=jnp.int32(0),
        )

    def train(
        self, state: TrainState, num_updates: int | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Runs `num_updates` updates, by default `config.num_updates`.

        Returns:
            The next state, and the metrics of every update, `[num_updates]` by name.
        """
        if num_updates is None:
            num_updates = self.config.num_updates
        is_host = self.collector.is_host
        return scan_updates(self.update, state, num_updates, is_host=is_host)

    def update(self, state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        """Collects a trajectory and learns from it.

        Returns:
            The next state, and metrics, `()` each: `return_mean` of the last 100
            episodes, and means over the minibatches of what `loss` returns.
        """
        num_steps = self.config.num_steps
        carry, trajectory = self.collector.collect_steps(
            state.carry, state.params, num_steps
        )
        last_value = self.collector.value(carry, state.params)
        initial_memory = state.carry.policy_state
        state = state.replace(carry=())
        if self.collector.is_host:
            state, metrics = learn_jitted(
                self.replace(env=self.spec),
                state,
                trajectory,
                last_value,
                initial_memory,
            )
        else:
            state, metrics = self.learn(state, trajectory, last_value, initial_memory)
        return state.replace(carry=carry), metrics

    def learn(
        self,
        state: TrainState,
        trajectory: rollout.Transition,
        last_value: jax.Array,
        initial_memory: ArrayTree,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes the gradient steps of one update from a trajectory `[T, B, ...]`."""
        config, value = self.config, trajectory.extras["value"]
        next_value = rollout.next_values(trajectory, value, last_value)
        advantage = rollout.gae(
            trajectory.reward,
            value,
            next_value,
            trajectory.terminated,
            trajectory.truncated,
            gamma=config.gamma,
            lam=config.gae_lambda,
            mask=trajectory.mask,
        )
        batch = Batch(
            initial_memory=jax.tree.map(lambda x: x[None], initial_memory),
            first=trajectory.first,
            obs=trajectory.obs,
            raw_action=trajectory.extras["raw_action"],
            log_prob=trajectory.extras["log_prob"],
            value=value,
            advantage=advantage,
            target=value + advantage,
            weight=trajectory.mask.astype(jnp.float32),
        )
        key, shuffle_key = jax.random.split(state.key)
        stopped = jnp.bool_(False)
        (params, opt_state, _), metrics = rollout.scan_minibatches(
            self.minibatch_step,
            (state.params, state.opt_state, stopped),
            shuffle_key,
            batch,
            config.num_minibatches,
            config.num_epochs,
            axis=1,  # minibatches of whole environments
        )
        window = state.window.add(trajectory)
        metrics = jax.tree.map(jnp.mean, metrics)
        metrics["explained_variance"] = explained_variance(batch)
        metrics["return_mean"] = window.return_mean
        state = state.replace(
            params=params,
            opt_state=opt_state,
            window=window,
            key=key,
            num_updates=state.num_updates + 1,
        )
        return state, metrics

    def minibatch_step(
        self, learner: tuple[ArrayTree, optax.OptState, jax.Array], batch: Batch
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Takes one gradient step on a minibatch of whole environments."""
        params, opt_state, stopped = learner
        batch = batch.replace(advantage=normalize(batch.advantage, batch.weight))
        grads, metrics = mean_gradient(self.loss, params, batch, batch.weight)
        updates, new_opt_state = self.optimizer.update(grads, opt_state)
        new = optax.apply_updates(params, updates), new_opt_state
        if self.config.target_kl is not None:
            stopped |= metrics["kl"] > 1.5 * self.config.target_kl
            old = params, opt_state
            new = jax.tree.map(lambda x, y: jnp.where(stopped, x, y), old, new)
        return (*new, stopped), metrics

    def loss(
        self, params: ArrayTree, batch: Batch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Computes the loss of every step, eq. 9 of the paper with its sign changed.

        Replays the memory from `initial_memory`, and resets it at episode starts.

        Args:
            params: parameters of the network.
            batch: sequences, `[T, M, ...]`; `advantage` is normalized over the
                minibatch.

        Returns:
            `[T, M]` loss, and metrics of every step, `[T, M]` by name.
        """
        config, mask, model = self.config, mask_in(batch.obs), self.model
        _, features = rollout.policies.unroll(
            lambda memory, obs: model.apply(params, memory, obs, method="encode"),
            jax.tree.map(lambda x: x[0], batch.initial_memory),
            batch.obs,
            batch.first,
            model.initialize_memory,
        )
        outputs, value = model.apply(params, features, method="heads")
        log_prob = self.distribution.log_prob(outputs, batch.raw_action, mask)
        log_ratio = log_prob - batch.log_prob
        ratio = jnp.exp(log_ratio)
        clipped_ratio = jnp.clip(ratio, 1 - config.clip_eps, 1 + config.clip_eps)
        surrogate = jnp.minimum(
            ratio * batch.advantage, clipped_ratio * batch.advantage
        )
        value_loss = 0.5 * (value - batch.target) ** 2
        if config.clip_range_vf is not None:
            change = jnp.clip(
                value - batch.value, -config.clip_range_vf, config.clip_range_vf
            )
            clipped_loss = 0.5 * (batch.value + change - batch.target) ** 2
            value_loss = jnp.maximum(value_loss, clipped_loss)
        entropy = self.distribution.entropy(outputs, mask)
        loss = -surrogate + config.vf_coef * value_loss - config.ent_coef * entropy
        metrics = {
            "value_loss": value_loss,
            "entropy": entropy,
            "kl": ratio - 1 - log_ratio,  # estimator k3 of joschu.net/blog/kl-approx
            "clip_fraction": jnp.float32(ratio != clipped_ratio),
        }
        return loss, metrics

    def predict(
        self, params: ArrayTree, obs: ArrayTree, memory: ArrayTree | None = None
    ) -> tuple[ArrayTree, ArrayTree]:
        """Returns the most likely action for a single observation, and the next memory.

        Args:
            params: parameters of the network.
            obs: `[*shape]`, as the environment returns it. If `env` normalizes
                observations, its statistics must be fixed: see `freeze`.
            memory: memory that the previous call returned. None for the first
                observation of an episode.
        """
        obs = normalize_obs(self.env, obs)
        batch = jax.tree.map(lambda x: jnp.asarray(x)[None], obs)
        memory = self.model.initialize_memory(1) if memory is None else memory
        step = self.eval_policy.apply(params, batch, memory, jax.random.key(0))
        return jax.tree.map(lambda x: x[0], step.action), step.state

    def freeze(self, state: TrainState) -> Self:
        """Fixes the statistics of a normalized environment, to evaluate or predict."""
        return self.replace(env=self.collector.freeze(state.carry).env)


learn_jitted = jax.jit(RecurrentPPO.learn, static_argnums=0)


def normalize(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Shifts and scales the valid rows to mean 0 and standard deviation 1."""
    total = jnp.maximum(weight.sum(), 1.0)
    mean = (x * weight).sum() / total
    var = ((x - mean) ** 2 * weight).sum() / total
    return (x - mean) / (jnp.sqrt(var) + 1e-8)


def explained_variance(batch: Batch) -> jax.Array:
    """Computes 1 - Var(target - value) / Var(target): 1 if the critic is perfect."""
    error = jnp.var(batch.advantage, where=batch.weight > 0)
    return 1 - error / jnp.var(batch.target, where=batch.weight > 0)


if __name__ == "__main__":
    from rollout.recipes import command

    command.main(RecurrentPPO, Config(num_updates=40))
