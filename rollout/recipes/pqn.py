"""Parallelized Q-network (PQN, arXiv:2407.04811), for JAX and host environments.

    rollout train pqn CartPole-v1

PQN is Q-learning with λ-returns and layer normalization, without a replay buffer or a
target network. The file defines config, network, policy, update (rollout, minibatches),
targets and loss, in this order. Copy this file and change it.
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
from rollout.envs.spaces import Discrete, get_action_mask
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
from rollout.policies import EpsilonGreedy, LinearSchedule, mask_values
from rollout.training import (
    Agent,
    check_activation,
    check_counts,
    check_discrete,
    jit_on_host,
)


@dataclasses.dataclass(frozen=True)
class Config(Hyperparameters):
    """Hyperparameters of PQN, named as in PureJaxQL and Stable-Baselines3.

    `learning_rate`, `gamma`, `lambda_` and `max_grad_norm` may vary under `jax.vmap`.
    The other numbers are static.

    Attributes:
        num_updates: number of updates in the training.
        num_steps: steps per environment in each update.
        num_epochs: passes over the batch in each update.
        num_minibatches: minibatches, and gradient steps, in each epoch.
        learning_rate: a number, or a schedule of gradient steps.
        anneal_lr: whether the learning rate decays linearly to 0; it does not apply to
            a schedule.
        gamma: discount per environment step.
        lambda_: trace decay of λ-returns.
        exploration_fraction: share of the environment steps in which epsilon decays.
        exploration_initial_eps: epsilon at the beginning.
        exploration_final_eps: epsilon after the decay.
        max_grad_norm: gradients are clipped to this global norm.
        normalize_observations: whether observations are normalized by running
            statistics, which are part of `params`.
        cnn: whether images go through a convolutional network; None for images of at
            least 36 x 36 pixels.
        hidden_layer_sizes: units of each hidden layer.
        activation: name of a function of `flax.linen`.
        stats_window_size: episodes in the metric `return_mean`.
    """

    num_updates: int = 244
    num_steps: int = 32
    num_epochs: int = 4
    num_minibatches: int = 16
    learning_rate: float | optax.Schedule = 1e-3
    anneal_lr: bool = True
    gamma: float = 0.99
    lambda_: float = 0.95
    exploration_fraction: float = 0.2
    exploration_initial_eps: float = 1.0
    exploration_final_eps: float = 0.05
    max_grad_norm: float = 10.0
    normalize_observations: bool = False
    cnn: bool | None = None
    hidden_layer_sizes: tuple[int, ...] = (128, 128)
    activation: str = "relu"
    stats_window_size: int = 100

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some hyperparameters changed."""
        return dataclasses.replace(self, **changes)


class QNetwork(nn.Module):
    """A multilayer perceptron with layer normalization; outputs action values."""

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
            x = nn.LayerNorm()(nn.Dense(size)(x))
            x = getattr(nn, self.activation)(x)
        return nn.Dense(self.num_actions)(x)


Metrics = dict[str, jax.Array]


class TrainState(struct.PyTreeNode):
    """State of the training, a pytree that `rollout.checkpoint` can save."""

    params: ArrayTree
    opt_state: optax.OptState
    carry: Any  # `rollout.Carry` of the collector
    window: rollout.EpisodeWindow  # the last `stats_window_size` episodes
    key: chex.PRNGKey
    num_updates: jax.Array  # () int32, updates so far


class Row(struct.PyTreeNode):
    """Inputs of the loss, which is the loss of one row. Minibatches are `[M, ...]`."""

    obs: ArrayTree
    action: jax.Array
    target: jax.Array  # λ-return
    weight: jax.Array  # 1 for valid rows, 0 for masked-out rows


class GreedyPolicy(rollout.Policy):
    """Chooses the action with the highest value. The highest value is the critic."""

    network: Any = struct.field(pytree_node=False)
    action_space: Discrete = struct.field(pytree_node=False)

    def apply(
        self, params: ArrayTree, obs: ArrayTree, state: ArrayTree, key: chex.PRNGKey
    ) -> rollout.PolicyStep:
        """Chooses the actions, and records their values."""
        values = self.values(params, obs)
        action = self.action_space.start + values.argmax(-1)
        return rollout.PolicyStep(action, state, {"value": values.max(-1)})

    def value(self, params: ArrayTree, obs: ArrayTree, state: ArrayTree) -> jax.Array:
        """Returns the highest value."""
        return self.values(params, obs).max(-1)

    def values(self, params: ArrayTree, obs: ArrayTree) -> jax.Array:
        """Computes the values of all actions, `[B, n]`, -1e9 for invalid actions."""
        values = self.network.apply(params, normalize_obs(params, obs))
        return mask_values(values, get_action_mask(obs))


@dataclasses.dataclass(frozen=True)
class PQN(Agent):
    """Parallelized Q-network.

        agent = PQN(env, Config())
        state = agent.init(jax.random.key(0))
        state, metrics = jax.jit(agent.train)(state)

    In host environments, call `train` outside of `jit`.

    Attributes:
        env: `B` environments with a `Discrete` action space, for example from
            `rollout.envs.make_vec` or `rollout.envs.from_gymnasium`. An entry
            `action_mask` of their observations restricts the actions.
        config: hyperparameters.
        network: a flax module that maps observations to the values of all actions,
            `[..., n]`, as `QNetwork` does. None uses a `QNetwork`.
        optimizer: an optimizer of optax. None uses rectified Adam with `learning_rate`,
            `anneal_lr` and `max_grad_norm` of `config`.
        mesh: devices for the training; see `rollout.training.Agent`.

    Raises:
        ValueError: if the action space is not a `Discrete`.
    """

    config: Config = Config()
    network: nn.Module | None = None
    optimizer: optax.GradientTransformation | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_activation(self)
        check_counts(self.config, "num_minibatches", "num_epochs", "stats_window_size")
        check_discrete("PQN", self.spec.action_space)

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
        initial_eps, final_eps = (
            config.exploration_initial_eps,
            config.exploration_final_eps,
        )
        obs = jax.eval_shape(self.spec.observation_space.sample, jax.random.key(0))
        return EpsilonGreedy(
            self.eval_policy,
            self.spec.action_space,
            LinearSchedule(initial_eps, final_eps, num_steps),
            action_mask_fn=None if get_action_mask(obs) is None else get_action_mask,
        )

    @functools.cached_property
    def eval_policy(self) -> rollout.Policy:
        """The policy for evaluation, which takes the action with the highest value."""
        return GreedyPolicy(self.model, self.spec.action_space)

    def make_optimizer(self) -> optax.GradientTransformation:
        """Returns `optimizer`, by default rectified Adam with clipped gradients."""
        if self.optimizer is not None:
            return self.optimizer
        config, schedule = self.config, self.config.learning_rate
        if config.anneal_lr and not callable(schedule):
            num_gradients = config.num_epochs * config.num_minibatches
            schedule = optax.linear_schedule(
                schedule, 0.0, config.num_updates * num_gradients
            )
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        # Flatten the parameters: few large operations are faster than many small ones.
        return optax.flatten(optax.chain(clip, optax.radam(schedule)))

    def init_learner(
        self, key: chex.PRNGKey, obs: ArrayTree, initial_params: ArrayTree | None = None
    ) -> TrainState:
        """Initializes the training state; `init` sets its `carry` and `key`.

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
            opt_state=self.make_optimizer().init(split_params(variables)[0]),
            carry=(),
            window=rollout.EpisodeWindow.init(self.config.stats_window_size),
            key=key,
            num_updates=jnp.int32(0),
        )

    def update(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Collects a trajectory and takes gradient steps on it.

        Returns:
            The next state, and metrics, `()` each: `return_mean` of the last
            `stats_window_size` episodes, and the metrics of `loss`, averaged over the
            minibatches.
        """
        carry, trajectory = self.collector.collect_steps(
            state.carry, state.params, self.config.num_steps
        )
        last_value = self.collector.value(carry, state.params)
        state, metrics = self.learn(state.replace(carry=()), trajectory, last_value)
        return state.replace(carry=carry), metrics

    @jit_on_host
    def learn(
        self, state: TrainState, trajectory: rollout.Transition, last_value: jax.Array
    ) -> tuple[TrainState, Metrics]:
        """Takes the gradient steps of one update on a trajectory `[T, B, ...]`."""
        config = self.config
        params, obs_stats = split_obs_stats(state.params)
        obs_stats = update_obs_stats(obs_stats, trajectory.obs, trajectory.mask)
        batch = Row(
            obs=normalize_obs(obs_stats, trajectory.obs),
            action=trajectory.action,
            target=self.targets(trajectory, last_value),
            weight=trajectory.mask.astype(jnp.float32),
        )
        key, shuffle_key = jax.random.split(state.key)
        (params, opt_state), metrics = rollout.scan_minibatches(
            self.minibatch_step,
            (params, state.opt_state),
            shuffle_key,
            batch,
            num_minibatches=config.num_minibatches,
            num_epochs=config.num_epochs,
            mesh=self.mesh,
        )
        window = state.window.add(trajectory)
        metrics = jax.tree.map(jnp.mean, metrics)
        metrics["return_mean"] = window.returns.mean
        state = state.replace(
            params=params | obs_stats,
            opt_state=opt_state,
            window=window,
            key=key,
            num_updates=state.num_updates + 1,
        )
        return state, metrics

    def targets(
        self, trajectory: rollout.Transition, last_value: jax.Array
    ) -> jax.Array:
        """Computes the λ-return of every step, section 3.3 of the paper.

            G_t = r_t + γ ((1 - λ) max_a Q(next_obs_t, a) + λ G_{t+1})

        Q has the parameters of the collecting policy. Terminated steps do not
        bootstrap. At truncated steps and at the last step, max_a Q replaces G_{t+1}.

        Args:
            trajectory: `[T, B, ...]`.
            last_value: `[B]` float, max_a Q of the observations after the last step.

        Returns:
            `[T, B]` float, in discounted reward.
        """
        value = trajectory.extras["value"]
        return rollout.lambda_returns(
            trajectory.reward,
            rollout.next_values(trajectory, value, last_value),
            trajectory.terminated,
            trajectory.truncated,
            gamma=self.config.gamma,
            lambda_=self.config.lambda_,
            mask=trajectory.mask,
        )

    def minibatch_step(
        self, learner: tuple[ArrayTree, optax.OptState], batch: Row
    ) -> tuple[Any, Metrics]:
        """Takes one gradient step on a minibatch."""
        variables, opt_state = learner
        params, constants = split_params(variables)
        loss_fn = with_constants(self.loss, constants)
        grads, metrics = mean_gradient(
            loss_fn, params, batch, batch.weight, mesh=self.mesh
        )
        updates, opt_state = self.make_optimizer().update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (join_params(params, constants), opt_state), metrics

    def loss(self, params: ArrayTree, row: Row) -> tuple[jax.Array, Metrics]:
        """Computes the loss of one row: half the squared error of the action value.

        Args:
            params: parameters of the network.
            row: one row.

        Returns:
            The loss, `()`, and metrics, `()` by name.
        """
        values = self.model.apply(params, row.obs)
        q_value = values[row.action - self.spec.action_space.start]
        loss = 0.5 * (q_value - row.target) ** 2
        return loss, {"loss": loss, "q_value": q_value}


if __name__ == "__main__":
    from rollout.cli import train

    train.main(PQN, Config(), num_envs=32)
