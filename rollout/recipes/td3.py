"""Twin delayed DDPG (TD3, arXiv:1802.09477), for JAX and host environments.

    rollout train td3 Pendulum-v1

The file defines config, networks, policy, update (rollout, gradient steps), target and
losses, in this order. Copy this file and change it.
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
from rollout.base import checks
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
from rollout.policies import Greedy, RandomWarmup
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
    """Hyperparameters of TD3, named as in CleanRL and Stable-Baselines3.

    `learning_rate`, `gamma`, `tau`, `policy_delay`, `target_policy_noise` and
    `target_noise_clip` may vary under `jax.vmap`. The other numbers are static.

    Attributes:
        num_updates: number of updates in the training.
        num_steps: steps per environment in each update.
        gradient_steps: gradient steps after each step of all environments.
        learning_starts: environment steps before the first update.
        batch_size: transitions in a gradient step.
        learning_rate: a number, or a schedule of gradient steps.
        buffer_size: transitions in the replay buffer, of all environments.
        gamma: discount per environment step.
        tau: step size of target network updates.
        policy_delay: gradient steps of the critics for each gradient step of the actor.
        target_policy_noise: standard deviation of the noise of target actions, in
            normalized actions.
        target_noise_clip: bound of the absolute value of the target noise.
        exploration_noise: standard deviation of the exploration noise, in normalized
            actions.
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
    batch_size: int = 256
    learning_rate: float | optax.Schedule = 1e-3
    buffer_size: int = 100_000
    gamma: float = 0.99
    tau: float = 0.005
    policy_delay: int = 2
    target_policy_noise: float = 0.2
    target_noise_clip: float = 0.5
    exploration_noise: float = 0.1
    normalize_observations: bool = False
    actor_obs: tuple[str, ...] | None = None
    critic_obs: tuple[str, ...] | None = None
    cnn: bool | None = None
    hidden_layer_sizes: tuple[int, ...] = (256, 256)
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

    params: dict[str, Any]  # "actor", and "critic" [2, ...]
    target_params: dict[str, Any]  # "actor" and "critic" of the target networks
    opt_state: dict[str, optax.OptState]  # for "actor" and for "critic"
    num_gradient_steps: jax.Array  # () int32
    buffer_state: ArrayTree
    carry: Any  # `rollout.Carry` of the collector
    window: rollout.EpisodeWindow  # the last `stats_window_size` episodes
    key: chex.PRNGKey
    num_updates: jax.Array  # () int32, updates so far


class Row(struct.PyTreeNode):
    """Inputs of the losses, which are losses of one row. Minibatches are `[M, ...]`."""

    obs: ArrayTree
    action: jax.Array  # [size], normalized
    target: jax.Array  # target of both critics


class Policy(rollout.Policy):
    """Adds Gaussian noise to the actor's squashed actions."""

    network: Any = struct.field(pytree_node=False)
    distribution: TanhNormal = struct.field(pytree_node=False)
    exploration_noise: float  # standard deviation, in normalized actions

    def apply(
        self, params: ArrayTree, obs: ArrayTree, state: ArrayTree, key: chex.PRNGKey
    ) -> rollout.PolicyStep:
        """Chooses the actor's actions with exploration noise."""
        obs = normalize_obs(params, obs)
        action = self.distribution.squash(self.network.apply(params["actor"], obs))
        action += self.exploration_noise * jax.random.normal(key, action.shape)
        # `postprocess` clips to the bounds.
        return rollout.PolicyStep(self.distribution.postprocess(action), state)

    def mode(
        self, params: ArrayTree, obs: ArrayTree, state: ArrayTree, key: chex.PRNGKey
    ) -> rollout.PolicyStep:
        """Chooses the actor's actions without noise."""
        obs = normalize_obs(params, obs)
        action = self.distribution.squash(self.network.apply(params["actor"], obs))
        return rollout.PolicyStep(self.distribution.postprocess(action), state)


@dataclasses.dataclass(frozen=True)
class TD3(Agent):
    """Twin delayed deep deterministic policy gradients.

        agent = TD3(env, Config())
        state = agent.init(jax.random.key(0))
        state, metrics = jax.jit(agent.train)(state)

    In host environments, call `train` outside of `jit`. It donates the replay buffer of
    `state`, so use a state only once.

    Attributes:
        env: `B` environments with a `Box` of floats as action space, made by
            `rollout.envs.make_vec`, by `rollout.envs.from_gymnasium` or otherwise.
        config: hyperparameters.
        actor_network: a flax module that maps observations to unsquashed actions,
            `[..., size]`. None uses an `MLP`.
        critic_network: a flax module that maps observations and normalized actions to
            `[..., 1]`. None uses an `MLP`.
        optimizer: an optimizer of optax of the actor, and of the critics. None uses
            Adam with `learning_rate` of `config`.
        mesh: devices for the training; see `rollout.training.Agent`.

    Raises:
        ValueError: if the action space is not a `Box` of floats, or if
            `config.gradient_steps` or `config.policy_delay` is not at least 1.
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
        if checks.is_concrete(self.config.policy_delay):  # may be traced
            check_counts(self.config, "policy_delay")
        TanhNormal(self.spec.action_space)  # raises if it is not a Box of floats

    @functools.cached_property
    def distribution(self) -> TanhNormal:
        """Squashes and scales actions; TD3 does not sample from this distribution."""
        return TanhNormal(self.spec.action_space)

    @functools.cached_property
    def actor(self) -> Any:
        """The network of the actor, by default an `MLP`."""
        return self.actor_network or self.make_mlp(
            self.distribution.size, self.actor_obs
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
        """The policy for collection: Gaussian noise, after random actions in a box.

        Unbounded actions have no uniform distribution, so their noise begins at once.
        """
        noise, space = self.config.exploration_noise, self.spec.action_space
        policy = Policy(self.actor, self.distribution, noise)
        if not self.distribution.is_bounded:
            return policy
        return RandomWarmup(policy, space, self.num_initial_steps)

    @functools.cached_property
    def eval_policy(self) -> rollout.Policy:
        """The policy for evaluation, without noise."""
        noise = self.config.exploration_noise
        return Greedy(Policy(self.actor, self.distribution, noise))

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
        }
        apply_actor = functools.partial(self.actor.apply, params["actor"])
        shape, batch_shape = (self.distribution.size,), self.batch_shape(obs)
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
            target_params=jax.tree.map(jnp.copy, variables),
            opt_state={
                name: self.make_optimizer().init(split_params(x)[0])
                for name, x in variables.items()
            },
            num_gradient_steps=jnp.int32(0),
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
            `stats_window_size` episodes, and the metrics of `critic_loss`, averaged
            over gradient steps.
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
        """Updates the critics, and the actor and targets every `policy_delay` steps."""
        sample_key, target_key = jax.random.split(key)
        sample = self.buffer.sample(buffer_state, sample_key, self.config.batch_size)
        _, obs_stats = split_obs_stats(state.params)
        experience = sample.experience.replace(
            obs=normalize_obs(obs_stats, sample.experience.obs),
            next_obs=normalize_obs(obs_stats, sample.experience.next_obs),
        )
        batch = Row(
            obs=experience.obs,
            action=self.distribution.normalize(experience.action),
            target=self.target(state.target_params, experience, target_key),
        )
        state, metrics = self.apply_gradient(state, "critic", self.critic_loss, batch)
        state = state.replace(num_gradient_steps=state.num_gradient_steps + 1)

        def update_actor(state: TrainState) -> TrainState:
            critic_params = state.params["critic"]
            loss_fn = functools.partial(self.actor_loss, critic_params)
            state, _ = self.apply_gradient(state, "actor", loss_fn, batch)
            variables, _ = split_obs_stats(state.params)
            params, constants = split_params(variables)
            target_params: Any = optax.incremental_update(
                params, split_params(state.target_params)[0], self.config.tau
            )
            return state.replace(target_params=join_params(target_params, constants))

        is_due = state.num_gradient_steps % self.config.policy_delay == 0
        return jax.lax.cond(is_due, update_actor, lambda x: x, state), metrics

    def apply_gradient(
        self, state: TrainState, name: str, loss_fn: Any, batch: Row
    ) -> tuple[TrainState, Metrics]:
        """Takes a gradient step for "actor" or "critic", with all rows weighted 1."""
        params, constants = split_params(state.params[name])
        loss_fn, weight = (
            with_constants(loss_fn, constants),
            jnp.ones(len(batch.target)),
        )
        grads, metrics = mean_gradient(loss_fn, params, batch, weight, mesh=self.mesh)
        updates, opt_state = self.make_optimizer().update(
            grads, state.opt_state[name], params
        )
        params = optax.apply_updates(params, updates)
        state = state.replace(
            params=state.params | {name: join_params(params, constants)},
            opt_state=state.opt_state | {name: opt_state},
        )
        return state, metrics

    def target(
        self,
        target_params: dict[str, Any],
        experience: rollout.Transition,
        key: chex.PRNGKey,
    ) -> jax.Array:
        """Computes the target of the critics, eq. 14 of the paper, `[M]`.

        Terminated steps do not bootstrap; truncated steps do.
        """
        config, next_obs = self.config, experience.next_obs
        action = self.distribution.squash(
            self.actor.apply(target_params["actor"], next_obs)
        )
        noise = config.target_policy_noise * jax.random.normal(key, action.shape)
        noise = jnp.clip(noise, -config.target_noise_clip, config.target_noise_clip)
        action = self.distribution.clip(action + noise)
        next_value = self.value(target_params["critic"], next_obs, action).min(0)
        discount = config.gamma * (1.0 - experience.terminated)
        return experience.reward + discount * next_value

    def critic_loss(
        self, critic_params: ArrayTree, row: Row
    ) -> tuple[jax.Array, Metrics]:
        """Computes the sum of the squared errors of both critics, `()`."""
        value = self.value(critic_params, row.obs, row.action)
        loss = ((value - row.target) ** 2).sum()
        return loss, {"critic_loss": loss, "value": value.mean()}

    def actor_loss(
        self, critic_params: ArrayTree, actor_params: ArrayTree, row: Row
    ) -> tuple[jax.Array, Metrics]:
        """Computes the negative value of the actor's action, `()`, by critic 1."""
        action = self.distribution.squash(self.actor.apply(actor_params, row.obs))
        return -self.value(critic_params, row.obs, action)[0], {}

    def value(
        self, critic_params: ArrayTree, obs: ArrayTree, action: jax.Array
    ) -> jax.Array:
        """Computes the values of both critics, `[2, ...]`."""
        values = jax.vmap(self.critic.apply, (0, None, None))
        return values(critic_params, obs, action)[..., 0]


if __name__ == "__main__":
    from rollout.cli import train

    train.main(TD3, Config(), num_envs=1)
