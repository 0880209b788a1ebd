"""`FrameStack`, `TransformObs` and other wrappers that change observations."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs.spaces import (
    Box,
    Composite,
    Dict,
    Discrete,
    Repeated,
    as_space,
    space_of,
)
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep
from rollout.envs.wrappers.wrapper import Wrapper, WrapperState


class FrameStack(Wrapper):
    """Shows the last `num_frames` observations on a new leading axis, oldest first.

    At the start of an episode the first frame is repeated. The observation may be a
    pytree. The space of a box is a `Box` with broadcast bounds; that of any other space
    has independent frames.

    Attributes:
        env: the environment.
        num_frames: number of frames, an int of at least 1.

    Raises:
        ValueError: if `num_frames` is not an int of at least 1.
    """

    num_frames: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.int_between("num_frames", self.num_frames)

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`, `[num_frames, ...]`."""
        return _stacked(super().observation_space, self.num_frames)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`, its first frame repeated."""
        state, obs = self.env.reset(key)
        frames = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (self.num_frames, *jnp.shape(x))), obs
        )
        return WrapperState(env_state=state, memory=frames), frames

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step; the oldest frame makes room for the new one."""
        result = self.env.step(key, state.env_state, action)
        frames = jax.tree.map(
            lambda old, new: jnp.concatenate([old[1:], jnp.asarray(new)[None]]),
            state.memory,
            result.obs,
        )
        return result.replace(
            state=WrapperState(env_state=result.state, memory=frames), obs=frames
        )


class TransformObs(Wrapper):
    """Shows `fn(obs)` instead of `obs`.

    Attributes:
        env: the environment.
        fn: a pure function of one observation, any pytree to any pytree.
        observation_space: space of the result of `fn`, a pytree such as `Box`. By
            default an unbounded box of its shape and dtype.
    """

    fn: Callable[[ArrayTree], ArrayTree] = struct.field(pytree_node=False)
    observation_space: AnySpace | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.function("fn", self.fn)
        if self.observation_space is None:
            shapes = _eval_reset(self.env, lambda state, obs: self.fn(obs))
            space = space_of(shapes)
        else:
            space = as_space(self.observation_space, "observation_space")
        object.__setattr__(self, "observation_space", space)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, fn(obs))`.

        Raises:
            ValueError: while tracing, if `fn` returns another shape than that of
                `observation_space`.
        """
        state, obs = self.env.reset(key)
        obs, space = self.fn(obs), self.observation_space
        if isinstance(space, Box | Discrete) and jnp.shape(obs) != space.shape:
            raise ValueError(
                f"`fn` must return the shape of `observation_space`, {space.shape}, "
                f"got {checks.describe(obs)}."
            )
        return state, obs

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step."""
        result = self.env.step(key, state, action)
        return result.replace(obs=self.fn(result.obs))


class ObserveInfo(Wrapper):
    """Puts the `info` of the last step next to the observation.

    A policy sees only `obs`: this wrapper shows it an action mask that the environment
    returns in `info`. The observation becomes `{"obs": obs, "info": fn(info)}`.

    Attributes:
        env: the environment.
        fn: a pure function of the info of the step that led to the observation.
        initial: a pure function of the environment's `(state, obs)` that replaces `fn`
            at the start of an episode, before the first step; it returns the same
            structure, shapes and dtypes.
    """

    fn: Callable[[Any], ArrayTree] = struct.field(pytree_node=False)
    initial: Callable[[Any, Any], ArrayTree] = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.function("fn", self.fn)
        checks.function("initial", self.initial)

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`; the info part is unbounded."""
        info = space_of(_eval_reset(self.env, self.initial))
        return Dict({"obs": super().observation_space, "info": info})

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, {"obs": obs, "info": initial(state, obs)})`."""
        state, obs = self.env.reset(key)
        return state, {"obs": obs, "info": _arrays(self.initial(state, obs))}

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step."""
        result = self.env.step(key, state, action)
        info = _arrays(self.fn(result.info))
        return result.replace(obs={"obs": result.obs, "info": info})


class ObservePrevious(Wrapper):
    """Shows the last action and reward, and starts of episodes, in the observation.

    The observation becomes `{"obs": obs, "action": action, "reward": reward, "first":
    first}`, the input of recurrent policies that learn to learn. At the start of an
    episode the action is zero in every entry, the reward 0 and `first` True.

    Attributes:
        env: the environment.

    Source:
        "RL²: Fast Reinforcement Learning via Slow Reinforcement Learning", section
        3.2, arXiv:1611.02779.
    """

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`; the reward is unbounded."""
        return Dict(
            {
                "obs": super().observation_space,
                "action": self.action_space,
                "reward": Box(-jnp.inf, jnp.inf, ()),
                "first": Box(False, True, (), jnp.dtype(bool)),
            }
        )

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`, without a previous step."""
        state, obs = self.env.reset(key)
        kinds = jax.eval_shape(self.action_space.sample, jax.random.key(0))
        action = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kinds)
        return state, _with_previous(obs, action, jnp.float32(0), jnp.bool_(True))

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step."""
        result = self.env.step(key, state, action)
        reward = jnp.asarray(result.reward, jnp.float32)
        obs = _with_previous(result.obs, action, reward, jnp.bool_(False))
        return result.replace(obs=obs)


def _stacked(space: AnySpace, num: int) -> AnySpace:
    """Returns the space of `num` elements, stacked on a new leading axis."""
    if isinstance(space, Composite):
        parts = [_stacked(part, num) for part in space.parts]
        return space.replace(spaces=space.structure.unflatten(parts))
    if not isinstance(space, Box):
        return Repeated(space, num)
    shape = (num, *space.shape)
    low, high = (jnp.broadcast_to(bound, shape) for bound in space.bounds)
    return Box(low, high, shape, space.dtype)


def _with_previous(
    obs: ArrayTree, action: ArrayTree, reward: jax.Array, first: jax.Array
) -> dict[str, ArrayTree]:
    return {"obs": obs, "action": action, "reward": reward, "first": first}


def _eval_reset(env: Env, fn: Callable[[ArrayTree, ArrayTree], ArrayTree]) -> ArrayTree:
    """Returns the shapes and dtypes of `fn(state, obs)` at a start of an episode."""
    return jax.eval_shape(lambda: fn(*env.reset(jax.random.key(0))))


def _arrays(tree: ArrayTree) -> ArrayTree:
    return jax.tree.map(jnp.asarray, tree)
