"""Recurrent PPO: proximal policy optimization (arXiv:1707.06347) with a recurrent cell.

    rollout train recurrent_ppo CartPole-v1

Use it in partially observable environments. The file defines config, network, policy,
update (rollout, advantages, minibatches) and loss, in this order. Copy this file and
change it.
"""

import dataclasses
import functools
import math
from typing import Any, Self

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

import rollout
from rollout.base.hyperparameters import Hyperparameters
from rollout.distributions import ActionDistribution
from rollout.envs.multi_agent import has_agents
from rollout.envs.spaces import get_action_mask
from rollout.envs.types import AnySpace, ArrayTree
from rollout.minibatches import mean_gradient, normalize
from rollout.networks import (
    Encoder,
    check_network,
    join,
    join_params,
    split_params,
    with_constants,
)
from rollout.normalization import normalize_obs, split_obs_stats, update_obs_stats
from rollout.targets import explained_variance
from rollout.training import (
    Agent,
    adapt_learning_rate,
    check_activation,
    check_counts,
    check_desired_kl,
    jit_on_host,
    predict_step,
)


@dataclasses.dataclass(frozen=True)
class Config(Hyperparameters):
    """Hyperparameters, named as in rejax.

    `anneal_lr` and `activation` are names of PureJaxRL, `clip_range_vf`, `target_kl`
    and `stats_window_size` of Stable-Baselines3, and `desired_kl` of rsl_rl. A wrong
    name raises a `TypeError` that contains the right name.

    Attributes:
        num_updates: number of updates in the training.
        num_steps: steps per environment in each update.
        num_epochs: passes over the batch in each update.
        num_minibatches: minibatches in each epoch; must divide the number of
            environments.
        learning_rate: a number, or a schedule of gradient steps.
        anneal_lr: whether the learning rate decays linearly to 0; it does not apply to
            a schedule.
        gamma: discount per environment step.
        gae_lambda: trace decay of generalized advantage estimation.
        clip_eps: the ratio of probabilities is clipped to [1 - clip_eps, 1 + clip_eps];
            a number, or a schedule of gradient steps, evaluated once per update.
        clip_range_vf: the change of a value in an update is clipped to this value; inf
            does not clip.
        vf_coef: coefficient of the value loss.
        ent_coef: coefficient of the entropy bonus; a number, or a schedule of gradient
            steps, evaluated once per update.
        max_grad_norm: gradients are clipped to this global norm.
        target_kl: gradient steps are skipped once the KL divergence exceeds 1.5 times
            this value; None never skips.
        desired_kl: KL divergence to which the learning rate is adapted, in place of
            `anneal_lr`; None does not adapt it.
        normalize_observations: whether observations are normalized by running
            statistics, which are part of `params`.
        actor_obs: parts of the observation that the actor reads; None for all parts
            except `privileged_state`.
        critic_obs: parts of the observation that the critic reads; None for all parts;
            see `ActorCritic`.
        cnn: whether images go through a convolutional network; None for images of at
            least 36 x 36 pixels.
        cell: name of a recurrent cell of `flax.linen`, for example OptimizedLSTMCell.
        memory_size: units of the recurrent cell.
        hidden_layer_sizes: units of each hidden layer of actor and critic.
        activation: name of a function of `flax.linen`.
        stats_window_size: episodes in the metric `return_mean`.
    """

    num_updates: int = 60
    num_steps: int = 128
    num_epochs: int = 4
    num_minibatches: int = 8
    learning_rate: float | optax.Schedule = 2.5e-3
    anneal_lr: bool = True
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_eps: float | optax.Schedule = 0.2
    clip_range_vf: float = math.inf
    vf_coef: float = 0.5
    ent_coef: float | optax.Schedule = 0.01
    max_grad_norm: float = 0.5
    target_kl: float | None = None
    desired_kl: float | None = None
    normalize_observations: bool = False
    actor_obs: tuple[str, ...] | None = None
    critic_obs: tuple[str, ...] | None = None
    cnn: bool | None = None
    cell: str = "GRUCell"
    memory_size: int = 64
    hidden_layer_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    stats_window_size: int = 100

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some hyperparameters changed."""
        return dataclasses.replace(self, **changes)


Metrics = dict[str, jax.Array]


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
            return nn.Dense(size, kernel_init=kernel_init)

        for size in self.hidden_layer_sizes:
            x = getattr(nn, self.activation)(dense(size, 2**0.5)(x))
        return dense(self.num_outputs, self.output_scale)(x)


class ActorCritic(nn.Module):
    """A shared recurrent cell, followed by separate MLPs for actor and critic.

    The cell reads the parts `actor_obs`. The critic also reads the remaining parts of
    `critic_obs` at the current step, without memory.
    """

    distribution: ActionDistribution
    observation_space: AnySpace
    cell: str
    memory_size: int
    hidden_layer_sizes: tuple[int, ...]
    activation: str
    actor_obs: tuple[str, ...] | None = None
    critic_obs: tuple[str, ...] | None = None
    cnn: bool | None = None

    def setup(self) -> None:
        """Creates the layers."""
        sizes, num_log_stds = self.hidden_layer_sizes, self.distribution.num_log_stds
        num_outputs = self.distribution.num_params - num_log_stds
        keys = self.actor_obs and (*self.actor_obs, *(self.critic_obs or ()))
        encoder_init = nn.initializers.orthogonal(2**0.5)
        self.encoder = Encoder(self.observation_space, keys, self.cnn, encoder_init)
        self.recurrent_cell = getattr(nn, self.cell)(self.memory_size)
        self.actor = MLP(sizes, num_outputs, 0.01, self.activation)
        self.critic = MLP(sizes, 1, 1.0, self.activation)
        if num_log_stds:  # standard deviations do not depend on the observation
            zeros = nn.initializers.zeros
            self.log_std = self.param("log_std", zeros, (num_log_stds,))

    @property
    def critic_keys(self) -> tuple[str, ...]:
        """Parts of the observation that only the critic reads."""
        return tuple(
            x for x in self.critic_obs or () if x not in (self.actor_obs or ())
        )

    @nn.nowrap
    def initialize_memory(self, num_envs: int) -> ArrayTree:
        """Returns the memory at the start of an episode, `[num_envs, memory_size]`."""
        cell = getattr(nn, self.cell)(self.memory_size, parent=None)
        return cell.initialize_carry(jax.random.key(0), (num_envs, self.memory_size))

    def encode(
        self, memory: ArrayTree, obs: ArrayTree
    ) -> tuple[ArrayTree, dict[str, jax.Array]]:
        """Maps memory and `[B, *shape]` observations to memory and features.

        Returns:
            The new memory, and features `[B, n]`: the output of the cell, "memory", and
            the parts that only the critic reads, "critic", unless `obs` lacks them.
        """
        parts = self.encoder(obs)
        memory, output = self.recurrent_cell(memory, join(parts, self.actor_obs))
        features = {"memory": output}
        if self.critic_keys and parts.keys() >= set(self.critic_keys):
            features["critic"] = join(parts, self.critic_keys)
        return memory, features

    def heads(self, features: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Maps features `[..., n]` to `[..., num_params]` and `[...]`.

        The value is NaN if "critic" is missing, as in `predict`.
        """
        memory = features["memory"]
        if not self.critic_keys:
            value = self.critic(memory)[..., 0]
        elif "critic" in features:
            critic_input = jnp.concatenate([memory, features["critic"]], axis=-1)
            value = self.critic(critic_input)[..., 0]
        else:
            value = jnp.full(memory.shape[:-1], jnp.nan)
        outputs = self.actor(memory)
        if num_log_stds := self.distribution.num_log_stds:
            log_std = jnp.broadcast_to(self.log_std, (*value.shape, num_log_stds))
            outputs = jnp.concatenate([outputs, log_std], axis=-1)
        return outputs, value

    def __call__(
        self, memory: ArrayTree, obs: ArrayTree
    ) -> tuple[ArrayTree, tuple[jax.Array, jax.Array]]:
        """Maps memory and observations to the new memory and `(outputs, value)`."""
        memory, features = self.encode(memory, obs)
        return memory, self.heads(features)


class TrainState(struct.PyTreeNode):
    """State of the training, a pytree that `rollout.checkpoint` can save."""

    params: ArrayTree
    opt_state: optax.OptState
    carry: Any  # `rollout.Carry` of the collector
    window: rollout.EpisodeWindow  # the last `stats_window_size` episodes
    key: chex.PRNGKey
    num_updates: jax.Array  # () int32, updates so far


class Row(struct.PyTreeNode):
    """Inputs of the loss: all steps of one environment. Minibatches are `[T, M, ...]`.

    `initial_memory` has T = 1.
    """

    initial_memory: ArrayTree  # memory before the first step
    first: jax.Array  # True for the first step of an episode, which resets the memory
    obs: ArrayTree
    raw_action: ArrayTree  # sampled action before postprocessing
    log_prob: jax.Array  # log-probability when the action was sampled
    value: jax.Array
    advantage: jax.Array
    target: jax.Array  # target of the value function
    weight: jax.Array  # 1 for valid rows, 0 for masked-out rows
    acting: jax.Array  # 1 for rows with an action; rows with 0 train only the critic


class Policy(rollout.Policy):
    """Samples actions from the distribution that the network outputs."""

    network: Any = struct.field(pytree_node=False)
    distribution: ActionDistribution = struct.field(pytree_node=False)

    def init(self, num_envs: int) -> ArrayTree:
        """Returns the memory at the start of an episode."""
        return self.network.initialize_memory(num_envs)

    def apply(
        self, params: ArrayTree, obs: ArrayTree, state: ArrayTree, key: chex.PRNGKey
    ) -> rollout.PolicyStep:
        """Samples actions and records the inputs of the loss in `extras`."""
        memory, (outputs, value) = self.network.apply(
            params, state, normalize_obs(params, obs)
        )
        action_mask = get_action_mask(obs)
        raw_action = self.distribution.sample(outputs, key, action_mask)
        log_prob = self.distribution.log_prob(outputs, raw_action, action_mask)
        action = self.distribution.postprocess(raw_action)
        extras = {"raw_action": raw_action, "log_prob": log_prob, "value": value}
        return rollout.PolicyStep(action, memory, extras)

    def mode(
        self, params: ArrayTree, obs: ArrayTree, state: ArrayTree, key: chex.PRNGKey
    ) -> rollout.PolicyStep:
        """Chooses the most likely actions."""
        memory, (outputs, _) = self.network.apply(
            params, state, normalize_obs(params, obs)
        )
        raw_action = self.distribution.mode(outputs, get_action_mask(obs))
        return rollout.PolicyStep(self.distribution.postprocess(raw_action), memory)

    def value(self, params: ArrayTree, obs: ArrayTree, state: ArrayTree) -> jax.Array:
        """Evaluates the value function."""
        _, (_, value) = self.network.apply(params, state, normalize_obs(params, obs))
        return value


@dataclasses.dataclass(frozen=True)
class RecurrentPPO(Agent):
    """Proximal policy optimization with a recurrent policy.

        agent = RecurrentPPO(env, Config())
        state = agent.init(jax.random.key(0))
        state, metrics = jax.jit(agent.train)(state)

    In host environments, call `train` outside of `jit`.

    Attributes:
        env: `B` environments, made by `rollout.envs.make_vec`, by
            `rollout.envs.from_gymnasium` or otherwise.
        config: hyperparameters.
        network: a flax module that maps `(memory, obs)` to `(memory, (outputs,
            value))`, with the methods `initialize_memory`, `encode` and `heads` of
            `ActorCritic`. The loss calls `encode` step by step, and `heads` once for
            all steps. None uses an `ActorCritic`.
        optimizer: an optimizer of optax. None uses Adam with `learning_rate`,
            `anneal_lr` and `max_grad_norm` of `config`.
        mesh: devices for the training; see `rollout.training.Agent`.

    Raises:
        ValueError: if `env` has several agents, or if `network` lacks a method of
            `ActorCritic`.
    """

    config: Config = Config()
    network: nn.Module | None = None
    optimizer: optax.GradientTransformation | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if has_agents(self.env):
            raise ValueError(
                "`env` must have one agent, got an environment with several agents. "
                "Several agents share a `PPO`, or a policy with memory in a "
                "`rollout.agents.policy_map`."
            )
        check_activation(self)
        names = "initialize_memory", "encode", "heads"
        if self.network is not None and not all(
            hasattr(self.network, x) for x in names
        ):
            raise ValueError(
                "`network` must have the methods `initialize_memory`, `encode` and "
                f"`heads` of `ActorCritic`, got a {type(self.network).__name__}. "
                "Define them in a module of `flax.linen`, which may contain modules of "
                "`flax.nnx.bridge`, or use `PPO` for a network without memory."
            )
        check_counts(self.config, "num_minibatches", "num_epochs", "stats_window_size")
        check_desired_kl(self.config, self.optimizer)

    @functools.cached_property
    def distribution(self) -> ActionDistribution:
        """The distribution over actions whose parameters the network outputs."""
        return ActionDistribution(self.spec.action_space)

    @functools.cached_property
    def model(self) -> Any:
        """The network, by default an `ActorCritic`."""
        return self.network or ActorCritic(
            distribution=self.distribution,
            observation_space=self.spec.observation_space,
            actor_obs=self.actor_obs,
            critic_obs=self.critic_obs,
            cnn=self.config.cnn,
            cell=self.config.cell,
            memory_size=self.config.memory_size,
            hidden_layer_sizes=self.config.hidden_layer_sizes,
            activation=self.config.activation,
        )

    @functools.cached_property
    def policy(self) -> rollout.Policy:
        """The policy for collection, which samples actions."""
        return Policy(self.model, self.distribution)

    def make_optimizer(self) -> optax.GradientTransformation:
        """Returns `optimizer`, by default Adam with clipped gradients."""
        if self.optimizer is not None:
            return self.optimizer
        config, schedule = self.config, self.config.learning_rate
        adam: Any = optax.adam
        if config.desired_kl is not None:  # `minibatch_step` adapts the learning rate
            adam = optax.inject_hyperparams(optax.adam)
        elif config.anneal_lr and not callable(schedule):
            num_steps = config.num_updates * config.num_epochs * config.num_minibatches
            schedule = optax.linear_schedule(schedule, 0.0, num_steps)
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        # Flatten the parameters: few large operations are faster than many small ones.
        return optax.flatten(optax.chain(clip, adam(schedule, eps=1e-5)))

    def init_learner(
        self, key: chex.PRNGKey, obs: ArrayTree, initial_params: ArrayTree | None = None
    ) -> TrainState:
        """Initializes the training state; `init` sets its `carry` and `key`.

        Its parameters are `initial_params`, or random parameters for None.
        """
        # Run seeds one at a time under `vmap`: on jax 0.10, batched decompositions of
        # `orthogonal` deadlock on few CPU cores.
        init = functools.partial(self.init_network, self.model)
        memory = self.model.initialize_memory(self.spec.num_envs)
        params = jax.custom_batching.sequential_vmap(init)(key, memory, obs)
        apply_fn = lambda *args: self.model.apply(params, *args)[1]  # noqa: E731
        shapes = (self.distribution.num_params,), ()
        batch_shape = self.batch_shape(obs)
        check_network(
            "network", apply_fn, (memory, obs), *shapes, batch_shape=batch_shape
        )
        params = self.choose_params(params | self.init_obs_stats(), initial_params)
        variables, _ = split_obs_stats(params)
        opt_state = self.make_optimizer().init(split_params(variables)[0])
        window = rollout.EpisodeWindow.init(self.config.stats_window_size)
        return TrainState(params, opt_state, (), window, key, jnp.int32(0))

    def update(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Collects a trajectory and takes gradient steps on it.

        Returns:
            The next state, and metrics, `()` each: `return_mean` of the last
            `stats_window_size` episodes, `explained_variance` of the values, and the
            metrics of `loss`, averaged over the minibatches.
        """
        memory = state.carry.policy_state
        carry, trajectory = self.collector.collect_steps(
            state.carry, state.params, self.config.num_steps
        )
        last_value = self.collector.value(carry, state.params)
        state, metrics = self.learn(
            state.replace(carry=()), trajectory, last_value, memory
        )
        return state.replace(carry=carry), metrics

    @jit_on_host
    def learn(
        self,
        state: TrainState,
        trajectory: rollout.Transition,
        last_value: jax.Array,
        initial_memory: ArrayTree,
    ) -> tuple[TrainState, Metrics]:
        """Takes the gradient steps of one update on a trajectory `[T, B, ...]`."""
        config = self.config
        params, obs_stats = split_obs_stats(state.params)
        obs_stats = update_obs_stats(obs_stats, trajectory.obs, trajectory.mask)
        advantage = self.advantage(trajectory, last_value)
        value = trajectory.extras["value"]
        batch = Row(
            initial_memory=jax.tree.map(lambda x: x[None], initial_memory),
            first=trajectory.first,
            obs=normalize_obs(obs_stats, trajectory.obs),
            raw_action=trajectory.extras["raw_action"],
            log_prob=trajectory.extras["log_prob"],
            value=value,
            advantage=advantage,
            target=value + advantage,
            weight=trajectory.mask.astype(jnp.float32),
            acting=jnp.float32(getattr(trajectory, "acting", trajectory.mask)),
        )
        num_gradients = config.num_epochs * config.num_minibatches
        agent = self.evaluate_schedules(
            state.num_updates * num_gradients, "clip_eps", "ent_coef"
        )
        key, shuffle_key = jax.random.split(state.key)
        learner = params, state.opt_state, jnp.bool_(False)
        (params, opt_state, _), metrics = rollout.scan_minibatches(
            agent.minibatch_step,
            learner,
            shuffle_key,
            batch,
            num_minibatches=config.num_minibatches,
            num_epochs=config.num_epochs,
            axis=1,
            mesh=self.mesh,
        )
        window = state.window.add(trajectory)
        metrics = jax.tree.map(jnp.mean, metrics)
        metrics["explained_variance"] = explained_variance(
            value, batch.target, trajectory.mask
        )
        metrics["return_mean"] = window.returns.mean
        num_updates = state.num_updates + 1
        params = params | obs_stats
        state = state.replace(params=params, opt_state=opt_state, window=window)
        return state.replace(key=key, num_updates=num_updates), metrics

    def advantage(
        self, trajectory: rollout.Transition, last_value: jax.Array
    ) -> jax.Array:
        """Estimates the advantages of a trajectory, GAE (arXiv:1506.02438), `[T, B]`.

        At a truncation, `next_value` is the value of the episode's last observation.
        """
        value, config = trajectory.extras["value"], self.config
        return rollout.gae(
            trajectory.reward,
            value,
            rollout.next_values(trajectory, value, last_value),
            trajectory.terminated,
            trajectory.truncated,
            gamma=config.gamma,
            lambda_=config.gae_lambda,
            mask=trajectory.mask,
        )

    def minibatch_step(
        self, learner: tuple[ArrayTree, optax.OptState, jax.Array], batch: Row
    ) -> tuple[Any, Metrics]:
        """Takes one gradient step on a minibatch of whole environments."""
        variables, opt_state, stopped = learner
        params, constants = split_params(variables)
        batch = batch.replace(advantage=normalize(batch.advantage, batch.weight))
        loss_fn = with_constants(self.loss, constants)
        grads, metrics = mean_gradient(
            loss_fn, params, batch, batch.weight, axis=1, mesh=self.mesh
        )
        if self.config.desired_kl is not None:
            rate = optax.tree.get(opt_state, "learning_rate")
            rate = adapt_learning_rate(rate, metrics["kl"], self.config.desired_kl)
            opt_state = optax.tree.set(opt_state, learning_rate=rate)
            metrics["learning_rate"] = rate
        updates, new_opt_state = self.make_optimizer().update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        new = join_params(params, constants), new_opt_state
        if self.config.target_kl is not None:
            stopped |= metrics["kl"] > 1.5 * self.config.target_kl
            keep = functools.partial(jnp.where, stopped)
            new = jax.tree.map(keep, (variables, opt_state), new)
        return (*new, stopped), metrics

    def loss(self, params: ArrayTree, row: Row) -> tuple[jax.Array, Metrics]:
        """Computes the loss of a sequence: eq. 9 of the paper with its sign changed.

        The value loss has a factor of 0.5, and is clipped as in OpenAI's baselines. The
        memory is recomputed from `initial_memory` and reset at episode starts.

        Args:
            params: parameters of the network.
            row: one sequence, `[T, ...]`; `advantage` is normalized over the minibatch.

        Returns:
            The loss of every step, `[T]`, and metrics, `[T]` by name.
        """
        config: Any = self.config  # without schedules, see `learn`
        mask, model = get_action_mask(row.obs), self.model
        _, features = rollout.policies.unroll(
            lambda memory, obs: model.apply(params, memory, obs, method="encode"),
            jax.tree.map(lambda x: x[0], row.initial_memory),
            row.obs,
            row.first,
            model.initialize_memory,
        )
        outputs, value = model.apply(params, features, method="heads")
        log_prob = self.distribution.log_prob(outputs, row.raw_action, mask)
        log_ratio = log_prob - row.log_prob
        ratio = jnp.exp(log_ratio)
        clipped_ratio = jnp.clip(ratio, 1 - config.clip_eps, 1 + config.clip_eps)
        surrogate = jnp.minimum(ratio * row.advantage, clipped_ratio * row.advantage)
        limit = config.clip_range_vf
        clipped_value = row.value + jnp.clip(value - row.value, -limit, limit)
        error, clipped_error = value - row.target, clipped_value - row.target
        value_loss = 0.5 * jnp.maximum(error**2, clipped_error**2)
        policy_loss = -row.acting * surrogate
        entropy = row.acting * self.distribution.entropy(outputs, mask)
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        metrics = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            # Estimator k3 of joschu.net/blog/kl-approx.
            "kl": row.acting * (ratio - 1 - log_ratio),
            "clip_fraction": jnp.float32(ratio != clipped_ratio),
        }
        return loss, metrics

    def predict(
        self, params: ArrayTree, obs: ArrayTree, memory: ArrayTree | None = None
    ) -> tuple[ArrayTree, ArrayTree]:
        """Returns the most likely action for a single observation, and the next memory.

        Args:
            params: parameters of the network.
            obs: `[*shape]`, an observation as `env` returns it. A dict may lack the
                parts that only the critic reads, such as `privileged_state`.
            memory: memory that the previous call returned. None for the first
                observation of an episode.
        """
        memory = self.model.initialize_memory(1) if memory is None else memory
        obs = self.prepare_obs(obs)
        return predict_step(self.eval_policy, params, obs, memory)


if __name__ == "__main__":
    from rollout.cli import train

    train.main(RecurrentPPO, Config(num_updates=40), num_envs=64)
