"""Defines the data and callables of a rollout: `Transition`, `Carry`, `Policy`."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol

import chex
import jax
import numpy as np
from flax import struct
from typing_extensions import TypeVar

from rollout import checks
from rollout.envs.types import ArrayTree, VectorEnv

Key = chex.PRNGKey
Params = Any  # parameters of the policy
Obs = ArrayTree  # [B, ...]
PolicyState = ArrayTree  # [B, ...]

# Types of a custom policy. A type checker infers them from `fn` of `stateless_policy`
# or `recurrent_policy` and carries them on to `Transition`. The bound is for a
# `lambda`: without it a checker takes its arguments for an `object`.
ParamsT = TypeVar("ParamsT", bound=Any, default=Any)
ObsT = TypeVar("ObsT", bound=Any, default=Any)
ActionT = TypeVar("ActionT", bound=Any, default=Any)


class Transition(struct.PyTreeNode, Generic[ObsT, ActionT], kw_only=True):
    """One step of every lane; stacked over time, a trajectory.

    Shapes are those of a stacked trajectory, `T` steps of `B` lanes. A single
    transition has no `T` axis.

    Attributes:
        obs: `[T, B, ...]`, the observation the action was chosen from.
        action: `[T, B, ...]`, the action that the policy chose. A wrapper such as
            `rollout.envs.RescaleAction` may change it on its way to the environment.
        reward: `[T, B]` float32, reward for that action.
        terminated: `[T, B]` bool, the task ended here: do not bootstrap.
        truncated: `[T, B]` bool, cut from outside (time limit): bootstrap from
            `next_obs`. Both flags may be set; `terminated` then wins.
        next_obs: `[T, B, ...]`, the true successor, also where the episode ended: never
            the observation of a reset.
        mask: `[T, B]` bool, False where the lane was idle: the row is masked out.
        episode_id: `[T, B]` int32, never reused within a run.
        episode_return: `[T, B]` float32, undiscounted sum of the episode's rewards,
            this one included: where `done`, the return of the episode.
        episode_length: `[T, B]` int32, steps of the episode, this one included.
        extras: `[T, B, ...]`, returned by the policy along with the action.
        info: `[T, B, ...]`, returned by the environment along with the step.
        accumulated: `[T, B, ...]` by name, the values of the collector's accumulators
            for the episode, this step included; `()` if it has none.
        final_value: `[T, B]` float, the value of `next_obs` where the episode was
            `truncated` and not `terminated`, 0 elsewhere; `()` if the policy has no
            `value`. With several agents it may be `[T, B, A_g]` by group, and is
            also there where an agent alone was truncated.
    """

    # A new field is made by `kernel/step.py`, and on the host by `Loop` and the rows of
    # `host/rows.py`. What outlives a call is in `Carry`, too, and on the host in
    # `Loop.resume`, `HostCollector._carry` and `LatestCarry`.
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
        """`[T, B]` bool, True where an episode begins: `episode_length == 1`."""
        return self.episode_length == 1


RecordFn = Callable[[Transition[ObsT, ActionT]], Transition[ObsT, ActionT]]

FlagFn = Callable[[Transition], jax.Array]  # one step to `[B]` bool


class Episode(struct.PyTreeNode, kw_only=True):
    """The episode each lane is in.

    Attributes:
        key: `[B]` typed keys; an episode draws all its randomness from its key.
        episode_return: `[B]` float32, undiscounted sum of rewards so far.
        episode_length: `[B]` int32, steps so far.
        episode_id: `[B]` int32; lane i's n-th episode (from 0) is number `n * B + i`,
            the one at position e of the queue of `collect_episodes` number `-1 - e`.
            After 2^31 episodes of one kind its numbers run into those of the other,
            and after 2^32 they repeat, and with them the episodes' randomness.
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
            `collect_episodes`: how many it has started so far.
        env_state: `[B, ...]`, environment state.
        obs: `[B, ...]`, observation to choose the next action from.
        policy_state: `[B, ...]`, recurrent state of the policy, `()` if it has none.
        episode: the episode each lane is in.
    """

    key: chex.PRNGKey  # ()
    step: jax.Array  # ()
    next_episode: jax.Array  # ()
    env_state: ArrayTree  # [B, ...]
    obs: ArrayTree  # [B, ...]
    policy_state: ArrayTree  # [B, ...]
    episode: Episode  # [B, ...]


class Persistent(struct.PyTreeNode):
    """A part of a policy's state that survives the end of an episode.

    Everything else in a policy's state is reset with the episode. Wrap a step count,
    running statistics or a memory over several episodes in it.

    Attributes:
        value: `[B, ...]`, any pytree.
    """

    value: ArrayTree  # [B, ...]


class EpisodeKey(struct.PyTreeNode):
    """A slot in a policy's state for the key of the lane's episode.

    `policy.init` leaves it empty, and the kernel fills it with a new key per episode. A
    policy that draws from it draws the same at every step of an episode, whichever lane
    plays it: which opponent to meet, which head of an ensemble acts.

    Attributes:
        value: `[B]` typed keys; None before the kernel has filled it.
    """

    value: chex.PRNGKey | None = None  # [B]


class Episodes(struct.PyTreeNode, kw_only=True):
    """The `N` episodes of one call, in the order in which they started.

    Attributes:
        episode_return: `[N]` float32, undiscounted sum of rewards.
        episode_length: `[N]` int32, steps.
        terminated: `[N]` bool, the task ended.
        truncated: `[N]` bool, the environment's own time limit cut it.
        finished: `[N]` bool, False where `max_episode_steps` ran out before the
            environment ended the episode: return and length cover the steps played.
        lane: `[N]` int32, the lane that played it.
        num_steps: `()` int32, steps of all lanes that were not idle.
        mask: `[N]` bool, False where there is no such episode, and everything else is
            zero: only with `min_steps`, after the last one that counts.
        accumulated: `[N, ...]` by name, the values of the collector's accumulators at
            the end of each episode; `()` if it has none.
        trajectory: `[L, N, ...]`, a `Transition` of step t of episode k at `[t, k]`,
            all zero with `mask` False after the end of an episode. Only with
            `return_trajectory`, else `()`.
    """

    episode_return: jax.Array  # [N]
    episode_length: jax.Array  # [N]
    terminated: jax.Array  # [N]
    truncated: jax.Array  # [N]
    finished: jax.Array  # [N]
    lane: jax.Array  # [N]
    num_steps: jax.Array  # ()
    mask: ArrayTree = ()  # [N]; () stands for True
    accumulated: ArrayTree = ()  # [N, ...]
    trajectory: Any = ()  # [L, N, ...]


class PerAgent(struct.PyTreeNode):
    """A value that an accumulator keeps for every agent of a lane.

    `Accumulator.init` returns it, and `update` takes and returns it.

    Attributes:
        value: `[B, A, ...]`, any pytree, the agents in the environment's order.
    """

    value: ArrayTree  # [B, A, ...]


class Accumulator(NamedTuple):
    """A custom value that is accumulated per episode, batched over lanes.

    Attributes:
        init: `num_envs` to `[B, ...]`, any pytree: the value before the first step. A
            lane goes back to it with every new episode.
        update: `(value, transition)` to the value after the step, of unchanged
            structure, shapes and dtypes; the transition is `[B, ...]`. Pure.
    """

    init: Callable[[int], ArrayTree]
    update: Callable[[ArrayTree, Transition], ArrayTree]


Accumulators = tuple[tuple[str, Accumulator], ...]  # by name, hashable


class AsyncInfo(struct.PyTreeNode):
    """`info` with `num_ready`: which environments answered.

    Attributes:
        env_id: `[T, num_ready]` int32, the environment that answered.
        info: `[T, num_ready, ...]`, the `info` of the environment.
        num_envs: B, the number of environments.
    """

    env_id: jax.Array  # [T, num_ready]
    info: ArrayTree  # [T, num_ready, ...]
    num_envs: int = struct.field(pytree_node=False)


class EnvIssue(NamedTuple):
    """One mistake that `check_env` found; it prints as `name: message`.

    Attributes:
        name: a name from the list in `check_env`.
        message: the mistake, and the step of the episode where it showed.
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
        extras: any pytree `[B, ...]` to record along: log_prob, value, logits.
    """

    action: ActionT
    state: ArrayTree = ()
    extras: ArrayTree = ()


NO_MODE = (
    "`policy` must have a `mode`, got one without. Pass `mode_fn` to "
    "`stateless_policy` or `recurrent_policy`, or define `mode`."
)
NO_VALUE = (
    "`policy` must have a critic, got one without. Pass `value_fn` to "
    "`stateless_policy` or `recurrent_policy`, or define `value`."
)


class Policy(struct.PyTreeNode, Generic[ParamsT, ObsT, ActionT]):
    """A policy, batched over environments.

    `rollout.stateless_policy` and `rollout.recurrent_policy` make one from a function.
    For options of its own, write a subclass:

        class Softmax(rollout.Policy):
            network: nn.Module = struct.field(pytree_node=False)
            temperature: float = 1.0

            def apply(self, params, obs, state, key):
                logits = self.network.apply(params, obs) / self.temperature
                return rollout.PolicyStep(jax.random.categorical(key, logits), state)

    A subclass is a frozen dataclass and a pytree. Numbers and arrays are leaves: they
    may be traced, mapped by `jax.vmap`, and replaced without compiling again.
    Functions, networks and spaces are static fields and need a hash. Equal policies
    share compiled programs.

    `apply` is required. `init`, `mode` and `value` are optional.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Otherwise `dataclasses` would define another `__repr__` for the subclass.
        super().__init_subclass__(**{"repr": False, **kwargs})

    def __repr__(self) -> str:
        """Prints the fields that differ from their defaults, in one line."""
        values = [
            (x.name, getattr(self, x.name))
            for x in dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
            if x.repr and getattr(self, x.name) is not x.default
        ]
        shown = ", ".join(f"{name}={_in_one_line(x)}" for name, x in values)
        return f"{type(self).__name__}({shown})"

    def init(self, num_envs: int) -> PolicyState:
        """Returns the state at the start of an episode.

        Collectors reset a lane to this state at every episode boundary, except for
        parts in `Persistent`.

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

        The arguments and the structure of the result are those of `apply`.
        """
        raise ValueError(NO_MODE)

    def value(self, params: ParamsT, obs: ObsT, state: PolicyState) -> ArrayTree:
        """Evaluates the critic.

        Collectors call it for the few lanes whose episode was truncated, and record the
        result in `final_value`. The value of an observation must not depend on the
        other observations.

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
    """Prints a field of a policy: functions by name, large values by their class."""
    if isinstance(value, Policy):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_in_one_line, value))})"
    if isinstance(value, jax.Array | np.ndarray) and value.ndim:
        return f"{value.dtype}{list(value.shape)}"
    text = " ".join(getattr(value, "__qualname__", repr(value)).split())
    return text if len(text) <= 60 else f"{type(value).__name__}(...)"


class Parts(Protocol):
    """The parts of a collector that the kernel reads; `Collector` documents them."""

    env: VectorEnv
    policy: Policy
    record_fn: RecordFn | None
    accumulators: Any  # `Accumulators`
    init: Callable[..., Carry]


def check_policy(value: Any) -> None:
    """Raises `ValueError` unless the value is a policy."""
    what = "`policy` must be a `Policy`, such as `stateless_policy` makes"
    checks.kind(what, value, Policy)


def check_carry(value: Any) -> None:
    """Checks that a value is a carry, of any collector."""
    what = "`carry` must be what `init` or an earlier call returned"
    checks.kind(what, value, Carry)


def check_trajectory(value: Any) -> None:
    """Checks that a value is a trajectory, `[T, B, ...]`."""
    what = "`trajectory` must be a `Transition`, for a stream's batch its `trajectory`"
    checks.kind(what, value, Transition)
    if value.mask.ndim != 2:
        raise ValueError(
            "`trajectory` must be `[T, B, ...]`, got a `mask` of shape "
            f"{value.mask.shape}."
        )
    if isinstance(value.info, AsyncInfo):
        raise ValueError(
            "`trajectory` must have a column for each lane, got rows of a "
            "`HostCollector` with `num_ready`, which `rollout.host.regroup_by_env` "
            "sorts."
        )


def check_data(value: Any) -> None:
    """Checks that a value is a trajectory or `Episodes`, as statistics take both."""
    what = "`data` must be a trajectory, for a stream's batch its own, or `Episodes`"
    checks.kind(what, value, Transition | Episodes)
