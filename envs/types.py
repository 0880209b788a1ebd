"""The contracts `Env` and `VectorEnv`: the interface between environments and kernel.

An `Env` is a single environment, a pure function of its state. A `VectorEnv` is `B`
parallel environments, called lanes. Environments never reset themselves:
`VectorEnv.reset_done` performs the auto-reset, separately from `step`, so that `step`
returns the true successor.

All randomness of an episode comes from its *episode key*. The reset samples from
`fold_in(episode_key, RESET)`, and step number n >= 1 samples from
`fold_in(episode_key, n)`. The reset does not receive the episode key itself: since
`split(key)[i]` is `fold_in(key, i)`, an environment that splits its reset key would
obtain the keys of the first steps.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, Self

import chex
import jax
import jax.numpy as jnp
from flax import struct
from typing_extensions import TypeVar

from rollout.base import checks
from rollout.base.types import AnySpace, ArrayTree

# An index of lanes into an array `[B]`: `[K]` int32 lane numbers, or `ALL_LANES`.
LaneIndex = jax.Array | slice
ALL_LANES = slice(None)  # all lanes in order, without a gather

RESET = 0  # folded into an episode key for the reset; steps count from 1

StateT = TypeVar("StateT", default=Any)
ObsT = TypeVar("ObsT", default=Any)
_Tree = TypeVar("_Tree", bound=Any)


class EnvStep(struct.PyTreeNode, Generic[StateT, ObsT], kw_only=True):
    """Result of one step of an environment.

    The shapes below describe an `Env`. A `VectorEnv` returns the same arrays with a
    leading axis `B`.

    Attributes:
        state: the next environment state, not reset.
        obs: the true successor observation, also if the episode ended.
        reward: `()` float32, reward for the action.
        terminated: `()` bool, the task ended: do not bootstrap.
        truncated: `()` bool, the episode was cut off, for example by a time limit:
            bootstrap. If both flags are set, `terminated` takes precedence.
        info: any pytree of arrays; `{}` if there is no info.
        raw_reward: `()` float32, reward before a wrapper of a `VectorEnv` scaled it;
            `episode_return` is the sum of raw rewards. A wrapper that replaces a
            reward, for example a non-finite one, also replaces the raw reward. None
            stands for `reward`; an `Env` always returns None.
    """

    state: StateT
    obs: ObsT
    reward: Any  # (), an array or a Python number
    terminated: Any  # (), an array or a Python bool
    truncated: Any = False  # (), an array or a Python bool
    info: ArrayTree = struct.field(default_factory=dict)
    raw_reward: Any = None  # ()


class Shared(struct.PyTreeNode):
    """Marks a part of the state of a `VectorEnv` as shared by all lanes.

    All other leaves of the state have the lane axis first. Use it for running
    statistics or a global counter: on several devices the value is replicated instead
    of sharded.

    Attributes:
        value: any pytree of arrays, without a lane axis.
    """

    value: ArrayTree


class Lanes(NamedTuple):
    """The values of `B` lanes that an auto-reset replaces, `[B, ...]` each."""

    episode_key: chex.PRNGKey  # [B]
    state: ArrayTree  # [B, ...]
    obs: ArrayTree  # [B, ...]


class Env(Protocol):
    """A single environment. It is pure and never resets itself.

    An implementation is a pytree whose leaves are the environment's parameters, so that
    `jax.vmap` over parameters works.

    An environment that plays numbered levels or records may also define the method
    `at_episode(number) -> Env`, where `number` is `()` int32 and starts at 0. The
    returned environment is then reset instead of the original environment. In
    `collect_episodes` `number` is the position in the queue, so that each level is
    played once. In other methods it counts the episodes of all lanes, lane by lane.
    Lanes without an assigned episode also advance the count, so any number may occur.
    """

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`."""
        ...

    @property
    def action_space(self) -> AnySpace:
        """Space of `action`."""
        ...

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode; returns `(state, obs)`, in the reverse order of gymnax."""
        ...

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step; returns the true successor `obs` and `state`."""
        ...


class BaseVectorEnv:
    """Base class of `B` parallel environments, in JAX or on the host.

    Attributes:
        num_envs: B, the number of environments.
        observation_space: space of one environment's observation.
        action_space: space of one environment's action.
        learns: whether observations depend on running (not fixed) statistics.
        sharding: sharding of the lanes over devices; None if they are not sharded.
    """

    num_envs: int
    observation_space: AnySpace
    action_space: AnySpace
    learns: bool = False
    sharding: Any = None

    def freeze(self, env_state: ArrayTree) -> Self:
        """Fixes the running statistics of the environments, for evaluation.

        Args:
            env_state: `carry.env_state` of the same environments, with any `num_envs`.
                Only its statistics are read.

        Returns:
            The same environments with the statistics of `env_state`, which are no
            longer updated. The default returns `self`.
        """
        return self

    def normalize_obs(self, obs: ArrayTree) -> ArrayTree:
        """Normalizes raw observations as the environments do.

        Args:
            obs: one raw observation, or a batch of them.

        Returns:
            The observations as a policy receives them. The default returns `obs`.

        Raises:
            ValueError: if the environments have running (not fixed) statistics.
        """
        return obs


class VectorEnv(BaseVectorEnv):
    """Base class of `B` parallel environments in JAX, called lanes.

    All arrays have a leading axis `B`. A subclass is a pytree, usually a
    `flax.struct.PyTreeNode`. It defines `num_envs` and the spaces as fields or
    properties, and the methods `reset`, `step` and `reset_done`. All other members have
    defaults for environments on one device without running statistics.
    """

    def reset(self, keys: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode in every lane; maps `[B]` keys to `(state, obs)`."""
        raise NotImplementedError

    def step(self, keys: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step in every lane, without auto-reset."""
        raise NotImplementedError

    def reset_done(
        self, key_fn: Callable[[LaneIndex], chex.PRNGKey], done: jax.Array, lanes: Lanes
    ) -> Lanes:
        """Starts new episodes in the done lanes.

        Args:
            key_fn: maps `[K]` int32 lane numbers to `[K]` new episode keys, and
                `ALL_LANES` to the new keys of all lanes, so that keys are computed only
                for the lanes to reset. Lane numbers may repeat; keys of lanes where
                `done` is False are not used. The `key_fn` of a collector has an
                attribute `number`, a function that maps lanes to the numbers of their
                new episodes.
            done: `[B]` bool, the lanes to reset.
            lanes: the current lanes.

        Returns:
            `lanes` with a new episode key, state and observation in the done lanes. All
            other lanes are unchanged, bit for bit.
        """
        raise NotImplementedError


def check_vector_env(env: Any) -> None:
    """Raises unless `env` is a `VectorEnv`."""
    checks.check_not_gymnasium(env)
    # jax builds pytrees with placeholders, which have no `step`.
    if not isinstance(env, VectorEnv) and hasattr(env, "step"):
        raise ValueError(
            f"`env` must be a `VectorEnv`, got {type(env).__name__}. For an "
            "environment in JAX, call `rollout.envs.vectorize(env, num_envs)` first. "
            "Pass environments that step in NumPy to a `HostCollector`, and normalize "
            "them with `rollout.envs.NormalizeHostEnv`. A custom class must subclass "
            "`rollout.envs.types.VectorEnv`."
        )


def place(env: VectorEnv, tree: _Tree) -> _Tree:
    """Constrains the lanes of a tree to their devices if the environment is sharded."""
    return tree if env.sharding is None else env.sharding.place(tree)


def wrapped_env(env: Any) -> Any:
    """Returns the environment inside a wrapper, or None."""
    return getattr(env, "env", None)


def at_episode(env: Any, number: jax.Array) -> Any:
    """Applies `Env.at_episode` if the environment defines it."""
    return env.at_episode(number) if hasattr(env, "at_episode") else env


def strong(tree: ArrayTree) -> ArrayTree:
    """Drops weak types, which make a scan trace its body twice or raise an error."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)
