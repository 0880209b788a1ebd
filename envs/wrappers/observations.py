"""`FrameStack`, `TransformObs` and other wrappers that change observations."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs import trees
from rollout.envs.multi_agent import has_agents
from rollout.envs.spaces import (
    Box,
    Composite,
    Dict,
    Discrete,
    Repeated,
    Space,
    as_space,
    is_mask,
    space_of,
)
from rollout.envs.types import AnySpace, ArrayTree
from rollout.envs.wrappers.wrapper import Agent, ObsWrapper


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
        checks.int_between("num_frames", self.num_frames)

    def space(self, agent: Agent) -> AnySpace:
        """Space of `obs`, `[num_frames, ...]`."""
        return _stacked(agent.observation_space, self.num_frames)

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
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
        checks.function("fn", self.fn)
        groups = list(self.groups) if has_agents(self.env) else []
        if self.group not in (None, *groups):
            raise ValueError(
                f"`group` must be a group of `env`, {', '.join(groups) or 'none'}, got "
                f"{self.group!r}."
            )
        space = self.observation_space
        if space is None:
            agent = Agent(self.env)
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

    def space(self, agent: Agent) -> AnySpace:
        """Space of the agent's transformed observation."""
        space: Any = self.observation_space
        if agent.group is None:
            return space
        return space.spaces.get(agent.group, agent.observation_space)

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
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

    def space(self, agent: Agent) -> AnySpace:
        """Space of the agent's observation with its one-hot number."""
        space: Any = agent.observation_space
        number = Box(0.0, 1.0, (len(self.agents),))
        return Dict(
            {**_by_name(getattr(space, "spaces", space), space), "agent": number}
        )

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
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

    def _check(self) -> None:
        checks.function("fn", self.fn)
        checks.function("initial", self.initial)

    def space(self, agent: Agent) -> AnySpace:
        """Space of `obs`; the info part is unbounded."""
        info = space_of(eval_reset(self.env, self.initial))
        return Dict({"obs": agent.observation_space, "info": info})

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
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

    def space(self, agent: Agent) -> AnySpace:
        """Space of `obs`; the state is unbounded."""
        space = space_of(
            eval_reset(self.env, lambda state, obs: trees.unwrap_keys(state))
        )
        return Dict({"obs": agent.observation_space, "state": space})

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
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

    def space(self, agent: Agent) -> AnySpace:
        """Space of `obs`; the reward is unbounded."""
        return space_with_previous(agent)

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
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


def first_of(space: AnySpace) -> ArrayTree:
    """Returns zeros with the structure, shapes and dtypes of an element."""
    # Use an abstract key: `check_env` would treat a real key as a sample of the
    # environment.
    key = jax.eval_shape(jax.random.key, 0)
    return trees.blank(jax.eval_shape(space.sample, key))


def _by_name(tree: Any, otherwise: Any) -> dict[str, Any]:
    """Returns the entries of a dict without `agent`, or else `{"obs": otherwise}`."""
    if not isinstance(tree, Mapping):
        return {"obs": otherwise}
    if "agent" in tree:
        raise ValueError("`obs` must be without `agent` for `AgentNumber`, got one.")
    return dict(tree)


def space_with_previous(agent: Agent) -> AnySpace:
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
    agent: Agent, obs: ArrayTree, first: jax.Array
) -> dict[str, ArrayTree]:
    """Adds the previous action and reward to an observation; zeros at the start."""
    action, reward = agent.action, agent.reward
    if reward is None:
        action, reward = first_of(agent.action_space), jnp.float32(0)
    return {"obs": obs, "action": action, "reward": reward, "first": first}


def eval_reset(env: Any, fn: Callable[..., ArrayTree]) -> ArrayTree:
    """Returns the shapes and dtypes of `fn(state, obs)` at the start of an episode."""
    return jax.eval_shape(lambda: fn(*env.reset(jax.random.key(0))))
