"""`Wrapper`, and wrappers of actions, endings and rewards, such as `TimeLimit`.

A wrapper is an `Env` around an `Env`, pure, and a pytree like it. It changes
observations, actions, rewards or endings, never the contract: `obs` and `state` of a
step are the true successor, and the two endings stay apart. Wrappers go around ONE
environment, before `vectorize`, and around each other in any order:

    env = TimeLimit(ActionRepeat(make("Pendulum-v1"), 4), 50)

Counts and functions are static: another value, or a new lambda, is traced again.
"""

from collections.abc import Callable
from typing import Any, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from envs import checks, keys
from envs.spaces import Box, Space, as_space
from envs.types import (
    AnySpace,
    ArrayTree,
    Env,
    EnvStep,
    VectorEnv,
    sharding_of,
)

_BOUNDS = ("clip", "tanh")


class WrapperState(struct.PyTreeNode, kw_only=True):
    """State of a wrapper that remembers something.

    Attributes:
        env_state: state of the wrapped environment.
        memory: the wrapper's own state, any pytree of arrays.
    """

    env_state: ArrayTree
    memory: ArrayTree


class _Around(struct.PyTreeNode):
    """Base of all wrappers: has the spaces of the wrapped environment."""

    env: Any

    @property
    def observation_space(self) -> AnySpace:
        """Space of one environment's `obs`."""
        return as_space(self.env.observation_space, "env.observation_space")

    @property
    def action_space(self) -> AnySpace:
        """Space of one environment's `action`."""
        return as_space(self.env.action_space, "env.action_space")


class Wrapper(_Around):
    """Base of wrappers of one environment: passes everything on."""

    env: Env

    def __post_init__(self) -> None:
        # A placeholder that jax builds pytrees with has no `step`.
        if hasattr(self.env, "step"):
            checks.single(self.env)

    def at_episode(self, number: jax.Array) -> Self:
        """Passes the number of the episode to the wrapped environment; see `Env`."""
        at_episode = getattr(self.env, "at_episode", None)
        return self if at_episode is None else self.replace(env=at_episode(number))

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`."""
        return self.env.reset(key)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step; `obs` and `state` are the true successor."""
        return self.env.step(key, state, action)


class VectorWrapper(_Around):
    """Base of wrappers of a `VectorEnv`."""

    env: VectorEnv

    def __post_init__(self) -> None:
        # A placeholder that jax builds pytrees with has no `step`.
        if hasattr(self.env, "step") and not hasattr(self.env, "num_envs"):
            raise ValueError(
                "`env` must be a `VectorEnv`, such as `envs.vectorize` makes, got "
                f"{type(self.env).__name__} without `num_envs`."
            )
        if hasattr(self.env, "close") and not hasattr(self.env, "reset_done"):
            raise ValueError(
                f"`env` must be a `VectorEnv` in JAX, got {type(self.env).__name__}, "
                "which steps in Python: wrap each of its environments, for instance in "
                "`gymnasium.wrappers.NormalizeObservation`, or normalise in the policy."
            )

    @property
    def num_envs(self) -> int:
        """B, the number of lanes."""
        return self.env.num_envs

    @property
    def sharding(self) -> Any:
        """Sharding of the lanes, if `rollout.shard` made one; else None."""
        return sharding_of(self.env)


class TimeLimit(Wrapper):
    """Truncates an episode after `num_steps` steps, if it has not ended before.

    The environment's own flags stay set: it may truncate earlier, and at the limit both
    flags are set if it also terminates there.

    Attributes:
        env: the environment.
        num_steps: limit in steps, an int of at least 1.

    Raises:
        ValueError: if `num_steps` is not an int of at least 1.
    """

    num_steps: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.count("num_steps", self.num_steps)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`."""
        state, obs = self.env.reset(key)
        return WrapperState(env_state=state, memory=jnp.zeros((), jnp.int32)), obs

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step, and truncates at the limit."""
        result = self.env.step(key, state.env_state, action)
        num_taken = state.memory + 1
        _, truncated = _flags(result)
        return result.replace(
            state=WrapperState(env_state=result.state, memory=num_taken),
            truncated=truncated | (num_taken >= self.num_steps),
        )


class ForceLength(Wrapper):
    """Ends every episode after exactly `num_steps` steps, as a truncation.

    The wrapper ignores the environment's own endings and keeps stepping it, so it must
    go on after one, as `RecommendationEnv` does. `info` must be a dict, and gains
    `left`, `()` bool, True if the environment ended by itself at this step or before.

    Attributes:
        env: the environment.
        num_steps: length of every episode in steps, an int of at least 1.

    Raises:
        ValueError: if `num_steps` is not an int of at least 1.
    """

    num_steps: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.count("num_steps", self.num_steps)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`."""
        state, obs = self.env.reset(key)
        memory = jnp.zeros((), jnp.int32), jnp.bool_(False)
        return WrapperState(env_state=state, memory=memory), obs

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step.

        Raises:
            ValueError: while tracing, if `info` is not a dict, or has a `left`.
        """
        result = self.env.step(key, state.env_state, action)
        num_before, had_left = state.memory
        num_taken = num_before + 1
        terminated, truncated = _flags(result)
        has_left = had_left | terminated | truncated
        return result.replace(
            state=WrapperState(env_state=result.state, memory=(num_taken, has_left)),
            terminated=jnp.zeros_like(terminated),
            truncated=num_taken >= self.num_steps,
            info=_with(result.info, "left", has_left),
        )


class TanhSpace(Space, struct.PyTreeNode):
    """The reals, for actions that are squashed by tanh.

    Attributes:
        shape: shape of one element.
        dtype: floating dtype of an element.
    """

    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(pytree_node=False)

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Draws an element whose tanh is uniform in (-1, 1); it is always finite."""
        largest = 1.0 - float(jnp.finfo(self.dtype).epsneg)
        uniform = jax.random.uniform(key, self.shape, self.dtype, -1.0, 1.0)
        return jnp.arctanh(jnp.clip(uniform, -largest, largest))

    def contains(self, x: jax.Array) -> jax.Array:
        """Returns whether every entry is finite, `()` bool."""
        return jnp.all(jnp.isfinite(x))


class RescaleAction(Wrapper):
    """Maps actions in [-1, 1], or over the reals, to the environment's bounds.

    The map from [-1, 1] to [low, high] is affine, and rounding never takes its result
    out of the bounds. It is applied inside `step`, so the recorded action is the one
    that the policy chose, not the one that the wrapped environment receives.

    Attributes:
        env: an environment whose action space is a bounded box of floats.
        bound: `"clip"`: the policy acts in [-1, 1], and values outside are clipped;
            `"tanh"`: it acts over the reals, squashed by tanh. Drawing from that action
            space (`rollout.random_policy`) covers the environment's box uniformly.

    Raises:
        ValueError: if `bound` is unknown, or if the action space is discrete, has no
            `low` and `high`, is not of floats, or has a bound that is not finite. The
            space is not checked if the parameters are unknown, for instance in `jit`.
    """

    bound: str = struct.field(pytree_node=False, default="clip")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound not in _BOUNDS:
            names = " or ".join(f'"{name}"' for name in _BOUNDS)
            raise ValueError(f"`bound` must be {names}, got {self.bound!r}.")
        if checks.is_known(self.env):
            _check_box(super().action_space)

    @property
    def action_space(self) -> AnySpace:
        """Space of the policy's `action`."""
        space = super().action_space
        if self.bound == "tanh":
            return TanhSpace(space.shape, space.dtype)
        return Box(-1.0, 1.0, space.shape, space.dtype)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step with the action mapped to the environment's bounds."""
        space = super().action_space
        low, high = (
            jnp.broadcast_to(jnp.asarray(bound, space.dtype), space.shape)
            for bound in space.bounds
        )
        squash = jnp.tanh if self.bound == "tanh" else lambda x: jnp.clip(x, -1.0, 1.0)
        weight = 0.5 * (squash(action) + 1.0)
        # Not `low + (high - low) * weight`: the difference may overflow.
        scaled = low * (1.0 - weight) + high * weight
        return self.env.step(key, state, jnp.clip(scaled, low, high))


class EndOnFault(Wrapper):
    """Truncates an episode at a step whose observation or reward is not finite.

    An environment that blows up then spoils only its own episode. The last finite
    observation replaces the faulty one, the reward is 0, and the step is truncated, not
    terminated. `info` must be a dict, and gains `faulty`, `()` bool.

    Attributes:
        env: the environment. Wrappers that remember observations go around this one.
    """

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`."""
        state, obs = self.env.reset(key)
        return WrapperState(env_state=state, memory=obs), obs

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step.

        Raises:
            ValueError: while tracing, if `info` is not a dict, or has a `faulty`.
        """
        result = self.env.step(key, state.env_state, action)
        terminated, truncated = _flags(result)
        faulty = jnp.bool_(False)
        for x in map(jnp.asarray, jax.tree.leaves((result.obs, result.reward))):
            if jnp.issubdtype(x.dtype, jnp.floating):
                faulty |= ~jnp.all(jnp.isfinite(x))
        obs = jax.tree.map(
            lambda old, new: jnp.where(faulty, old, new), state.memory, result.obs
        )
        return result.replace(
            state=WrapperState(env_state=result.state, memory=obs),
            obs=obs,
            reward=jnp.where(faulty, 0.0, result.reward),
            terminated=terminated & ~faulty,
            truncated=truncated | faulty,
            info=_with(result.info, "faulty", faulty),
        )


class ActionRepeat(Wrapper):
    """Repeats each action for up to `num_repeats` steps of the environment.

    The reward is the sum, and an ending stops the repetition: state, observation,
    flags and info are those of the last step taken. Inner step i (from 0) draws from
    `fold_in(key, i)`.

    Attributes:
        env: the environment.
        num_repeats: steps of the environment per action, an int of at least 1.

    Raises:
        ValueError: if `num_repeats` is not an int of at least 1.
    """

    num_repeats: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.count("num_repeats", self.num_repeats)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes up to `num_repeats` steps with the same action."""

        def step_env(number: jax.Array, state: ArrayTree) -> EnvStep:
            return _cast(self.env.step(keys.fold_in(key, number), state, action))

        def again(last: EnvStep, number: jax.Array) -> tuple[EnvStep, None]:
            new = step_env(number, last.state)
            new = new.replace(reward=last.reward + new.reward)
            return keys.select(last.terminated | last.truncated, last, new), None

        first = step_env(jnp.int32(0), state)
        numbers = jnp.arange(1, self.num_repeats, dtype=jnp.int32)
        return lax.scan(again, first, numbers)[0]


class TransformReward(Wrapper):
    """Returns `fn(reward)` instead of `reward`.

    Attributes:
        env: the environment.
        fn: a pure function of the reward, `()` float32, that returns a scalar; cast to
            float32.
    """

    fn: Callable[[jax.Array], jax.Array] = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.function("fn", self.fn)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step.

        Raises:
            ValueError: while tracing, if `fn` does not return a scalar.
        """
        result = self.env.step(key, state, action)
        reward = self.fn(jnp.asarray(result.reward, jnp.float32))
        if reward is None or jnp.iscomplexobj(reward):
            got = checks.describe(reward)
            raise ValueError(f"`fn` must return a real number, got {got}.")
        reward = jnp.asarray(reward)
        if reward.shape:
            raise ValueError(f"`fn` must return a scalar, got shape {reward.shape}.")
        return result.replace(reward=reward.astype(jnp.float32))


def _check_box(space: AnySpace) -> None:
    """Checks that an action space is a bounded box of floats."""
    if not isinstance(space, Box):
        kind = type(space).__name__
        raise ValueError(
            f"`env.action_space` must be a box with `low` and `high`, got {kind}."
        )
    if not jnp.issubdtype(space.dtype, jnp.floating):
        dtype = jnp.dtype(space.dtype).name
        raise ValueError(f"`env.action_space` must be of floats, got {dtype}.")
    largest = float(jnp.finfo(space.dtype).max)
    bounds = [np.asarray(bound, np.float64) for bound in space.bounds]
    if not all(np.all(np.abs(bound) <= largest) for bound in bounds):
        raise ValueError(
            "`env.action_space` must have finite bounds, got "
            f"low={space.low}, high={space.high}."
        )


def _with(info: ArrayTree, name: str, value: jax.Array) -> dict[str, Any]:
    """Adds a value to the environment's info."""
    if not isinstance(info, dict) or name in info:
        raise ValueError(
            f"`info` must be a dict without `{name}`, got {jax.tree.structure(info)}."
        )
    return {**info, name: value}


def _flags(result: EnvStep) -> tuple[jax.Array, jax.Array]:
    """Checks both flags of a step, and returns them as bools."""
    return (
        checks.flag("terminated", result.terminated),
        checks.flag("truncated", result.truncated),
    )


def _cast(result: EnvStep) -> EnvStep:
    """Casts the leaves of a step to the dtypes that they keep in a scan."""
    strong = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), result)
    terminated, truncated = _flags(strong)
    return strong.replace(
        reward=strong.reward.astype(jnp.float32),
        terminated=terminated,
        truncated=truncated,
    )
