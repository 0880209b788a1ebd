"""Wrappers that change observations, for example `FrameStack` and `FlattenObs`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.base import checks, trees
from rollout.envs.multi_agent import has_agents
from rollout.envs.spaces import (
    MASK,
    Box,
    Composite,
    Dict,
    Discrete,
    MultiDiscrete,
    Repeated,
    Space,
    as_space,
    get_action_mask,
    is_mask,
    one_of,
    space_of,
)
from rollout.envs.types import AnySpace, ArrayTree
from rollout.envs.wrappers.wrapper import AgentStep, ObsWrapper


class FrameStack(ObsWrapper):
    """Stacks the last `num_frames` observations on a new leading axis, oldest first.

    The first frame of an episode is repeated. The observation may be a pytree. An entry
    `action_mask` is not stacked: it is the mask of the newest frame. A `Box` becomes a
    `Box` with broadcast bounds; any other space becomes a `Repeated`. For several
    agents the frames of each agent are stacked separately.

    Attributes:
        env: the environment; several agents must be simultaneous.
        num_frames: number of frames, an int of at least 1.

    Raises:
        ValueError: if `num_frames` is not an int of at least 1.
    """

    num_frames: int = struct.field(pytree_node=False)

    for_agents = "simultaneous"

    def _check(self) -> None:
        checks.check_int("num_frames", self.num_frames)

    def space(self, agent: AgentStep) -> AnySpace:
        """Space of `obs`, `[num_frames, ...]`."""
        return _stacked(agent.observation_space, self.num_frames)

    def show(self, agent: AgentStep, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Adds the newest frame and drops the oldest frame."""
        new = jax.tree.map(lambda x: jnp.asarray(x)[None], obs)
        # Repeat the first frame of an episode, when `memory` is None.
        parts = (new,) * self.num_frames
        if memory is not None:
            parts = jax.tree.map(lambda x: x[1:], memory), new
        frames = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        stacked = jax.tree.map_with_path(
            lambda path, x: x[-1] if is_mask(path) else x, frames
        )
        return stacked, frames


class TransformObs(ObsWrapper):
    """Replaces every observation with `fn(obs)`.

        padded = TransformObs(env, lambda obs: jnp.pad(obs, (0, 2)), group="prey")

    Attributes:
        env: the environment.
        fn: pure function that maps an observation, any pytree, to any pytree. For
            several agents it maps the observation of a single agent.
        observation_space: space of the result of `fn`, a pytree such as `Box`; for
            several agents, a space per group. The default is an unbounded box with the
            shape and dtype of the result.
        group: name of the group to transform; None for all groups. It applies to
            environments with several agents.

    Raises:
        ValueError: if `group` is unknown; while tracing, if the shape of the result of
            `fn` differs from `observation_space`.
    """

    fn: Callable[[ArrayTree], ArrayTree] = struct.field(pytree_node=False)
    observation_space: AnySpace | None = None
    group: str | None = struct.field(pytree_node=False, default=None)

    for_agents = "all"

    def _check(self) -> None:
        groups = list(self.groups) if has_agents(self.env) else []
        checks.check_choice("group", self.group, (None, *groups))
        space = self.observation_space
        if space is None:
            agent = AgentStep(self.env)
            # Trace a reset without running it: steps have the same observation shapes.
            shapes = eval_reset(
                self.env, lambda _, obs, *__: self._show_each(agent, obs, None)[0]
            )
            if groups:  # drop the agent axis
                shapes = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes
                )
            space = space_of(shapes)
        space = as_space(space, "observation_space")
        object.__setattr__(self, "observation_space", space)

    def space(self, agent: AgentStep) -> AnySpace:
        """Space of the agent's transformed observation."""
        space: Any = self.observation_space
        if agent.group is None:
            return space
        return space.spaces.get(agent.group, agent.observation_space)

    def show(self, agent: AgentStep, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Applies `fn` if the wrapper transforms the agent's group."""
        if self.group not in (None, agent.group):
            return obs, ()
        result = self.fn(obs)
        space = None if self.observation_space is None else self.space(agent)
        if isinstance(space, Box | Discrete) and jnp.shape(result) != space.shape:
            raise ValueError(
                f"`fn` must return the shape of `observation_space`, {space.shape}, "
                f"got {checks.describe(result)}."
            )
        return result, ()


class AgentNumber(ObsWrapper):
    """Adds the identity of the agent to the observation, for shared policies.

    The wrapper adds the entry `agent` to a dict observation. Any other observation
    becomes `{"obs": obs, "agent": agent}`. `agent` is one-hot, `[A]` float32, in the
    order of `env.agents`.

    Attributes:
        env: an environment with several agents.

    Raises:
        ValueError: if `env` has a single agent; while tracing, if the observation
            already has an entry `agent`.
    """

    for_agents = "all"

    def _check(self) -> None:
        if not has_agents(self.env):
            raise ValueError(
                "`env` must be a `MultiAgentEnv` for `AgentNumber`, got "
                f"{type(self.env).__name__} with a single agent."
            )

    def space(self, agent: AgentStep) -> AnySpace:
        """Space of the agent's observation with its one-hot number."""
        space: Any = agent.observation_space
        number = Box(0.0, 1.0, (len(self.agents),))
        spaces = space.spaces if isinstance(space, Composite) else space
        return Dict({**_by_name(spaces, space), "agent": number})

    def show(self, agent: AgentStep, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Adds the one-hot number of the agent."""
        number = jax.nn.one_hot(agent.number, len(self.agents), dtype=jnp.float32)
        return {**_by_name(obs, obs), "agent": number}, ()


class ObserveInfo(ObsWrapper):
    """Adds the `info` of the last step to the observation.

    Use it if a policy needs values from `info`, for example an action mask. The
    observation becomes `{"obs": obs, "info": fn(info)}`.

    Attributes:
        env: the environment.
        fn: pure function of the info of the step that returned the observation.
        initial: pure function of the environment's `(state, obs)` at the start of an
            episode, when there is no info. It returns the same structure, shapes and
            dtypes as `fn`.
    """

    fn: Callable[[Any], ArrayTree] = struct.field(pytree_node=False)
    initial: Callable[[Any, Any], ArrayTree] = struct.field(pytree_node=False)

    def space(self, agent: AgentStep) -> AnySpace:
        """Space of `obs`; the info part is unbounded."""
        info = space_of(eval_reset(self.env, self.initial))
        return Dict({"obs": agent.observation_space, "info": info})

    def show(self, agent: AgentStep, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Adds the info of the last step."""
        # `info` does not exist before the first step.
        is_first = memory is None
        info = self.initial(agent.state, obs) if is_first else self.fn(agent.info)
        return {"obs": obs, "info": jax.tree.map(jnp.asarray, info)}, ()


class ObserveState(ObsWrapper):
    """Adds the environment state to the observation, for planning policies.

    The observation becomes `{"obs": obs, "state": state}`, so that a search, for
    example with mctx, can start from the current state. Do not record the state:

        def record(t):
            return t.replace(obs=t.obs["obs"], next_obs=t.next_obs["obs"])

        collector = Collector(env=vectorize(ObserveState(env), 64), policy=search,
                              record_fn=record)

    Attributes:
        env: the environment.
    """

    def space(self, agent: AgentStep) -> AnySpace:
        """Space of `obs`; the state is unbounded."""
        space = space_of(
            eval_reset(self.env, lambda state, obs: trees.unwrap_keys(state))
        )
        return Dict({"obs": agent.observation_space, "state": space})

    def show(self, agent: AgentStep, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Adds the state."""
        return {"obs": obs, "state": agent.state}, ()


class ObservePrevious(ObsWrapper):
    """Adds the last action, the last reward and a start flag to the observation.

    The observation becomes `{"obs": obs, "action": action, "reward": reward, "first":
    first}`, the input of recurrent meta-learning policies. At the start of an episode
    every entry of the action is zero, the reward is 0 and `first` is True. The action
    and reward of the previous episode are not included: use `Trials` for policies that
    adapt over several episodes of one task. For several agents each agent observes only
    its action and reward.

    Attributes:
        env: the environment; several agents must be simultaneous.

    Source:
        "RL²: Fast Reinforcement Learning via Slow Reinforcement Learning", section
        3.2, arXiv:1611.02779.
    """

    for_agents = "simultaneous"

    def space(self, agent: AgentStep) -> AnySpace:
        """Space of `obs`; the reward is unbounded."""
        return space_with_previous(agent)

    def show(self, agent: AgentStep, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Adds the last action and reward; zeros at the start of an episode."""
        return with_previous(agent, obs, jnp.bool_(agent.reward is None)), ()


def _stacked(space: AnySpace, num: int) -> AnySpace:
    """Returns the space of `num` elements, stacked on a new leading axis."""
    if isinstance(space, Composite):
        # Masks are not stacked: only the newest mask is valid.
        spaces = jax.tree.map_with_path(
            lambda path, part: part if is_mask(path) else _stacked(part, num),
            space.spaces,
            is_leaf=lambda x: isinstance(x, Space),
        )
        return space.replace(spaces=spaces)
    if not isinstance(space, Box):
        return Repeated(space, num)
    shape = (num, *space.shape)
    low, high = (jnp.broadcast_to(bound, shape) for bound in space.bounds)
    return Box(low, high, shape, space.dtype)


def first_element(space: AnySpace) -> ArrayTree:
    """Returns zeros with the structure, shapes and dtypes of an element."""
    # Use an abstract key: `check_env` would treat a real key as a sample of the
    # environment.
    key = jax.eval_shape(jax.random.key, 0)
    return trees.blank(jax.eval_shape(space.sample, key))


def _by_name(tree: Any, default: Any) -> dict[str, Any]:
    """Returns the entries of a dict; `{"obs": default}` if `tree` is not a dict."""
    if not isinstance(tree, Mapping):
        return {"obs": default}
    if "agent" in tree:
        raise ValueError(
            "`obs` must have no entry `agent` for `AgentNumber`, got one. Rename it."
        )
    return dict(tree)


def space_with_previous(agent: AgentStep) -> AnySpace:
    """Returns the space of the result of `with_previous`; the reward is unbounded."""
    return Dict(
        {
            "obs": agent.observation_space,
            "action": agent.action_space,
            "reward": Box(-jnp.inf, jnp.inf, ()),
            "first": Box(False, True, (), jnp.dtype(bool)),
        }
    )


def with_previous(
    agent: AgentStep, obs: ArrayTree, first: jax.Array
) -> dict[str, ArrayTree]:
    """Adds the previous action and reward to an observation; zeros at the start."""
    action, reward = agent.action, agent.reward
    if reward is None:
        action, reward = first_element(agent.action_space), jnp.float32(0)
    return {"obs": obs, "action": action, "reward": reward, "first": first}


def eval_reset(env: Any, fn: Callable[..., ArrayTree]) -> ArrayTree:
    """Returns the shapes and dtypes of `fn(state, obs)` at the start of an episode."""
    return jax.eval_shape(lambda: fn(*env.reset(jax.random.key(0))))


def flatten_obs(space: AnySpace, obs: ArrayTree) -> jax.Array:
    """Flattens each observation to a float32 vector, for networks of dense layers.

    The parts of a `Dict` or `Tuple` are flattened and concatenated in the order of
    `jax.tree.leaves`. A `Discrete` part and each entry of a `MultiDiscrete` part are
    one-hot encoded; bools and other numbers become floats. An entry `action_mask` of a
    `Dict` or NamedTuple is omitted; see `rollout.envs.spaces.get_action_mask`.

    Args:
        space: space of a single observation.
        obs: `[..., *shape]`, an observation or a batch of observations.

    Returns:
        `[..., n]` float32, the flat observations.

    Raises:
        ValueError: if a part of the space cannot be flattened, or if the parts of `obs`
            do not match the space.
    """
    parts = match_parts(space, obs)
    return jnp.concatenate([_flat(part, x) for _, x, part in parts], axis=-1)


def match_parts(space: AnySpace, obs: ArrayTree) -> list[tuple[Any, Any, AnySpace]]:
    """Pairs the arrays of an observation with their spaces, without `action_mask`.

    Args:
        space: space of a single observation.
        obs: `[..., *shape]`, an observation or a batch of observations.

    Returns:
        Path, array and space of every part, in the order of `jax.tree.leaves`.

    Raises:
        ValueError: if the parts of `obs` do not match the space.
    """
    spaces, leaves = as_space(space).leaves(), jax.tree.leaves_with_path(obs)
    if len(leaves) != len(spaces):
        names = [jax.tree_util.keystr(path) for path, _ in leaves]
        raise ValueError(
            f"`obs` must have the {len(spaces)} parts of its space {space!r}, got "
            f"{', '.join(names)}."
        )
    pairs = zip(leaves, spaces, strict=True)
    return [(path, x, part) for (path, x), part in pairs if not is_mask(path)]


class FlattenObs(ObsWrapper):
    """Flattens every observation to a float32 vector with `flatten_obs`.

    If the observation has an entry `action_mask`, the mask is unchanged and the
    observation becomes `{"obs": array, "action_mask": mask}`.

    Attributes:
        env: the environment.

    Raises:
        ValueError: when `observation_space` is read, also while tracing, if the space
            has a part that `flatten_obs` does not support.
    """

    def space(self, agent: AgentStep) -> AnySpace:
        """Space of `obs`: a box, or a dict of a box and the mask."""
        # Masks are identified by their path, which a list of spaces does not contain.
        shapes = eval_reset(self.env, lambda state, obs: obs)
        paths = [path for path, _ in jax.tree.leaves_with_path(shapes)]
        pairs = list(zip(paths, agent.observation_space.leaves(), strict=True))
        bounds = [_bounds(part) for path, part in pairs if not is_mask(path)]
        lows, highs = zip(*bounds, strict=True)
        is_known = not any(isinstance(x, jax.Array) for x in (*lows, *highs))
        xp = np if is_known else jnp
        low = xp.concatenate(lows)
        box = Box(low, xp.concatenate(highs), low.shape)
        masks = [part for path, part in pairs if is_mask(path)]
        return Dict({"obs": box, MASK: masks[0]}) if masks else box

    def show(self, agent: AgentStep, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Flattens the observation."""
        flat, mask = flatten_obs(agent.observation_space, obs), get_action_mask(obs)
        return (flat if mask is None else {"obs": flat, MASK: mask}), ()


def _sizes(space: AnySpace) -> np.ndarray | None:
    """Returns the size of each one-hot encoding; None if the space has no encoding."""
    space = one_of(space)
    if isinstance(space, Discrete):
        return np.array([space.n])
    return np.ravel(space.nvec) if isinstance(space, MultiDiscrete) else None


def _flat(space: AnySpace, x: jax.Array) -> jax.Array:
    if space.shape is None or space.bounds is None:
        raise ValueError(
            "`env.observation_space` must consist of Box, Discrete, MultiDiscrete and "
            f"MultiBinary to be flattened, got {space!r}."
        )
    x, sizes = jnp.asarray(x), _sizes(space)
    batch_shape = x.shape[: x.ndim - len(space.shape)]
    if sizes is None:
        return x.reshape(*batch_shape, -1).astype(jnp.float32)
    # Subtract the lowest value: the range of an entry need not begin at 0.
    low = jnp.broadcast_to(jnp.asarray(space.bounds[0], x.dtype), space.shape)
    index = x - jnp.expand_dims(low, range(len(batch_shape)))
    index = index.reshape(*batch_shape, -1, len(sizes))
    one_hot = [
        # A number out of range is encoded as zeros.
        jax.nn.one_hot(index[..., i], n, dtype=jnp.float32)
        for i, n in enumerate(sizes.tolist())
    ]
    return jnp.concatenate(one_hot, axis=-1).reshape(*batch_shape, -1)


def _bounds(space: AnySpace) -> tuple[Any, Any]:
    """Returns the bounds of a flattened part, `[n]` each."""
    flat = jax.eval_shape(lambda: _flat(space, jnp.zeros(space.shape, space.dtype)))
    if _sizes(space) is not None:
        return np.zeros(flat.shape, np.float32), np.ones(flat.shape, np.float32)
    xp = jnp if any(isinstance(x, jax.Array) for x in space.bounds) else np
    low, high = (xp.broadcast_to(x, space.shape).reshape(-1) for x in space.bounds)
    return low.astype(np.float32), high.astype(np.float32)
