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
    """Shows the last `num_frames` observations on a new leading axis, oldest first.

    At the start of an episode the first frame is repeated. The observation may be a
    pytree; an entry `action_mask` of it is the newest one. The space of a box is a
    `Box` with broadcast bounds; that of any other space has independent frames. With
    several agents each sees frames of its own.

    Attributes:
        env: the environment; one of several agents must be simultaneous.
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
        """Adds the newest frame, and drops the oldest one."""
        new = jax.tree.map(lambda x: jnp.asarray(x)[None], obs)
        # The first frame of an episode repeats; `memory` is None there.
        parts = (new,) * self.num_frames
        if memory is not None:
            parts = jax.tree.map(lambda x: x[1:], memory), new
        frames = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        shown = jax.tree.map_with_path(
            lambda path, x: x[-1] if is_mask(path) else x, frames
        )
        return shown, frames


class TransformObs(ObsWrapper):
    """Shows `fn(obs)` instead of `obs`.

        padded = TransformObs(env, lambda obs: jnp.pad(obs, (0, 2)), group="prey")

    Attributes:
        env: the environment.
        fn: a pure function of one observation, any pytree to any pytree; with several
            agents, of one agent's.
        observation_space: space of the result of `fn`, a pytree such as `Box`; with
            several agents, by group. By default an unbounded box of its shape and
            dtype.
        group: with several agents, the only group that `fn` changes; None for all.

    Raises:
        ValueError: if there is no such `group`; while tracing, if `fn` returns another
            shape than that of `observation_space`.
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
            every = Agent(self.env)
            # Traced and not run: the shapes of a start are those of every step.
            shapes = eval_reset(
                self.env, lambda _, obs, *__: self._show_each(every, obs, None)[0]
            )
            if groups:  # of one agent
                shapes = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes
                )
            space = space_of(shapes)
        space = as_space(space, "observation_space")
        object.__setattr__(self, "observation_space", space)

    def space(self, agent: Agent) -> AnySpace:
        """Space of what the agent sees."""
        space: Any = self.observation_space
        if agent.group is None:
            return space
        return space.spaces.get(agent.group, agent.observation_space)

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Applies `fn`, if it changes the agent's group."""
        if self.group not in (None, agent.group):
            return obs, ()
        shown = self.fn(obs)
        space = None if self.observation_space is None else self.space(agent)
        if isinstance(space, Box | Discrete) and jnp.shape(shown) != space.shape:
            raise ValueError(
                f"`fn` must return the shape of `observation_space`, {space.shape}, "
                f"got {checks.describe(shown)}."
            )
        return shown, ()


class AgentNumber(ObsWrapper):
    """Shows every agent which one it is, for policies that several agents share.

    A dict observation gains `agent`; any other becomes `{"obs": obs, "agent": agent}`.
    `agent` is one-hot, `[A]` float32, in the order of `env.agents`.

    Attributes:
        env: the environment, of several agents.

    Raises:
        ValueError: if `env` has one agent; while tracing, if there is an `agent`.
    """

    for_agents = "all"

    def _check(self) -> None:
        if not has_agents(self.env):
            raise ValueError(
                "`env` must be a `MultiAgentEnv` for `AgentNumber`, got "
                f"{type(self.env).__name__}, of one agent."
            )

    def space(self, agent: Agent) -> AnySpace:
        """Space of what the agent sees, with its number."""
        space: Any = agent.observation_space
        number = Box(0.0, 1.0, (len(self.agents),))
        return Dict(
            {**_by_name(getattr(space, "spaces", space), space), "agent": number}
        )

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Adds the number of the agent."""
        number = jax.nn.one_hot(agent.number, len(self.agents), dtype=jnp.float32)
        return {**_by_name(obs, obs), "agent": number}, ()


class ObserveInfo(ObsWrapper):
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

    def _check(self) -> None:
        checks.function("fn", self.fn)
        checks.function("initial", self.initial)

    def space(self, agent: Agent) -> AnySpace:
        """Space of `obs`; the info part is unbounded."""
        info = space_of(eval_reset(self.env, self.initial))
        return Dict({"obs": agent.observation_space, "info": info})

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Adds the info of the last step."""
        # There is no `info` before the first step.
        is_first = memory is None
        info = self.initial(agent.state, obs) if is_first else self.fn(agent.info)
        return {"obs": obs, "info": jax.tree.map(jnp.asarray, info)}, ()


class ObserveState(ObsWrapper):
    """Shows the environment's state, for policies that plan with the environment.

    The observation becomes `{"obs": obs, "state": state}`, so that a search, such as
    those of mctx, can begin where the lane is. Keep the state out of what is recorded:

        def record(t):
            return t.replace(obs=t.obs["obs"], next_obs=t.next_obs["obs"])

        collector = Collector(env=vectorize(ObserveState(env), 64), policy=search,
                              record_fn=record)

    Attributes:
        env: the environment.
    """

    def space(self, agent: Agent) -> AnySpace:
        """Space of `obs`, and an unbounded one of the state."""
        space = space_of(
            eval_reset(self.env, lambda state, obs: trees.unwrap_keys(state))
        )
        return Dict({"obs": agent.observation_space, "state": space})

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Adds the state."""
        return {"obs": obs, "state": agent.state}, ()


class ObservePrevious(ObsWrapper):
    """Shows the last action and reward, and starts of episodes, in the observation.

    The observation becomes `{"obs": obs, "action": action, "reward": reward, "first":
    first}`, the input of recurrent policies that learn to learn. At the start of an
    episode the action is zero in every entry, the reward 0 and `first` True: what
    followed the last action of the episode before is not shown, so a policy that is to
    learn over several episodes of one task takes `Trials`. With several agents each
    sees its own.

    Attributes:
        env: the environment; one of several agents must be simultaneous.

    Source:
        "RL²: Fast Reinforcement Learning via Slow Reinforcement Learning", section
        3.2, arXiv:1611.02779.
    """

    for_agents = "simultaneous"

    def space(self, agent: Agent) -> AnySpace:
        """Space of `obs`; the reward is unbounded."""
        return space_with_previous(agent)

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Adds the last step; zeros at the start of an episode."""
        return with_previous(agent, obs, jnp.bool_(agent.reward is None)), ()


def _stacked(space: AnySpace, num: int) -> AnySpace:
    """Returns the space of `num` elements, stacked on a new leading axis."""
    if isinstance(space, Composite):
        # Masks are about the newest frame alone.
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
    """Returns zeros like an element."""
    # The shape of a key only: `check_env` takes a key for a draw of the environment's
    # own.
    key = jax.eval_shape(jax.random.key, 0)
    return trees.blank(jax.eval_shape(space.sample, key))


def _by_name(tree: Any, otherwise: Any) -> dict[str, Any]:
    """Returns the entries of a dict, or `{"obs": otherwise}`; none may be `agent`."""
    if not isinstance(tree, Mapping):
        return {"obs": otherwise}
    if "agent" in tree:
        raise ValueError("`obs` must be without `agent` for `AgentNumber`, got one.")
    return dict(tree)


def space_with_previous(agent: Agent) -> AnySpace:
    """Returns the space of what `with_previous` returns; the reward is unbounded."""
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
    """Shows an observation with the step before it, zeros if there is none."""
    action, reward = agent.action, agent.reward
    if reward is None:
        action, reward = first_of(agent.action_space), jnp.float32(0)
    return {"obs": obs, "action": action, "reward": reward, "first": first}


def eval_reset(env: Any, fn: Callable[..., ArrayTree]) -> ArrayTree:
    """Returns the shapes and dtypes of `fn(state, obs)` at a start of an episode."""
    return jax.eval_shape(lambda: fn(*env.reset(jax.random.key(0))))
