"""Defines the data and callables of a rollout: `Transition`, `Carry`, `Policy`."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, runtime_checkable

import chex
import jax
import numpy as np
from flax import struct
from typing_extensions import TypeVar

from rollout.base import checks
from rollout.base.names import Hints
from rollout.envs.types import ArrayTree, VectorEnv

Key = chex.PRNGKey
Params = Any  # parameters of the policy
Obs = ArrayTree  # [B, ...]
PolicyState = ArrayTree  # [B, ...]

# Types of a custom policy. A type checker infers them from `fn` of `stateless_policy`
# or `recurrent_policy` and passes them to `Transition`. Without `bound=Any` it would
# infer `object` for the arguments of a `lambda`.
ParamsT = TypeVar("ParamsT", bound=Any, default=Any)
ObsT = TypeVar("ObsT", bound=Any, default=Any)
ActionT = TypeVar("ActionT", bound=Any, default=Any)


class Transition(Hints, struct.PyTreeNode, Generic[ObsT, ActionT], kw_only=True):
    """One step of every lane, or a trajectory if stacked over time.

    Shapes are given for a trajectory of `T` steps of `B` lanes. A single transition has
    no `T` axis.

    Attributes:
        obs: `[T, B, ...]`, observation from which the action was chosen.
        action: `[T, B, ...]`, action that the policy chose. A wrapper such as
            `rollout.envs.RescaleAction` may change it before the environment step.
        reward: `[T, B]` float32, reward for that action.
        terminated: `[T, B]` bool, the task ended here: do not bootstrap.
        truncated: `[T, B]` bool, the episode was cut off, for example by a time limit:
            bootstrap from `next_obs`. `terminated` takes precedence over `truncated`.
        next_obs: `[T, B, ...]`, the true successor, even at the end of an episode:
            never the observation of a reset.
        mask: `[T, B]` bool, False if the lane was idle: the row is masked out.
        episode_id: `[T, B]` int32, never reused within a run.
        episode_return: `[T, B]` float32, undiscounted sum of the episode's rewards
            including this step: the return of the episode if `done`.
        episode_length: `[T, B]` int32, steps of the episode including this step.
        extras: `[T, B, ...]`, outputs of the policy besides the action.
        info: `[T, B, ...]`, the `info` that the environment returned.
        accumulated: `[T, B, ...]` by name, values of the collector's accumulators for
            the episode including this step; `()` without accumulators.
        final_value: `[T, B]` float, value of `next_obs` if the episode was `truncated`
            and not `terminated`, else 0; `()` if the policy has no `value`. With
            several agents it may be `[T, B, A_g]` by group, and is also evaluated if
            only one agent was truncated.
    """

    # CONTRIBUTING.md lists the places of a new field.
    obs: ObsT  # [T, B, ...]
    action: ActionT  # [T, B, ...]
    reward: jax.Array  # [T, B]
    terminated: jax.Array  # [T, B]
    truncated: jax.Array  # [T, B]
    next_obs: ObsT  # [T, B, ...]
    mask: jax.Array  # [T, B]
    episode_id: jax.Array  # [T, B]
    episode_return: jax.Array  # [T, B]
    episode_length: jax.Array  # [T, B]
    extras: ArrayTree  # [T, B, ...]
    info: ArrayTree  # [T, B, ...]
    accumulated: ArrayTree = ()  # [T, B, ...]
    final_value: ArrayTree = ()  # [T, B], or by group [T, B, A_g]

    @property
    def done(self) -> jax.Array:
        """`[T, B]` bool, True if the episode ended at this step."""
        return self.terminated | self.truncated

    @property
    def first(self) -> jax.Array:
        """`[T, B]` bool, True at the first step of an episode."""
        return self.episode_length == 1


RecordFn = Callable[[Transition[ObsT, ActionT]], Transition[ObsT, ActionT]]

FlagFn = Callable[[Transition], jax.Array]  # maps one step to `[B]` bool


class Episode(struct.PyTreeNode, kw_only=True):
    """The current episode of each lane.

    Attributes:
        key: `[B]` typed keys, the source of all randomness of each episode.
        episode_return: `[B]` float32, undiscounted sum of rewards so far.
        episode_length: `[B]` int32, steps so far.
        episode_id: `[B]` int32, `n * B + i` for lane i's n-th episode (from 0), and
            `-1 - e` for position e in the queue of `collect_episodes`. After 2^31
            episodes lane ids and queue ids overlap. After 2^32 episodes the ids and the
            randomness of episodes repeat.
        accumulated: `[B, ...]` by name, values of the collector's accumulators so far.
    """

    key: chex.PRNGKey  # [B]
    episode_return: jax.Array  # [B]
    episode_length: jax.Array  # [B]
    episode_id: jax.Array  # [B]
    accumulated: ArrayTree = ()  # [B, ...]


class Carry(struct.PyTreeNode, kw_only=True):
    """The state between two steps: everything a run needs to continue.

    Attributes:
        key: `()` typed root key; it never changes.
        step: `()` int32, steps taken so far by every lane.
        next_episode: `()` int32, position of the next episode in the queue of
            `collect_episodes`: the number of queue episodes started so far.
        env_state: `[B, ...]`, environment state.
        obs: `[B, ...]`, observation for the next action.
        policy_state: `[B, ...]`, recurrent state of the policy, `()` if it has none.
        episode: current episode of each lane.
    """

    key: chex.PRNGKey  # ()
    step: jax.Array  # ()
    next_episode: jax.Array  # ()
    env_state: ArrayTree  # [B, ...]
    obs: ArrayTree  # [B, ...]
    policy_state: ArrayTree  # [B, ...]
    episode: Episode  # [B, ...]


class Persistent(struct.PyTreeNode):
    """A part of a policy's state that is not reset at the end of an episode.

    Use it for a step count, running statistics or memory across episodes.

    Attributes:
        value: `[B, ...]`, any pytree.
    """

    value: ArrayTree  # [B, ...]


class EpisodeKey(struct.PyTreeNode):
    """A part of a policy's state that holds a key for the current episode.

    `policy.init` leaves it empty, and the kernel sets a new key in every episode.
    Samples from this key are constant within an episode, and do not depend on the lane
    that plays it. Use it to sample an opponent, or a head of an ensemble, per episode.

    Attributes:
        value: `[B]` typed keys; None until the kernel sets them.
    """

    value: chex.PRNGKey | None = None  # [B]


class Episodes(struct.PyTreeNode, kw_only=True):
    """The `N` episodes of one call, in the order in which they started.

    Attributes:
        episode_return: `[N]` float32, undiscounted sum of rewards.
        episode_length: `[N]` int32, steps.
        terminated: `[N]` bool, the task ended.
        truncated: `[N]` bool, the environment truncated the episode.
        finished: `[N]` bool, False if `max_episode_steps` ran out before the
            environment ended the episode: return and length cover the steps taken.
        lane: `[N]` int32, the lane that played the episode.
        num_steps: `()` int32, steps of all lanes, without idle steps.
        mask: `[N]` bool, False for entries without an episode, whose other fields are
            zero. With `min_steps`, these entries follow the last episode.
        accumulated: `[N, ...]` by name, values of the collector's accumulators at the
            end of each episode; `()` without accumulators.
        trajectory: `[L, N, ...]`, a `Transition` with step t of episode k at `[t, k]`;
            rows after the end of an episode are zero, and their `mask` is False. `()`
            without `return_trajectory`.
    """

    episode_return: jax.Array  # [N]
    episode_length: jax.Array  # [N]
    terminated: jax.Array  # [N]
    truncated: jax.Array  # [N]
    finished: jax.Array  # [N]
    lane: jax.Array  # [N]
    num_steps: jax.Array  # ()
    mask: ArrayTree = ()  # [N]; () means that all are True
    accumulated: ArrayTree = ()  # [N, ...]
    trajectory: Any = ()  # [L, N, ...]


class PerAgent(struct.PyTreeNode):
    """A value that an accumulator stores for every agent of a lane.

    `Accumulator.init` returns it, and `update` takes and returns it.

    Attributes:
        value: `[B, A, ...]`, any pytree, the agents in the environment's order.
    """

    value: ArrayTree  # [B, A, ...]


class Accumulator(NamedTuple):
    """A custom value to accumulate per episode, batched over lanes.

    Attributes:
        init: maps `num_envs` to the value at the start of an episode, `[B, ...]`, any
            pytree.
        update: maps `(value, transition)` to the value after the step, of unchanged
            structure, shapes and dtypes; the transition is `[B, ...]`. Pure.
    """

    init: Callable[[int], ArrayTree]
    update: Callable[[ArrayTree, Transition], ArrayTree]


Accumulators = tuple[tuple[str, Accumulator], ...]  # by name, hashable


class AsyncInfo(struct.PyTreeNode):
    """The `info` of a `HostCollector` with `num_ready`: which environments stepped.

    Attributes:
        env_id: `[T, num_ready]` int32, the environment that took the step.
        info: `[T, num_ready, ...]`, the `info` of the environment.
        num_envs: B, the number of environments.
    """

    env_id: jax.Array  # [T, num_ready]
    info: ArrayTree  # [T, num_ready, ...]
    num_envs: int = struct.field(pytree_node=False)


class EnvIssue(NamedTuple):
    """An error that `check_env` found; prints as `name: message`.

    Attributes:
        name: a name from the list in `check_env`.
        message: the error, and the step of the episode at which it occurred.
    """

    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


class PolicyStep(NamedTuple, Generic[ActionT]):
    """The output of a policy at one step.

    Attributes:
        action: `[B, ...]`, one action per lane, of the action space's shape and dtype.
        state: `[B, ...]`, the new recurrent state, of unchanged structure.
        extras: any pytree `[B, ...]` to record with the step: log_prob, value, logits.
    """

    action: ActionT
    state: ArrayTree = ()
    extras: ArrayTree = ()


NO_MODE = (
    "`policy` must have a `mode`, got a policy without `mode`. Pass `mode_fn` to "
    "`stateless_policy` or `recurrent_policy`, or define `mode`."
)
NO_VALUE = (
    "`policy` must have a critic, got a policy without `value`. Pass `value_fn` to "
    "`stateless_policy` or `recurrent_policy`, or define `value`."
)


class Policy(struct.PyTreeNode, Generic[ParamsT, ObsT, ActionT]):
    """A policy, batched over environments.

    `rollout.stateless_policy` and `rollout.recurrent_policy` create one from functions.
    To add options, write a subclass:

        class Softmax(rollout.Policy):
            network: nn.Module = struct.field(pytree_node=False)
            temperature: float = 1.0

            def apply(self, params, obs, state, key):
                logits = self.network.apply(params, obs) / self.temperature
                return rollout.PolicyStep(jax.random.categorical(key, logits), state)

    A subclass is a frozen dataclass and a pytree. Numbers and arrays are leaves: they
    may be traced, mapped by `jax.vmap`, and replaced without recompiling.
    Functions, networks and spaces are static fields and must be hashable. Equal
    policies share compiled programs.

    `apply` is required. `init`, `mode` and `value` are optional.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Keep `dataclasses` from generating another `__repr__` for the subclass.
        super().__init_subclass__(**{"repr": False, **kwargs})

    def __repr__(self) -> str:
        """Prints the fields that differ from their defaults, in one line."""
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        pairs = [(x, vars(self)[x.name]) for x in fields if x.repr]
        text = ", ".join(
            f"{x.name}={_in_one_line(value)}"
            for x, value in pairs
            if value is not x.default
        )
        return f"{type(self).__name__}({text})"

    def init(self, num_envs: int) -> PolicyState:
        """Returns the state at the start of an episode.

        Collectors reset a lane to this state at every episode boundary, except for
        parts wrapped in `Persistent`.

        Args:
            num_envs: B, the number of environments.

        Returns:
            A pytree of `[B, ...]`; `()` by default, for policies without state.
        """
        del num_envs  # unused
        return ()

    def apply(
        self, params: ParamsT, obs: ObsT, state: PolicyState, key: Key
    ) -> PolicyStep[ActionT]:
        """Chooses the actions of one step.

        Args:
            params: parameters of the policy.
            obs: `[B, ...]`, observations.
            state: `[B, ...]`, state of the policy.
            key: one typed key for the whole batch, a new one at every step.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must define `apply`.")

    def mode(
        self, params: ParamsT, obs: ObsT, state: PolicyState, key: Key
    ) -> PolicyStep[ActionT]:
        """Chooses the most likely actions, for `rollout.policies.Greedy`.

        The arguments and the result have the same structure as in `apply`.
        """
        raise ValueError(NO_MODE)

    def value(self, params: ParamsT, obs: ObsT, state: PolicyState) -> ArrayTree:
        """Evaluates the critic.

        Collectors record the values of truncated steps in `final_value`. They may call
        it with any subset of the lanes, so the value of an observation must not depend
        on other observations.

        Args:
            params: parameters of the policy.
            obs: `[K, ...]`, observations of any number of lanes.
            state: `[K, ...]`, state of the policy when it observes `obs`.

        Returns:
            `[K]` float32; with several agents also a dict by group of `[K, A_g]`.
        """
        raise ValueError(NO_VALUE)

    @property
    def has_mode(self) -> bool:
        """Whether the policy defines `mode`."""
        return type(self).mode is not Policy.mode

    @property
    def has_value(self) -> bool:
        """Whether the policy defines `value`, a critic."""
        return type(self).value is not Policy.value


def _in_one_line(value: Any) -> str:
    """Formats a field of a policy: functions by name, large values by class."""
    if isinstance(value, Policy):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_in_one_line, value))})"
    if isinstance(value, jax.Array | np.ndarray) and value.ndim:
        return f"{value.dtype}{list(value.shape)}"
    text = " ".join(getattr(value, "__qualname__", repr(value)).split())
    return text if len(text) <= 60 else f"{type(value).__name__}(...)"


class KernelSpec(Protocol):
    """The parts of a collector that the kernel reads; `Collector` documents them."""

    env: VectorEnv
    policy: Policy
    record_fn: RecordFn | None
    accumulators: Any  # `Accumulators`
    init: Callable[..., Carry]


@runtime_checkable
class HasEvalCollector(Protocol):
    """An agent, which has a collector for evaluations."""

    @property
    def eval_collector(self) -> Any:
        """The environments and the policy that takes the most likely action."""
        ...


def choose_collector(collector: Any, params: Any) -> tuple[Any, Any]:
    """Returns the collector for evaluations, and the parameters of its policy.

    Args:
        collector: a collector, or an agent.
        params: parameters; for an agent, a state with `params`.

    Raises:
        ValueError: if `params` is not the state of an agent.
    """
    if not isinstance(collector, HasEvalCollector):
        return collector, params
    if not hasattr(params, "params"):
        raise ValueError(
            "`params` must be the state of the agent, which has `params`, got "
            f"{checks.describe(params)}. To pass only parameters, pass "
            "`agent.eval_collector` in place of the agent."
        )
    return collector.eval_collector, params.params


def check_policy(value: Any) -> None:
    """Raises `ValueError` unless the value is a policy."""
    rule = "`policy` must be a `Policy`, for example from `stateless_policy`"
    checks.check_type(rule, value, Policy)


def check_carry(value: Any) -> None:
    """Checks that a value is a carry, of any collector."""
    rule = "`carry` must be a `Carry` from `init` or an earlier call"
    checks.check_type(rule, value, Carry)


def check_trajectory(value: Any) -> None:
    """Checks that a value is a trajectory, `[T, B, ...]`."""
    rule = "`trajectory` must be a `Transition`, such as `batch.trajectory`"
    checks.check_type(rule, value, Transition)
    if value.mask.ndim != 2:
        raise ValueError(
            "`trajectory` must be `[T, B, ...]`, got a `mask` of shape "
            f"{value.mask.shape}."
        )
    if isinstance(value.info, AsyncInfo):
        raise ValueError(
            "`trajectory` must have a column for each lane, got rows of a "
            "`HostCollector` with `num_ready`. Call `rollout.host.regroup_by_env` "
            "first."
        )


def check_data(value: Any) -> None:
    """Checks that a value is a trajectory or `Episodes`: statistics accept both."""
    rule = "`data` must be a trajectory, such as `batch.trajectory`, or `Episodes`"
    checks.check_type(rule, value, Transition | Episodes)
