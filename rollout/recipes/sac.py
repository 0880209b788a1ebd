"""Soft actor-critic (arXiv:1812.05905), for JAX and host environments.

    rollout train sac Pendulum-v1

The file defines config, networks, policy, update (rollout, gradient steps), target and
loss, in this order. Copy this file and change it.
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
from rollout.base.hyperparameters import Hyperparameters
from rollout.buffers import ReplayBuffer
from rollout.distributions import TanhNormal
from rollout.envs.types import AnySpace, ArrayTree
from rollout.minibatches import mean_gradient
from rollout.networks import (
    Encoder,
    check_network,
    join,
    join_params,
    split_params,
    with_constants,
)
from rollout.normalization import normalize_obs, split_obs_stats, update_obs_stats
from rollout.training import (
    Agent,
    check_activation,
    check_counts,
    jit_on_host,
    scan_updates,
)
from rollout.trajectories import select_fields


@dataclasses.dataclass(frozen=True)
class Config(Hyperparameters):
    """Hyperparameters of SAC, named as in CleanRL and Stable-Baselines3.

    Attributes:
        num_updates: number of updates in the training.
        num_steps: steps per environment in each update.
        gradient_steps: gradient steps after each step of all environments.
        learning_starts: environment steps before the first gradient step.
        batch_size: transitions in a gradient step.
        learning_rate: a number, or a schedule of gradient steps.
        buffer_size: transitions in the replay buffer, of all environments.
        gamma: discount per environment step.
        reward_scale: factor of the rewards in the targets.
        tau: step size of target critic updates.
        target_entropy: entropy to which the temperature is adapted; None for minus the
            number of action entries.
        normalize_observations: whether observations are normalized by running
            statistics, which are part of `params`.
        actor_obs: parts of the observation that the actor reads; None for all parts
            except `privileged_state`.
        critic_obs: parts of the observation that the critic reads; None for all parts.
        cnn: whether images go through a convolutional network; None for images of at
            least 36 x 36 pixels.
        hidden_layer_sizes: units of each hidden layer.
        activation: name of a function of `flax.linen`.
        stats_window_size: episodes in the metric `return_mean`.
    """

    num_updates: int = 20
    num_steps: int = 1000
    gradient_steps: int = 1
    learning_starts: int = 1000
    batch_size: int = 128
    learning_rate: float | optax.Schedule = 1e-3
    buffer_size: int = 100_000
    gamma: float = 0.99
    reward_scale: float = 0.1
    tau: float = 0.005
    target_entropy: float | None = None
    normalize_observations: bool = False
    actor_obs: tuple[str, ...] | None = None
    critic_obs: tuple[str, ...] | None = None
    cnn: bool | None = None
    hidden_layer_sizes: tuple[int, ...] = (64, 64)
    activation: str = "relu"
    stats_window_size: int = 100

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some hyperparameters changed."""
        return dataclasses.replace(self, **changes)


Metrics = dict[str, jax.Array]


class MLP(nn.Module):
    """A multilayer perceptron of encoded observations, and of actions if given."""

    num_outputs: int
    observation_space: AnySpace
    hidden_layer_sizes: tuple[int, ...]
    activation: str
    obs_keys: tuple[str, ...] | None = None
    cnn: bool | None = None

    @nn.compact
    def __call__(self, obs: ArrayTree, action: jax.Array | None = None) -> jax.Array:
        """Maps `[..., *shape]` and normalized actions to `[..., num_outputs]`."""
        features = Encoder(self.observation_space, self.obs_keys, self.cnn)(obs)
        x = join(features, self.obs_keys)
        if action is not None:
            x = jnp.concatenate([x, action], axis=-1)
        for size in self.hidden_layer_sizes:
            x = getattr(nn, self.activation)(nn.Dense(size)(x))
        return nn.Dense(self.num_outputs)(x)


class TrainState(struct.PyTreeNode):
    """State of the training, a pytree that `rollout.checkpoint` can save."""

    params: dict[str, Any]  # "actor", "critic" [2, ...] and "log_alpha" ()
    target_params: ArrayTree  # parameters of the target critics, [2, ...]
    opt_state: optax.OptState
    buffer_state: ArrayTree
    carry: Any  # `rollout.Carry` of the collector
    window: rollout.EpisodeWindow  # the last `stats_window_size` episodes
    key: chex.PRNGKey
    num_updates: jax.Array  # () int32, updates so far


class Row(struct.PyTreeNode):
    """Inputs of the loss, which is the loss of one row. Minibatches are `[M, ...]`."""

    obs: ArrayTree
    action: jax.Array  # [size], normalized
    target: jax.Array  # target of both critics
    noise: jax.Array  # [size], standard normal, to sample actions of the actor


class Policy(rollout.Policy):
    """Samples actions from the actor's squashed normal distribution."""

    network: Any = struct.field(pytree_node=False)
    distribution: TanhNormal = struct.field(pytree_node=False)

    def apply(
        self, params: ArrayTree, obs: ArrayTree, state: ArrayTree, key: chex.PRNGKey
    ) -> rollout.PolicyStep:
        """Samples actions."""
        outputs = self.network.apply(params["actor"], normalize_obs(params, obs))
        action = self.distribution.squash(self.distribution.sample(outputs, key))
        return rollout.PolicyStep(self.distribution.postprocess(action), state)

    def mode(
        self, params: ArrayTree, obs: ArrayTree, state: ArrayTree, key: chex.PRNGKey
    ) -> rollout.PolicyStep:
        """Squashes the mean of the normal distribution."""
        outputs = self.network.apply(params["actor"], normalize_obs(params, obs))
        action = self.distribution.squash(self.distribution.mode(outputs))
        return rollout.PolicyStep(self.distribution.postprocess(action), state)


@dataclasses.dataclass(frozen=True)
class SAC(Agent):
    """Soft actor-critic with twin critics and a learned temperature.

        agent = SAC(env, Config())
        state = agent.init(jax.random.key(0))
        state, metrics = jax.jit(agent.train)(state)

    In host environments, call `train` outside of `jit`. It donates the replay buffer of
    `state`, so use a state only once.

    Attributes:
        env: `B` environments with a `Box` of floats as action space, made by
            `rollout.envs.make_vec`, by `rollout.envs.from_gymnasium` or otherwise.
        config: hyperparameters.
        actor_network: a flax module that maps observations to the parameters of
            `distribution`, `[..., num_params]`. None uses an `MLP`.
        critic_network: a flax module that maps observations and normalized actions to
            `[..., 1]`. None uses an `MLP`.
        optimizer: an optimizer of optax of all parameters. None uses Adam with
            `learning_rate` of `config`.
        mesh: devices for the training; see `rollout.training.Agent`.

    Raises:
        ValueError: if the action space is not a `Box` of floats, or if
            `config.gradient_steps` is not at least 1.
    """

    stored_fields = "obs", "action", "reward", "terminated", "next_obs", "mask"

    config: Config = Config()
    actor_network: nn.Module | None = None
    critic_network: nn.Module | None = None
    optimizer: optax.GradientTransformation | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_activation(self)
        check_counts(self.config, "gradient_steps", "stats_window_size")
        TanhNormal(self.spec.action_space)  # raises if it is not a Box of floats

    @functools.cached_property
    def distribution(self) -> TanhNormal:
        """The distribution over actions whose parameters the actor outputs."""
        return TanhNormal(self.spec.action_space)

    @functools.cached_property
    def actor(self) -> Any:
        """The network of the actor, by default an `MLP`."""
        return self.actor_network or self.make_mlp(
            self.distribution.num_params, self.actor_obs
        )

    @functools.cached_property
    def critic(self) -> Any:
        """The network of each critic, by default an `MLP`."""
        return self.critic_network or self.make_mlp(1, self.critic_obs)

    def make_mlp(self, num_outputs: int, obs_keys: tuple[str, ...] | None) -> MLP:
        """Makes the default network, which reads some parts of the observation."""
        return MLP(
            num_outputs=num_outputs,
            observation_space=self.spec.observation_space,
            obs_keys=obs_keys,
            cnn=self.config.cnn,
            hidden_layer_sizes=self.config.hidden_layer_sizes,
            activation=self.config.activation,
        )

    @functools.cached_property
    def policy(self) -> rollout.Policy:
        """The policy for collection, which samples actions."""
        return Policy(self.actor, self.distribution)

    @functools.cached_property
    def buffer(self) -> ReplayBuffer:
        """The replay buffer."""
        buffer = ReplayBuffer(self.config.buffer_size, self.spec.num_envs)
        return buffer if self.mesh is None else rollout.buffers.shard(buffer, self.mesh)

    def make_optimizer(self) -> optax.GradientTransformation:
        """Returns `optimizer`, by default Adam."""
        if self.optimizer is not None:
            return self.optimizer
        return optax.adam(self.config.learning_rate)

    def init_learner(
        self, key: chex.PRNGKey, obs: ArrayTree, initial_params: ArrayTree | None = None
    ) -> TrainState:
        """Initializes the training state; `init` sets carry, buffer and `key`.

        Its parameters are `initial_params`, or random parameters for None.
        """
        actor_key, *critic_keys = jax.random.split(key, 3)
        action = jnp.zeros((self.spec.num_envs, self.distribution.size))
        init_critic = functools.partial(self.init_network, self.critic)
        init_critics = jax.vmap(init_critic, (0, None, None))
        params = {
            "actor": self.init_network(self.actor, actor_key, obs),
            "critic": init_critics(jnp.stack(critic_keys), obs, action),
            "log_alpha": jnp.zeros(()),
        }
        apply_actor = functools.partial(self.actor.apply, params["actor"])
        shape, batch_shape = (self.distribution.num_params,), self.batch_shape(obs)
        check_network(
            "actor_network", apply_actor, (obs,), shape, batch_shape=batch_shape
        )
        critic = jax.tree.map(lambda x: x[0], params["critic"])
        apply_critic = functools.partial(self.critic.apply, critic)
        check_network(
            "critic_network", apply_critic, (obs, action), (1,), batch_shape=batch_shape
        )
        params = self.choose_params(params | self.init_obs_stats(), initial_params)
        variables, _ = split_obs_stats(params)
        return TrainState(
            params=params,
            target_params=jax.tree.map(jnp.copy, variables["critic"]),
            opt_state=self.make_optimizer().init(split_params(variables)[0]),
            buffer_state=(),
            carry=(),
            window=rollout.EpisodeWindow.init(self.config.stats_window_size),
            key=key,
            num_updates=jnp.int32(0),
        )

    def update(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Alternates environment steps and gradient steps, `num_steps` times.

        Returns:
            The next state, and metrics, `()` each: `return_mean` of the last
            `stats_window_size` episodes, and the metrics of `loss`, averaged over
            gradient steps.
        """
        num_steps, is_host = self.config.num_steps, self.collector.is_host
        state, (trajectory, metrics) = scan_updates(
            self.step, state, num_steps, is_host=is_host
        )
        window, metrics = self.summarize(state.window, trajectory, metrics)
        return state.replace(window=window, num_updates=state.num_updates + 1), metrics

    def step(self, state: TrainState) -> tuple[TrainState, Any]:
        """Takes one step in every environment, then the gradient steps."""
        carry, trajectory = self.collector.collect_steps(state.carry, state.params, 1)
        learner = state.replace(carry=(), buffer_state=(), window=())
        learner, buffer_state, metrics = self.learn(
            learner, state.buffer_state, trajectory
        )
        state = learner.replace(
            carry=carry, buffer_state=buffer_state, window=state.window
        )
        # The window of episodes does not read these fields.
        steps = trajectory.replace(obs=(), action=(), next_obs=(), extras=(), info=())
        return state, (steps, metrics)

    @jit_on_host
    def summarize(
        self,
        window: rollout.EpisodeWindow,
        trajectory: rollout.Transition,
        metrics: Metrics,
    ) -> tuple[rollout.EpisodeWindow, Metrics]:
        """Adds steps `[T, 1, B]` to the window, and averages metrics `[T]`."""
        window = window.add(jax.tree.map(lambda x: x[:, 0], trajectory))
        metrics = jax.tree.map(jnp.mean, metrics)
        return window, metrics | {"return_mean": window.returns.mean}

    @functools.partial(jit_on_host, donate_argnames="buffer_state")
    def learn(
        self,
        state: TrainState,
        buffer_state: ArrayTree,
        trajectory: rollout.Transition,
    ) -> tuple[TrainState, ArrayTree, Metrics]:
        """Adds a trajectory `[T, B, ...]` to the buffer and takes gradient steps."""
        # Write the buffer before reading it, so that XLA updates it in place.
        experience = select_fields(trajectory, self.stored_fields)
        buffer_state = self.buffer.add(buffer_state, experience)
        params, obs_stats = split_obs_stats(state.params)
        obs_stats = update_obs_stats(obs_stats, trajectory.obs, trajectory.mask)
        state = state.replace(params=params | obs_stats)

        def step(state: TrainState, key: chex.PRNGKey) -> tuple[TrainState, Any]:
            return self.gradient_step(state, buffer_state, key)

        keys = jax.random.split(state.key, 1 + self.config.gradient_steps)
        state, metrics = jax.lax.scan(step, state.replace(key=keys[0]), keys[1:])
        return state, buffer_state, jax.tree.map(jnp.mean, metrics)

    def gradient_step(
        self, state: TrainState, buffer_state: ArrayTree, key: chex.PRNGKey
    ) -> tuple[TrainState, Metrics]:
        """Samples a batch and takes one gradient step."""
        sample_key, target_key, noise_key = jax.random.split(key, 3)
        variables, obs_stats = split_obs_stats(state.params)
        params, constants = split_params(variables)
        target_params = state.target_params
        sample = self.buffer.sample(buffer_state, sample_key, self.config.batch_size)
        experience = sample.experience.replace(
            obs=normalize_obs(obs_stats, sample.experience.obs),
            next_obs=normalize_obs(obs_stats, sample.experience.next_obs),
        )
        action = self.distribution.normalize(experience.action)
        batch = Row(
            obs=experience.obs,
            action=action,
            target=self.target(variables, target_params, experience, target_key),
            noise=jax.random.normal(noise_key, action.shape),
        )
        loss_fn = with_constants(self.loss, constants)
        grads, metrics = mean_gradient(
            loss_fn, params, batch, sample.weights, mesh=self.mesh
        )
        updates, opt_state = self.make_optimizer().update(
            grads, state.opt_state, params
        )
        params: Any = optax.apply_updates(params, updates)
        target_params: Any = optax.incremental_update(
            params["critic"], split_params(target_params)[0], self.config.tau
        )
        variables = join_params(params, constants)
        state = state.replace(
            params=variables | obs_stats,
            target_params=join_params(target_params, constants.get("critic", {})),
            opt_state=opt_state,
        )
        return state, metrics | {"alpha": jnp.exp(params["log_alpha"])}

    def target(
        self,
        params: dict[str, Any],
        target_params: ArrayTree,
        experience: rollout.Transition,
        key: chex.PRNGKey,
    ) -> jax.Array:
        """Computes the target of the critics, eq. 3 and 5 of the paper, `[M]`.

        Terminated steps do not bootstrap; truncated steps do.
        """
        config, distribution = self.config, self.distribution
        outputs = self.actor.apply(params["actor"], experience.next_obs)
        raw_action = distribution.sample(outputs, key)
        next_log_prob = distribution.log_prob(outputs, raw_action)
        next_action = distribution.squash(raw_action)
        next_value = self.value(target_params, experience.next_obs, next_action)
        soft_value = next_value.min(0) - jnp.exp(params["log_alpha"]) * next_log_prob
        discount = config.gamma * (1.0 - experience.terminated)
        return config.reward_scale * experience.reward + discount * soft_value

    def loss(self, params: dict[str, Any], row: Row) -> tuple[jax.Array, Metrics]:
        """Computes the sum of the losses of critics, actor and temperature of one row.

        Each loss has gradients only with respect to its own parameters.

        Args:
            params: "actor", "critic" and "log_alpha".
            row: one row.

        Returns:
            The loss, `()`, and metrics, `()` by name.
        """
        distribution, stop_gradient = self.distribution, jax.lax.stop_gradient
        # Critics: eq. 5.
        value = self.value(params["critic"], row.obs, row.action)
        td_error = row.target - value
        critic_loss, q_value = 0.5 * (td_error**2).sum(), value.mean()
        # Actor: eq. 7 and 9. The gradient flows through the action into the actor.
        outputs = self.actor.apply(params["actor"], row.obs)
        raw_action = distribution.transform_noise(outputs, row.noise)
        log_prob = distribution.log_prob(outputs, raw_action)
        action = distribution.squash(raw_action)
        value = self.value(stop_gradient(params["critic"]), row.obs, action).min()
        alpha = stop_gradient(jnp.exp(params["log_alpha"]))
        actor_loss = alpha * log_prob - value
        # Temperature: eq. 18, with log α in place of the factor α.
        target_entropy = self.config.target_entropy
        if target_entropy is None:
            target_entropy = -distribution.size
        entropy_gap = stop_gradient(-log_prob - target_entropy)
        temperature_loss = params["log_alpha"] * entropy_gap
        loss = critic_loss + actor_loss + temperature_loss
        metrics = {
            "critic_loss": critic_loss,
            "actor_loss": actor_loss,
            "entropy": -log_prob,
            "q_value": q_value,
            "td_error": jnp.abs(td_error).mean(),
        }
        return loss, metrics

    def value(
        self, critic_params: ArrayTree, obs: ArrayTree, action: jax.Array
    ) -> jax.Array:
        """Computes the values of both critics, `[2, ...]`."""
        values = jax.vmap(self.critic.apply, (0, None, None))
        return values(critic_params, obs, action)[..., 0]


if __name__ == "__main__":
    from rollout.cli import train

    train.main(SAC, Config(), num_envs=1)
