"""Double DQN with prioritized replay (arXiv:1509.06461, arXiv:1511.05952).

    rollout train dqn CartPole-v1

The file defines config, network, policy, update (rollout, gradient steps), targets and
loss, in this order. It works with JAX and host environments. Copy this file and change
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
from rollout.base import checks
from rollout.base.hyperparameters import Hyperparameters
from rollout.envs.spaces import Discrete, get_action_mask
from rollout.envs.types import AnySpace, ArrayTree
from rollout.networks import (
    Encoder,
    check_network,
    join,
    join_params,
    split_params,
    with_constants,
)
from rollout.normalization import normalize_obs, split_obs_stats, update_obs_stats
from rollout.policies import EpsilonGreedy, LinearSchedule, mask_values
from rollout.training import (
    Agent,
    check_activation,
    check_counts,
    check_discrete,
    jit_on_host,
)
from rollout.trajectories import select_fields


@dataclasses.dataclass(frozen=True)
class Config(Hyperparameters):
    """Hyperparameters of DQN, named as in Stable-Baselines3 and CleanRL.

    `learning_rate`, `gamma`, `beta` and `tau` may vary under `jax.vmap`. The other
    numbers are static.

    Attributes:
        num_updates: number of updates in the training.
        num_steps: steps per environment in each update.
        gradient_steps: gradient steps in each update, after its environment steps.
        learning_starts: environment steps before the first update.
        batch_size: transitions in a gradient step.
        learning_rate: a number, or a schedule of gradient steps.
        anneal_lr: whether the learning rate decays to 0 along a cosine; it does not
            apply to a schedule.
        buffer_size: transitions in the replay buffer, of all environments.
        n_step: rewards in a target.
        gamma: discount per environment step.
        exploration_fraction: share of the environment steps in which epsilon decays.
        exploration_final_eps: epsilon after the decay.
        prioritized: whether replay is prioritized; otherwise it is uniform.
        beta: initial exponent of the importance weights; it increases to 1.
        tau: step size of target network updates.
        target_update_interval: gradient steps between target network updates.
        normalize_observations: whether observations are normalized by running
            statistics, which are part of `params`.
        cnn: whether images go through a convolutional network; None for images of at
            least 36 x 36 pixels.
        hidden_layer_sizes: units of each hidden layer.
        activation: name of a function of `flax.linen`.
        stats_window_size: episodes in the metric `return_mean`.
    """

    num_updates: int = 400
    num_steps: int = 32
    gradient_steps: int = 32
    learning_starts: int = 1024
    batch_size: int = 128
    learning_rate: float | optax.Schedule = 1e-3
    anneal_lr: bool = True
    buffer_size: int = 100_000
    n_step: int = 3
    gamma: float = 0.99
    exploration_fraction: float = 0.1
    exploration_final_eps: float = 0.01
    prioritized: bool = True
    beta: float = 0.4
    tau: float = 0.01
    target_update_interval: int = 1
    normalize_observations: bool = False
    cnn: bool | None = None
    hidden_layer_sizes: tuple[int, ...] = (128, 128)
    activation: str = "relu"
    stats_window_size: int = 100

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some hyperparameters changed."""
        return dataclasses.replace(self, **changes)


class QNetwork(nn.Module):
    """A multilayer perceptron that outputs the value of every action."""

    num_actions: int
    observation_space: AnySpace
    hidden_layer_sizes: tuple[int, ...]
    activation: str
    obs_keys: tuple[str, ...] | None = None
    cnn: bool | None = None

    @nn.compact
    def __call__(self, obs: ArrayTree) -> jax.Array:
        """Maps `[..., *shape]` observations to `[..., num_actions]`."""
        x = join(Encoder(self.observation_space, self.obs_keys, self.cnn)(obs))
        for size in self.hidden_layer_sizes:
            x = nn.Dense(size)(x)
            x = getattr(nn, self.activation)(x)
        return nn.Dense(self.num_actions)(x)


Metrics = dict[str, jax.Array]


class TrainState(struct.PyTreeNode):
    """State of the training, a pytree that `rollout.checkpoint` can save."""

    params: ArrayTree
    target_params: ArrayTree
    opt_state: optax.OptState
    buffer_state: ArrayTree
    carry: Any  # `rollout.Carry` of the collector
    window: rollout.EpisodeWindow  # the last `stats_window_size` episodes
    key: chex.PRNGKey
    num_updates: jax.Array  # () int32, updates so far


class Row(struct.PyTreeNode):
    """Inputs of the loss, which is the loss of one row. Minibatches are `[M, ...]`."""

    obs: ArrayTree
    action: jax.Array
    target: jax.Array
    weight: jax.Array  # importance weight


class GreedyPolicy(rollout.Policy):
    """Chooses the action with the highest value."""

    network: Any = struct.field(pytree_node=False)
    action_space: Discrete = struct.field(pytree_node=False)

    def apply(
        self, params: ArrayTree, obs: ArrayTree, state: ArrayTree, key: chex.PRNGKey
    ) -> rollout.PolicyStep:
        """Chooses the greedy actions."""
        obs = normalize_obs(params, obs)
        values = self.network.apply(params, obs)
        action = mask_values(values, get_action_mask(obs)).argmax(-1)
        return rollout.PolicyStep(self.action_space.start + action, state)


@dataclasses.dataclass(frozen=True)
class DQN(Agent):
    """Double DQN with n-step targets and prioritized replay.

        agent = DQN(env, Config())
        state = agent.init(jax.random.key(0))
        state, metrics = jax.jit(agent.train, donate_argnums=0)(state)

    In host environments, call `train` outside of `jit`. It donates the replay buffer of
    `state`, so use a state only once.

    Attributes:
        env: `B` environments with a `Discrete` action space, for example from
            `rollout.envs.make_vec` or `rollout.envs.from_gymnasium`. An entry
            `action_mask` of their observations restricts the actions.
        config: hyperparameters.
        network: a flax module that maps observations to the values of all actions,
            `[..., n]`, as `QNetwork` does. None uses a `QNetwork`.
        optimizer: an optimizer of optax. None uses Adam with `learning_rate` and
            `anneal_lr` of `config`.
        mesh: devices for the training; see `rollout.training.Agent`.

    Raises:
        ValueError: if the action space is not a `Discrete`, or if
            `config.gradient_steps` or `config.target_update_interval` is not at least
            1.
    """

    # N-step returns need `episode_id` and `episode_length`.
    stored_fields = (
        "obs",
        "action",
        "reward",
        "terminated",
        "truncated",
        "next_obs",
        "episode_id",
        "episode_length",
        "mask",
    )

    config: Config = Config()
    network: nn.Module | None = None
    optimizer: optax.GradientTransformation | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_activation(self)
        check_counts(self.config, "gradient_steps", "stats_window_size")
        if checks.is_concrete(self.config.target_update_interval):  # may be traced
            check_counts(self.config, "target_update_interval")
        check_discrete("DQN", self.spec.action_space)
        if self.mesh is not None and self.config.prioritized:
            raise ValueError(
                "`config.prioritized` must be False with a `mesh`, got True: rows are "
                "sampled in proportion to the priorities of all devices."
            )

    @functools.cached_property
    def model(self) -> Any:
        """The network, by default a `QNetwork`."""
        if self.network is not None:
            return self.network
        return QNetwork(
            num_actions=self.spec.action_space.n,
            observation_space=self.spec.observation_space,
            obs_keys=self.actor_obs,
            cnn=self.config.cnn,
            hidden_layer_sizes=self.config.hidden_layer_sizes,
            activation=self.config.activation,
        )

    @functools.cached_property
    def policy(self) -> rollout.Policy:
        """The policy for collection, epsilon-greedy with a schedule."""
        config = self.config
        num_steps = config.num_updates * config.num_steps
        num_steps = max(1, int(num_steps * config.exploration_fraction))
        obs = jax.eval_shape(self.spec.observation_space.sample, jax.random.key(0))
        return EpsilonGreedy(
            self.eval_policy,
            self.spec.action_space,
            LinearSchedule(1.0, config.exploration_final_eps, num_steps),
            action_mask_fn=None if get_action_mask(obs) is None else get_action_mask,
        )

    @functools.cached_property
    def eval_policy(self) -> rollout.Policy:
        """The policy for evaluation, which takes the action with the highest value."""
        return GreedyPolicy(self.model, self.spec.action_space)

    @functools.cached_property
    def buffer(self) -> Any:
        """The replay buffer."""
        config, buffer = self.config, rollout.buffers.ReplayBuffer
        if config.prioritized:
            buffer = rollout.buffers.PrioritizedReplayBuffer
        buffer = buffer(
            config.buffer_size,
            self.spec.num_envs,
            n_step=config.n_step,
            gamma=config.gamma,
        )
        return buffer if self.mesh is None else rollout.buffers.shard(buffer, self.mesh)

    def make_optimizer(self) -> optax.GradientTransformation:
        """Returns `optimizer`, by default Adam."""
        if self.optimizer is not None:
            return self.optimizer
        config, schedule = self.config, self.config.learning_rate
        if config.anneal_lr and not callable(schedule):
            schedule = optax.cosine_decay_schedule(
                schedule, config.num_updates * config.gradient_steps
            )
        return optax.adam(schedule)

    def init_learner(
        self, key: chex.PRNGKey, obs: ArrayTree, initial_params: ArrayTree | None = None
    ) -> TrainState:
        """Initializes the training state; `init` sets carry, buffer and `key`.

        Its parameters are `initial_params`, or random parameters for None.
        """
        params = self.init_network(self.model, key, obs)
        apply_fn = functools.partial(self.model.apply, params)
        shape, batch_shape = (self.spec.action_space.n,), self.batch_shape(obs)
        check_network("network", apply_fn, (obs,), shape, batch_shape=batch_shape)
        params = self.choose_params(params | self.init_obs_stats(), initial_params)
        variables, _ = split_obs_stats(params)
        return TrainState(
            params=params,
            # Copy the parameters, so that the state can be donated.
            target_params=jax.tree.map(jnp.copy, variables),
            opt_state=self.make_optimizer().init(split_params(variables)[0]),
            buffer_state=(),
            carry=(),
            window=rollout.EpisodeWindow.init(self.config.stats_window_size),
            key=key,
            num_updates=jnp.int32(0),
        )

    def update(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Collects a trajectory and takes gradient steps on the replay buffer.

        Returns:
            The next state, and metrics, `()` each: `return_mean` of the last
            `stats_window_size` episodes, and the metrics of `loss`, averaged over the
            minibatches.
        """
        carry, trajectory = self.collector.collect_steps(
            state.carry, state.params, self.config.num_steps
        )
        learner = state.replace(carry=(), buffer_state=())
        state, metrics = self.learn(learner, state.buffer_state, trajectory)
        return state.replace(carry=carry), metrics

    # Donate the buffer, so that it is updated in place.
    @functools.partial(jit_on_host, donate_argnames="buffer_state")
    def learn(
        self,
        state: TrainState,
        buffer_state: ArrayTree,
        trajectory: rollout.Transition,
    ) -> tuple[TrainState, Metrics]:
        """Adds a trajectory `[T, B, ...]` to the buffer and takes gradient steps."""
        num_gradients = self.config.gradient_steps
        key, sample_key = jax.random.split(state.key)
        experience = select_fields(trajectory, self.stored_fields)
        buffer_state = self.buffer.add(buffer_state, experience)
        window = state.window.add(trajectory)
        params, obs_stats = split_obs_stats(state.params)
        obs_stats = update_obs_stats(obs_stats, trajectory.obs, trajectory.mask)
        state = state.replace(
            params=params | obs_stats, buffer_state=buffer_state, window=window, key=key
        )
        sample_keys = jax.random.split(sample_key, num_gradients)
        # Indices of the gradient steps since the start of the training, from 1.
        steps = state.num_updates * num_gradients + jnp.arange(1, num_gradients + 1)
        state, metrics = jax.lax.scan(self.gradient_step, state, (sample_keys, steps))
        metrics = jax.tree.map(jnp.mean, metrics)
        metrics["return_mean"] = state.window.returns.mean
        return state.replace(num_updates=state.num_updates + 1), metrics

    def gradient_step(
        self, state: TrainState, xs: tuple[chex.PRNGKey, jax.Array]
    ) -> tuple[TrainState, Metrics]:
        """Takes one gradient step on a minibatch and updates the target network."""
        config, (key, step) = self.config, xs
        options = {}
        if config.prioritized:
            schedule = optax.linear_schedule(config.beta, 1.0, config.num_updates)
            options["beta"] = schedule(state.num_updates + 1)
        sample = self.buffer.sample(
            state.buffer_state, key, config.batch_size, **options
        )
        variables, obs_stats = split_obs_stats(state.params)
        params, constants = split_params(variables)
        experience = sample.experience.replace(
            obs=normalize_obs(obs_stats, sample.experience.obs),
            next_obs=normalize_obs(obs_stats, sample.experience.next_obs),
        )
        sample = sample.replace(experience=experience)
        batch = Row(
            obs=experience.obs,
            action=experience.action,
            target=self.td_target(variables, state.target_params, sample),
            weight=sample.weights,
        )
        loss_fn = with_constants(self.mean_loss, constants)
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = self.make_optimizer().update(
            grads, state.opt_state, params
        )
        params: Any = optax.apply_updates(params, updates)
        # A step size of 0 leaves the target network unchanged.
        is_due = step % config.target_update_interval == 0
        target_params: Any = optax.incremental_update(
            params,
            split_params(state.target_params)[0],
            jnp.where(is_due, config.tau, 0.0),
        )
        buffer_state = state.buffer_state
        if config.prioritized:
            # Keep priorities above 0, so that every row can be sampled again.
            priority = metrics["td_error"] + 0.01
            buffer_state = self.buffer.update_priorities(
                buffer_state, sample.indices, priority
            )
        state = state.replace(
            params=join_params(params, constants) | obs_stats,
            target_params=join_params(target_params, constants),
            opt_state=opt_state,
            buffer_state=buffer_state,
        )
        return state, metrics

    def td_target(
        self,
        params: ArrayTree,
        target_params: ArrayTree,
        sample: rollout.buffers.types.Batch,
    ) -> jax.Array:
        """Computes the double n-step target of every row, arXiv:1509.06461, eq. 4.

            G + γ^m (1 - terminated) Q_target(next_obs, argmax_a Q(next_obs, a))

        G is the discounted sum of m rewards. `next_obs` is the observation m steps
        later; m is less than `n_step` at the end of an episode. Truncated episodes
        bootstrap.

        Args:
            params: parameters of the network, which chooses the action.
            target_params: parameters of the target network, which evaluates it.
            sample: `[M, ...]` rows of the replay buffer, with normalized observations;
                `reward` is G.

        Returns:
            `[M]` float, in discounted reward.
        """
        next_obs = sample.experience.next_obs
        values = self.model.apply(params, next_obs)
        next_action = mask_values(values, get_action_mask(next_obs)).argmax(-1)
        next_value = select(self.model.apply(target_params, next_obs), next_action)
        return sample.experience.reward + sample.discount * next_value

    def loss(self, params: ArrayTree, row: Row) -> tuple[jax.Array, Metrics]:
        """Computes the loss of one row: the weighted Huber loss of its TD error.

        Args:
            params: parameters of the network.
            row: one row.

        Returns:
            The loss, `()`, and metrics, `()` by name: the absolute `td_error` is also
            the priority of the row.
        """
        values = self.model.apply(params, row.obs)
        q_value = values[row.action - self.spec.action_space.start]
        td_error = row.target - q_value
        loss = row.weight * optax.huber_loss(td_error)
        metrics = {"loss": loss, "td_error": jnp.abs(td_error), "q_value": q_value}
        return loss, metrics

    def mean_loss(self, params: ArrayTree, batch: Row) -> tuple[jax.Array, Metrics]:
        """Computes the mean of `loss` over a minibatch, and the metrics, `[M]`."""
        loss, metrics = jax.vmap(self.loss, (None, 0))(params, batch)
        if loss.ndim > 1:
            raise ValueError(
                "`loss` of one row must be a scalar, of shape (), got shape "
                f"{loss.shape[1:]}."
            )
        return loss.mean(), metrics


def select(values: jax.Array, index: jax.Array) -> jax.Array:
    """Selects one value of each row: `[..., n]` and `[...]` to `[...]`."""
    return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]


if __name__ == "__main__":
    from rollout.cli import train

    train.main(DQN, Config(), num_envs=16)
