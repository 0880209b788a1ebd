"""The contracts `Env` and `VectorEnv`: all that the kernel may ask of an environment.

An `Env` is one environment, a pure function of its state; a `VectorEnv` is `B` of
them side by side, called lanes. Neither resets itself: `VectorEnv.reset_done` is the
auto-reset, separate from `step`, so that the true successor of every step stays
visible.

All randomness of an episode comes from its *episode key*: the reset draws from
`fold_in(episode_key, RESET)` and step number n >= 1 from `fold_in(episode_key, n)`.
The reset does not get the episode key itself, because an environment that splits its
reset key would then hold the keys of its own first steps (`split(key)[i]` is
`fold_in(key, i)`).
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, Self
from typing import Any as AnySpace
from typing import Any as ArrayTree

import chex
import jax
import jax.numpy as jnp
from flax import struct
from typing_extensions import TypeVar

from rollout import checks

# Which lanes, as an index into an array `[B]`: `[K]` int32 numbers, or all of them.
LaneIndex = jax.Array | slice
ALL_LANES = slice(None)  # in order, without a gather

RESET = 0  # folded into an episode key for the reset; steps count from 1

# Other names of `Any`. `ArrayTree` is a pytree of arrays: no annotation can say which
# structure it has, and with `chex.ArrayTree`, a union, a checker rejects all access to
# a part. `AnySpace` is a `rollout.envs.spaces.Space`, or anything that
# `rollout.envs.spaces.as_space` converts to one. They are imported under these names,
# since pyright takes `a | b` of the values of an alias for a union of types.

StateT = TypeVar("StateT", default=Any)
ObsT = TypeVar("ObsT", default=Any)
_Tree = TypeVar("_Tree", bound=Any)


class EnvStep(struct.PyTreeNode, Generic[StateT, ObsT], kw_only=True):
    """Result of one step of an environment.

    Shapes are those of an `Env`; a `VectorEnv` returns the same with a leading `B`.

    Attributes:
        state: the next environment state, not reset.
        obs: the true successor observation, also where the episode ended.
        reward: `()` float32, reward for the action.
        terminated: `()` bool, the task itself ended: do not bootstrap.
        truncated: `()` bool, cut from outside (time limit): bootstrap. Both flags may
            be set; `terminated` then wins.
        info: any pytree of arrays, `{}` if there is none.
        raw_reward: `()` float32, what `episode_return` sums: the reward before a
            wrapper of a `VectorEnv` scaled it; where a wrapper replaces a reward, for
            instance one that is not finite, it replaces this too. None stands for
            `reward`, and is the only value of an `Env`.
    """

    state: StateT
    obs: ObsT
    reward: Any  # (), an array or a number of Python
    terminated: Any  # (), an array or a bool of Python
    truncated: Any = False  # (), an array or a bool of Python
    info: ArrayTree = struct.field(default_factory=dict)
    raw_reward: Any = None  # ()


class Shared(struct.PyTreeNode):
    """A part of the state of a `VectorEnv` that belongs to all lanes together.

    Everything else in that state has the lane axis first. Wrap running statistics or a
    counter of all lanes in it: on several devices it is replicated, and not sharded.

    Attributes:
        value: any pytree of arrays, without a lane axis.
    """

    value: ArrayTree


class Lanes(NamedTuple):
    """The part of `B` environments that an auto-reset replaces, `[B, ...]` each."""

    episode_key: chex.PRNGKey  # [B]
    state: ArrayTree  # [B, ...]
    obs: ArrayTree  # [B, ...]


class Env(Protocol):
    """ONE environment: pure, and it never resets itself.

    An implementation is a pytree whose leaves are the environment's
    parameters, so that `jax.vmap` over parameters works.

    An environment that plays numbered levels or records may also have the method
    `at_episode(number) -> Env`, `()` int32 from 0. Its result is reset in its place:
    `number` is the position in the queue of `collect_episodes`, so that each level is
    played once, and elsewhere it counts the episodes of all lanes, lane by lane.
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
        """Starts an episode: `(state, obs)`, where gymnax has `(obs, state)`."""
        ...

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step; `obs` and `state` are the true successor."""
        ...


class BaseVectorEnv:
    """Base of `B` environments side by side, in JAX or on the host.

    Attributes:
        num_envs: B, the number of environments.
        observation_space: space of one environment's observation.
        action_space: space of one environment's action.
        learns: whether observations depend on statistics that are not fixed yet.
    """

    num_envs: int
    observation_space: AnySpace
    action_space: AnySpace
    learns: bool = False

    def freeze(self, env_state: ArrayTree) -> Self:
        """Fixes the statistics that the environments learn, to evaluate with them.

        Args:
            env_state: `carry.env_state` of the same environments, in any number. Only
                the statistics in it are read.

        Returns:
            The same environments, which use the statistics of `env_state` and never
            change them. The default returns `self`.
        """
        return self

    def normalize_obs(self, obs: ArrayTree) -> ArrayTree:
        """Normalizes raw observations as the environments do.

        Args:
            obs: one raw observation, or a batch of them.

        Returns:
            The observations that a policy receives. The default returns `obs`.

        Raises:
            ValueError: if the environments have statistics that are not fixed.
        """
        return obs


class VectorEnv(BaseVectorEnv):
    """Base of `B` environments in JAX, called lanes, `[B, ...]` everywhere; a pytree.

    A subclass, usually also a `flax.struct.PyTreeNode`, has the spaces and `num_envs`
    as fields or properties, and defines `reset`, `step` and `reset_done`. All other
    members have defaults, for environments on one device that learn no statistics.

    Attributes:
        sharding: sharding of the lanes over devices; None without one.
    """

    sharding: Any = None

    def reset(self, keys: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode in every lane: `[B]` keys to `(state, obs)`."""
        raise NotImplementedError

    def step(self, keys: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step in every lane, without auto-reset."""
        raise NotImplementedError

    def reset_done(
        self, key_fn: Callable[[LaneIndex], chex.PRNGKey], done: jax.Array, lanes: Lanes
    ) -> Lanes:
        """Starts a new episode in the lanes whose episode is over.

        Args:
            key_fn: maps `[K]` int32 lane numbers to their `[K]` new episode keys, so
                that only a lane that is reset pays for its key, and `ALL_LANES` to
                those of all lanes. Numbers may repeat; the key of a lane that is not
                done is not used. The collector's `key_fn` has `number`, which maps
                lanes to the numbers of their new episodes.
            done: `[B]` bool, the lanes to reset.
            lanes: the lanes as they are now.

        Returns:
            `lanes` with new episode key, state and observation where `done`, and
            every other lane as it was, bit for bit.
        """
        raise NotImplementedError


def check_vector_env(env: Any) -> None:
    """Raises unless `env` is a `VectorEnv`."""
    checks.not_of_gymnasium(env)
    # The placeholders with which jax builds pytrees have no `step`.
    if not isinstance(env, VectorEnv) and hasattr(env, "step"):
        raise ValueError(
            "`env` must be many environments side by side in JAX, as "
            f"`rollout.envs.vectorize` makes them of one, got {type(env).__name__}: "
            "environments that step in NumPy go into a `HostCollector`, and "
            "`rollout.envs.NormalizeHostEnv` normalises them; a class of your own must "
            "subclass `rollout.envs.types.VectorEnv`."
        )


def sharding_of(env: VectorEnv) -> Any:
    """Returns the sharding of the lanes over devices, None without one."""
    return env.sharding


def place(env: VectorEnv, tree: _Tree) -> _Tree:
    """Keeps the lanes of a tree on their devices, if they are sharded."""
    return tree if env.sharding is None else env.sharding.place(tree)


def at_episode(env: Any, number: jax.Array) -> Any:
    """Applies `Env.at_episode`, if the environment has it."""
    return env.at_episode(number) if hasattr(env, "at_episode") else env


def hash_of_types(tree: ArrayTree) -> int:
    """Returns a hash of a tree's structure, to which the classes of its nodes count.

    jax 0.10 and 0.11 consider two trees equal if they differ only in the class of a
    dataclass (`jax.tree_util.register_dataclass`). Their hashes differ, but the cache
    of `jit` in jax 0.10 compares only a few bits of the hashes before it tests
    equality. So all objects that hold an environment, such as a collector or the result
    of `vectorize`, keep this hash as static data. Otherwise they would sometimes run
    another environment's program.
    """
    return hash(jax.tree.structure(tree))


def strong(tree: ArrayTree) -> ArrayTree:
    """Drops weak types, with which a scan traces its body twice or raises an error."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)
