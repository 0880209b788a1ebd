"""`Agent`: the interface of trainable agents and the methods that all agents share.

The agents of `rollout.recipes` are subclasses that add an algorithm. To write another
agent, define the four methods that `Agent` lists.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from rollout.agents.shared_policy import (
    SharedCollector,
    share_policy,
    spec_of_agent,
)
from rollout.base import checks
from rollout.base.names import Hints
from rollout.base.prng import inline
from rollout.base.programs import Static, hash_of_types
from rollout.collector import Collector
from rollout.envs.host.types import HostVectorEnv
from rollout.envs.multi_agent import has_agents
from rollout.envs.spaces import Discrete, EnvSpec, env_spec
from rollout.envs.types import AnySpace, ArrayTree, BaseVectorEnv
from rollout.host.host_collector import HostCollector
from rollout.networks import (
    PRIVILEGED,
    check_module,
    check_nnx,
    mask_keys,
    obs_keys,
    select_parts,
)
from rollout.normalization import init_obs_stats, split_obs_stats, update_obs_stats
from rollout.policies import Greedy
from rollout.sharding import LaneSharding, shard
from rollout.trajectories import select_fields
from rollout.types import Policy, Transition

State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class Agent(Hints):
    """An immutable agent: environments, hyperparameters and a training algorithm.

    A subclass is a frozen dataclass that defines:

    - `policy`: the policy that collects experience;
    - `init_learner(key, obs)`: returns the initial state for observations `[B, ...]`, a
      `flax.struct.PyTreeNode` with fields `params`, `carry`, `key` and `num_updates`.
      `init` sets `carry` and `key`. It needs a third argument, see `choose_params`, if
      `init` is called with `params`;
    - `buffer` and `stored_fields`, if `config` has `learning_starts`: the replay buffer
      and the fields that it stores. The state also has the fields `buffer_state` and
      `window`. Override `init_buffer` for any other replay memory;
    - `update(state)`: collects experience and updates the parameters; returns the next
      state and metrics by name.

    If `env` has several agents with equal spaces that act at every step, they share
    one policy and its parameters (parameter sharing): each agent chooses its action
    from its own observation, and learns from its own rewards. The metric `return_mean`
    is the mean return of the team, the sum over the agents.

    Agents compare by value. Assigning to a field raises; `replace` returns a copy.

    Attributes:
        env: `B` parallel environments, JAX or host. An `EnvSpec` suffices for
            `predict`.
        config: hyperparameters, a frozen dataclass. `num_updates` is the number of
            updates of a training run and `num_steps` is the number of steps per
            environment in each update. With a replay buffer, `learning_starts` is the
            number of environment steps before the first update.
        mesh: devices for the training, such as `jax.make_mesh((8,), ("lanes",))`, or
            None for one device. The lanes and their rows are sharded over the only axis
            of the mesh, or over "lanes". Parameters are replicated.

    Raises:
        ValueError: if a field is a class instead of an object, if a network is not a
            flax module, or `optimizer` not an optimizer of optax, if `env` updates its
            statistics of observations, if `config.actor_obs` or `config.critic_obs`
            does not fit the observation space or the network, if `mesh` does not fit
            the environments, or if `env` has several agents that cannot share one
            policy.
    """

    stored_fields: ClassVar[tuple[str, ...]] = ()

    env: Any
    config: Any = None
    mesh: Mesh | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, type):
                raise ValueError(
                    f"`{name}` must be an object, got the class "
                    f"{value.__name__}. Write `{value.__name__}(...)`."
                )
            if isinstance(value, Mesh) and name != "mesh":
                raise ValueError(
                    f"`{name}` must not be a mesh, got a mesh of {value.size} "
                    "devices. Pass it by name: `mesh=mesh`."
                )
            if name in self._custom_networks:
                check_module(name, value)
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and not hasattr(optimizer, "update"):
            raise ValueError(
                "`optimizer` must be an optimizer of optax, for example "
                f"`optax.adam(1e-3)`, got {checks.describe(optimizer)}."
            )
        if self.config is not None and not dataclasses.is_dataclass(self.config):
            raise ValueError(
                "`config` must be a dataclass, such as the `Config(...)` of a recipe, "
                f"got {checks.describe(self.config)}. Write "
                f"`{type(self).__name__}(env, Config(...))` with `env = "
                "rollout.envs.make_vec(env_id, num_envs)`."
            )
        if isinstance(self.env, BaseVectorEnv) and self.env.learns:
            raise ValueError(
                "`env` must not update statistics of observations, got "
                f"{type(self.env).__name__}. Pass the environments without the wrapper "
                "and set `Config(normalize_observations=True)`."
            )
        self._check_obs_keys()
        if self.mesh is not None:
            self._check_mesh(self.mesh)

    def _check_obs_keys(self) -> None:
        """Raises unless the parts of `actor_obs` and `critic_obs` can be selected."""
        for option in ("actor_obs", "critic_obs"):
            keys = self._option(option)
            if keys is None:
                continue
            if self._custom_networks:
                raise ValueError(
                    f"`config.{option}` must be None with a custom "
                    f"`{self._custom_networks[0]}`, got {keys!r}. Select the parts of "
                    "the observation in the network."
                )
            obs_keys(option, keys, self.spec.observation_space)

    def _option(self, name: str) -> Any:
        """Returns a hyperparameter, or None if `config` does not have this field."""
        return getattr(self.config, name, None)

    def _check_mesh(self, mesh: Mesh) -> None:
        """Raises unless the lanes can be sharded over the devices of a mesh."""
        mesh, axis = checks.check_mesh(mesh)
        if isinstance(self.env, HostVectorEnv):
            raise ValueError(
                "`mesh` must be None for host environments, whose steps run on the "
                f"CPU, got {mesh.size} devices."
            )
        num_devices = mesh.shape[axis]
        label = f"the {num_devices} devices of `mesh`"
        checks.check_multiple("num_envs", self.env.num_envs, num_devices, label)

    @property
    def policy(self) -> Policy:
        """The policy that collects experience."""
        raise NotImplementedError

    @functools.cached_property
    def eval_policy(self) -> Policy:
        """The policy for evaluation and `predict`: takes the most likely action."""
        return Greedy(self.policy)

    @property
    def buffer(self) -> Any:
        """The replay buffer, for example a `rollout.buffers.ReplayBuffer`."""
        raise NotImplementedError

    @functools.cached_property
    def spec(self) -> EnvSpec:
        """The spaces of a single environment, and `num_envs`.

        If several agents share the policy, the spaces are the spaces of one agent, and
        `num_envs` is the number of agents in all environments.
        """
        if has_agents(self.env):
            return spec_of_agent(self.env)
        return self.env if isinstance(self.env, EnvSpec) else env_spec(self.env)

    @functools.cached_property
    def collector(self) -> Any:
        """The collector that runs `policy` in `env`.

        It is a `SharedCollector` if `env` has several agents, and otherwise a
        `Collector` or a `HostCollector`.
        """
        collector = self.make_collector(self.env, self.policy)
        return SharedCollector(collector) if has_agents(self.env) else collector

    def make_collector(self, env: Any, policy: Policy) -> Collector | HostCollector:
        """Makes a collector of a policy, which several agents share."""
        policy = share_policy(policy, env) if has_agents(env) else policy
        return make_collector(env, policy, self.mesh)

    @functools.cached_property
    def eval_collector(self) -> Collector | HostCollector:
        """The collector that runs `eval_policy` in `env`, for `rollout.evaluate`."""
        return self.make_collector(self.env, self.eval_policy)

    @functools.cached_property
    def _without_env(self) -> Static:
        """This agent with spaces in place of environments, as an argument of `jit`."""
        return Static(self.replace(env=self.spec))

    @property
    def _custom_networks(self) -> list[str]:
        """Names of the networks that the user passed."""
        names = "network", "actor_network", "critic_network"
        return [name for name in names if vars(self).get(name) is not None]

    @functools.cached_property
    def actor_obs(self) -> tuple[str, ...] | None:
        """Parts of a `Dict` observation that the default actor reads, else None.

        The default is all parts except `privileged_state`, which a robot does not
        observe. A custom network receives all parts.
        """
        keys = self._option("actor_obs")
        without = None if self._custom_networks else PRIVILEGED
        space = self.spec.observation_space
        return obs_keys("actor_obs", keys, space, without=without)

    @functools.cached_property
    def critic_obs(self) -> tuple[str, ...] | None:
        """Parts of a `Dict` observation that the default critic reads, else None."""
        keys = self._option("critic_obs")
        return obs_keys("critic_obs", keys, self.spec.observation_space)

    def init_obs_stats(self) -> dict[str, Any]:
        """Returns the statistics to join to the initial parameters.

        The dict is empty unless `config.normalize_observations` is True.
        """
        if not self._option("normalize_observations"):
            return {}
        return init_obs_stats(self.spec.observation_space, self._option("cnn"))

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def evaluate_schedules(self, step: jax.Array, *names: str) -> Self:
        """Returns an agent whose hyperparameters are numbers in place of schedules.

        Args:
            step: argument of the schedules, for example the number of gradient steps.
            *names: hyperparameters that may be schedules.
        """
        values = {name: getattr(self.config, name) for name in names}
        values = {name: x(step) for name, x in values.items() if callable(x)}
        if not values:
            return self
        return self.replace(config=dataclasses.replace(self.config, **values))

    def init_network(self, network: Any, key: chex.PRNGKey, *args: Any) -> Any:
        """Initializes the variables of a flax module: `network.init(key, *args)`.

        Default networks get the same bits from keys that compile in half of the time.
        A custom network may need a distribution that such keys do not support.
        """
        key = key if self._custom_networks else inline(key)
        # A module without parameters has no collection `params`.
        variables = {"params": {}, **network.init(key, *args)}
        if type(network).__name__ == "ToLinen":  # flax.nnx takes long to import
            check_nnx(network, variables, *args)
        return variables

    def choose_params(
        self, params: ArrayTree, initial_params: ArrayTree | None
    ) -> ArrayTree:
        """Returns the parameters with which a training starts, for `init_learner`.

        Args:
            params: random parameters, with the statistics of `init_obs_stats`.
            initial_params: parameters of an earlier training, or None.

        Raises:
            ValueError: if the structures, shapes or dtypes differ.
        """
        if initial_params is None:
            return params
        text = "`params` must fit the networks and the config of the agent"
        checks.check_same_types(text, params, initial_params)
        return initial_params

    def init_learner(self, key: chex.PRNGKey, obs: ArrayTree) -> Any:
        """Initializes a state without `carry` and `key` for observations `[B, ...]`."""
        raise NotImplementedError

    def init_buffer(self, state: Any, trajectory: Transition) -> Any:
        """Initializes the replay buffer of a state and stores the first steps.

        Also updates the statistics of observations and the window of episodes.

        Args:
            state: result of `init_learner`.
            trajectory: `[T, B, ...]`, the first steps.
        """
        experience = select_fields(trajectory, self.stored_fields)
        buffer_state = self.buffer.init(jax.tree.map(lambda x: x[0], experience))
        params, obs_stats = split_obs_stats(state.params)
        obs_stats = update_obs_stats(obs_stats, trajectory.obs, trajectory.mask)
        return state.replace(
            params=params | obs_stats,
            buffer_state=self.buffer.add(buffer_state, experience),
            window=state.window.add(trajectory),
        )

    def init(self, key: chex.PRNGKey, *, params: ArrayTree | None = None) -> Any:
        """Starts an episode in every environment and initializes the parameters.

        Args:
            key: one typed key, the source of all randomness of the training run.
            params: initial parameters, the field `params` of a training state or of a
                result of `load`, with all statistics. The environments, their number
                and the devices may differ from the earlier training. Target networks
                are copies. None initializes random parameters.

        Raises:
            ValueError: if `env` is only an `EnvSpec`, or if `params` does not fit the
                networks and the config.
        """
        checks.check_key(key)
        if isinstance(self.env, EnvSpec):
            raise ValueError(
                "`env` must be environments to start episodes, got an EnvSpec. Make "
                "the agent with environments, or call `init_learner(key, obs)`."
            )
        if self.mesh is None and self.collector.env.sharding is not None:
            raise ValueError(
                "`mesh` must be given to train with sharded lanes, got None: every "
                "device would repeat all gradient steps. Pass the mesh to the agent, "
                "and environments that are not sharded."
            )
        keys = jax.random.split(key, 3)
        carry = self.collector.init(keys[0])
        shared = has_agents(self.env)
        obs = self.collector.agent_obs(carry) if shared else carry.obs
        # Compile one program instead of many small programs.
        initial = jax.tree.map(_to_host, params)
        state = jax.jit(self._init_learner)(keys[1:], obs, initial)
        if num_steps := self.num_initial_steps:
            carry, trajectory = self.collector.collect_steps(
                carry, state.params, num_steps
            )
            state = jax.jit(self.init_buffer)(state, trajectory)
        return state.replace(carry=carry)

    def _init_learner(
        self, keys: chex.PRNGKey, obs: ArrayTree, initial_params: ArrayTree | None
    ) -> Any:
        """Initializes a state without `carry` from two keys.

        The key of the state is then on the devices of the environments, like the other
        arrays, so that `train` compiles once.
        """
        args = () if initial_params is None else (initial_params,)
        state = self.init_learner(keys[0], obs, *args).replace(key=keys[1])
        if self.mesh is None:
            return state
        return LaneSharding(*checks.check_mesh(self.mesh)).replicate(state)

    def update(self, state: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Collects experience, updates the parameters, returns `(state, metrics)`."""
        raise NotImplementedError

    def train(
        self, state: Any, num_updates: int | None = None
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Runs updates: a `jax.lax.scan`, or a Python loop for host environments.

        Args:
            state: result of `init` or of an earlier call.
            num_updates: number of updates, at least 1. Static. None for
                `config.num_updates`. With `anneal_lr`, the learning rate is 0 after
                `config.num_updates` updates in all.

        Returns:
            The next state and the metrics of every update, `[num_updates]` by name.

        Raises:
            ValueError: if `state` is not a training state, or if `num_updates` is not
                an int of at least 1.
        """
        if not hasattr(state, "carry"):
            raise ValueError(
                "`state` must be a result of `agent.init(key)` or of an earlier "
                f"training, got {checks.describe(state)}. To continue a run of "
                "`rollout.recipes.run`, pass `resume=True` to it."
            )
        size: Any = self.config.num_updates if num_updates is None else num_updates
        is_host = isinstance(self.env, HostVectorEnv)
        return scan_updates(self.update, state, size, is_host=is_host)

    @property
    def num_initial_steps(self) -> int:
        """Steps per environment before the first update; 0 without a replay buffer."""
        learning_starts = self._option("learning_starts")
        if learning_starts is None:
            return 0
        return max(1, -(-learning_starts // self.env.num_envs))

    def env_steps(self, num_updates: Any) -> Any:
        """Returns the number of environment steps after `num_updates`, int or array."""
        steps = np.asarray(num_updates, np.int64) * self.config.num_steps
        steps = (steps + self.num_initial_steps) * self.env.num_envs
        return steps if steps.ndim else int(steps)

    def predict(self, params: ArrayTree, obs: ArrayTree) -> ArrayTree:
        """Returns the most likely action for a single observation.

        Args:
            params: parameters of the policy.
            obs: `[*shape]`, an observation as `env` returns it. A dict may lack the
                parts that only the critic reads, such as `privileged_state`.

        Raises:
            ValueError: if `obs` has another shape.
        """
        return predict_step(self.eval_policy, params, self.prepare_obs(obs), ())[0]

    def prepare_obs(self, obs: ArrayTree) -> ArrayTree:
        """Checks a single observation and selects the parts that the actor reads."""
        if isinstance(obs, list):
            obs = np.asarray(obs, self.spec.observation_space.dtype)
        expected, parts = self._predicted_obs
        if isinstance(obs, Mapping) and isinstance(expected, Mapping):
            obs = {key: x for key, x in obs.items() if key in expected}
        if (shape := jax.tree.map(np.shape, obs)) != expected:
            raise ValueError(
                f"`obs` must be a single observation, of shape {expected}, got {shape}."
            )
        for x, part in zip(jax.tree.leaves(obs), parts, strict=False):
            is_integer = jnp.issubdtype(part.dtype or float, jnp.integer)
            if not is_integer or part.bounds is None or not checks.is_concrete(x):
                continue
            # A network accepts an integer outside the space without an error.
            x, (low, high) = np.asarray(x), part.bounds
            if np.any((x < low) | (x > high) | (x % 1 != 0)):
                raise ValueError(f"`obs` must be in {part}, got {checks.describe(x)}.")
        return obs

    def batch_shape(self, obs: ArrayTree) -> tuple[int, ...]:
        """Returns the leading axes of observations `[..., *shape]`."""
        leaf, leaf_shape = jax.tree.leaves(obs)[0], jax.tree.leaves(self._obs_leaves)[0]
        return leaf.shape[: leaf.ndim - leaf_shape.ndim]

    @functools.cached_property
    def _obs_leaves(self) -> Any:
        """Shapes and dtypes of a single observation."""
        sample = self.spec.observation_space.sample
        return jax.eval_shape(sample, jax.random.key(0))

    @functools.cached_property
    def _predicted_obs(self) -> tuple[Any, list[Any]]:
        """Shapes and spaces of the leaves of an observation for `predict`."""
        space = self.spec.observation_space
        keys = self.actor_obs and (*self.actor_obs, *mask_keys(space))
        obs, space = select_parts(space, self._obs_leaves, keys)
        return jax.tree.map(np.shape, obs), space.leaves()


def _to_host(x: Any) -> Any:
    """Returns an array as NumPy, because it may be on other devices."""
    return x if isinstance(x, Tracer) else jax.device_get(x)


def jit_on_host(method: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiles a method of an agent if its environments are host environments.

    For JAX environments, the method is traced as a part of its caller. Equal agents
    share the compiled program, which depends only on the spaces of the environments.

    Args:
        method: a method of an `Agent` without side effects, whose arguments and results
            are pytrees of arrays. It must not use `self.env` or `self.collector`.
        **options: options of `jax.jit`, such as `donate_argnames`.
    """

    @functools.wraps(method)  # `jax.jit` finds donated arguments by their names
    def run(self: Static, *args: Any) -> Any:
        return method(self.value, *args)

    compiled = jax.jit(run, static_argnums=0, **options)

    @functools.wraps(method)
    def call(self: Agent, *args: Any) -> Any:
        if isinstance(self.env, HostVectorEnv):
            return compiled(self._without_env, *args)
        return method(self, *args)

    return call


def predict_step(
    policy: Policy, params: ArrayTree, obs: ArrayTree, state: ArrayTree
) -> tuple[ArrayTree, ArrayTree]:
    """Applies a policy to a single observation, as one compiled program.

    Args:
        policy: policy without randomness, such as `agent.eval_policy`.
        params: parameters of the policy.
        obs: `[*shape]`, a single observation.
        state: state of a recurrent policy for one environment, `[1, ...]`; `()` for any
            other policy.

    Returns:
        The action, `[*shape]`, and the next state.

    Raises:
        ValueError: if `params` is the training state of an agent.
    """
    if hasattr(params, "params") and hasattr(params, "carry"):
        raise ValueError(
            "`params` must be parameters, got a training state of type "
            f"{type(params).__name__}. Pass `state.params`."
        )
    return _predict(hash_of_types(policy), policy, params, obs, state)


# `types` separates jit cache entries; see `hash_of_types`.
@functools.partial(jax.jit, static_argnums=0)
def _predict(
    types: int, policy: Policy, params: ArrayTree, obs: ArrayTree, state: ArrayTree
) -> tuple[ArrayTree, ArrayTree]:
    """Computes `predict_step`."""
    del types  # unused
    batch = jax.tree.map(lambda x: jnp.asarray(x)[None], obs)
    step = policy.apply(params, batch, state, jax.random.key(0))
    return jax.tree.map(lambda x: x[0], step.action), step.state


def make_collector(
    env: Any, policy: Policy, mesh: Mesh | None = None
) -> Collector | HostCollector:
    """Makes a collector for JAX or host environments.

    Args:
        env: a `VectorEnv`, for example `rollout.envs.make_vec(id, num_envs)`, or a
            `HostVectorEnv`, for example `rollout.envs.from_gymnasium(id, num_envs)`.
        policy: policy that chooses the actions.
        mesh: devices over which `rollout.shard` shards the lanes, or None.

    Raises:
        ValueError: if `env` is not a `VectorEnv` or a `HostVectorEnv`, or is not a
            `VectorEnv` that the mesh can shard.
    """
    if isinstance(env, EnvSpec):
        raise ValueError(
            "The agent must have environments to collect experience, got an EnvSpec. "
            "Pass environments to an agent of `load`: `agent.replace(env=env)`."
        )
    collector: Any = HostCollector if isinstance(env, HostVectorEnv) else Collector
    collector = collector(env=env, policy=policy)
    return collector if mesh is None else shard(collector, mesh)


def check_counts(config: Any, *names: str) -> None:
    """Checks that hyperparameters are integers of at least 1.

    Raises:
        ValueError: if a value is not an int of at least 1, or if it is traced.
    """
    for name in names:
        checks.check_int(f"config.{name}", vars(config)[name])


def check_activation(agent: Agent) -> None:
    """Checks the activation function of the default network of an agent.

    Raises:
        ValueError: if `config.activation` is not the name of a function of flax.linen,
            and the agent has no custom network.
    """
    if agent._custom_networks:
        return
    name = agent.config.activation
    if not (isinstance(name, str) and callable(getattr(nn, name, None))):
        raise ValueError(
            "`config.activation` must be the name of a function of `flax.linen`, for "
            f"example 'tanh', got {checks.describe(name)}. Pass a custom network for "
            "another function."
        )


def check_discrete(name: str, action_space: AnySpace) -> None:
    """Checks the action space of an agent that learns the values of all actions.

    Raises:
        ValueError: if the space is not a `Discrete`. The message contains `name`, the
            name of the agent.
    """
    if not isinstance(action_space, Discrete):
        raise ValueError(
            f"`env.action_space` must be a Discrete for {name}, got "
            f"{type(action_space).__name__}. Use PPO of `rollout.recipes.ppo` for any "
            "space, or SAC of `rollout.recipes.sac` for a Box."
        )


def check_desired_kl(config: Any, optimizer: Any = None) -> None:
    """Checks the options of an adaptive learning rate.

    Raises:
        ValueError: if `config.desired_kl` is given with a schedule or an optimizer.
    """
    if config.desired_kl is not None and optimizer is not None:
        raise ValueError(
            "`config.desired_kl` must be None with `optimizer`, got "
            f"{config.desired_kl}: only the learning rate of the default optimizer is "
            "adapted."
        )
    if config.desired_kl is not None and callable(config.learning_rate):
        raise ValueError(
            "`config.learning_rate` must be a number with `desired_kl`, got a "
            "schedule. Pass the initial learning rate."
        )


def adapt_learning_rate(
    learning_rate: jax.Array, kl: jax.Array, desired_kl: float
) -> jax.Array:
    """Adapts a learning rate to the KL divergence of a minibatch, as rsl_rl does.

    Divides the rate by 1.5 if `kl` is above twice `desired_kl`, and multiplies it by
    1.5 if `kl` is below half of it, within [1e-5, 1e-2]. A `kl` of exactly 0, as in the
    first gradient step of an update, changes nothing.

    Args:
        learning_rate: `()` float.
        kl: `()` float, mean over the minibatch of KL(collecting policy || policy).
        desired_kl: target of `kl`, above 0.

    Source:
        "Learning to Walk in Minutes Using Massively Parallel Deep Reinforcement
        Learning" (Rudin et al., arXiv:2109.11978), appendix.
    """
    lower = jnp.maximum(learning_rate / 1.5, 1e-5)
    higher = jnp.minimum(learning_rate * 1.5, 1e-2)
    is_low = (kl < desired_kl / 2) & (kl > 0)
    learning_rate = jnp.where(is_low, higher, learning_rate)
    return jnp.where(kl > 2 * desired_kl, lower, learning_rate)


def scan_updates(
    update_fn: Callable[[State], tuple[State, ArrayTree]],
    state: State,
    num_updates: int,
    *,
    is_host: bool = False,
) -> tuple[State, Any]:
    """Runs updates as one `jax.lax.scan` or as a Python loop.

    Args:
        update_fn: function that maps the state to the next state and metrics.
        state: initial state.
        num_updates: number of updates, at least 1.
        is_host: whether the environments are host environments, which require a Python
            loop; see `is_host` of the collector.

    Returns:
        The last state and the metrics of every update, `[num_updates, ...]`.

    Raises:
        ValueError: if `num_updates` is not an int of at least 1.
    """
    num_updates = checks.check_int("num_updates", num_updates)
    if not is_host:
        return jax.lax.scan(
            lambda state, _: update_fn(state), state, length=num_updates
        )
    metrics = []
    for _ in range(num_updates):
        state, update_metrics = update_fn(state)
        metrics.append(update_metrics)
    return state, jax.tree.map(lambda *x: np.stack(x), *jax.device_get(metrics))
