"""`FrameStack`, `TransformObs` and other wrappers that change observations."""

from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs import prng
from rollout.envs.multi_agent import MultiAgentStep
from rollout.envs.spaces import (
    Box,
    Composite,
    Dict,
    Discrete,
    Repeated,
    as_space,
    space_of,
)
from rollout.envs.types import AnySpace, ArrayTree, EnvStep
from rollout.envs.wrappers.wrapper import Wrapper, WrapperState, has_agents


class FrameStack(Wrapper):
    """Shows the last `num_frames` observations on a new leading axis, oldest first.

    At the start of an episode the first frame is repeated. The observation may be a
    pytree. The space of a box is a `Box` with broadcast bounds; that of any other space
    has independent frames. With several agents each sees frames of its own.

    Attributes:
        env: the environment; one of several agents must be simultaneous.
        num_frames: number of frames, an int of at least 1.

    Raises:
        ValueError: if `num_frames` is not an int of at least 1.
    """

    num_frames: int = struct.field(pytree_node=False)

    for_agents = "simultaneous"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.int_between("num_frames", self.num_frames)

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`, `[num_frames, ...]`."""
        return _stacked(super().observation_space, self.num_frames)

    @property
    def observation_spaces(self) -> dict[str, AnySpace]:
        """Space of one agent's `obs`, `[num_frames, ...]`, by group."""
        spaces = super().observation_spaces.items()
        return {name: _stacked(as_space(x), self.num_frames) for name, x in spaces}

    @property
    def _axis(self) -> int:
        return 1 if has_agents(self.env) else 0

    def reset(self, key: chex.PRNGKey) -> tuple:
        """Starts an episode: `(state, obs)`, its first frame repeated."""
        state, obs, *acting = self.env.reset(key)
        frames = jax.tree.map(
            lambda x: jnp.stack([jnp.asarray(x)] * self.num_frames, self._axis), obs
        )
        return WrapperState(env_state=state, memory=frames), frames, *acting

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> Any:
        """Takes one step; the oldest frame makes room for the new one."""
        result = self.env.step(key, state.env_state, action)

        def push(old: jax.Array, new: jax.Array) -> jax.Array:
            kept = old[:, 1:] if self._axis else old[1:]
            new = jnp.expand_dims(jnp.asarray(new), self._axis)
            return jnp.concatenate([kept, new], self._axis)

        frames = jax.tree.map(push, state.memory, result.obs)
        return result.replace(
            state=WrapperState(env_state=result.state, memory=frames), obs=frames
        )


class TransformObs(Wrapper):
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
        ValueError: if there is no such `group`.
    """

    fn: Callable[[ArrayTree], ArrayTree] = struct.field(pytree_node=False)
    observation_space: AnySpace | None = None
    group: str | None = struct.field(pytree_node=False, default=None)

    for_agents = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.function("fn", self.fn)
        groups = list(self.env.groups) if has_agents(self.env) else []
        if self.group not in (None, *groups) and hasattr(self.env, "step"):
            raise ValueError(
                f"`group` must be a group of `env`, {', '.join(groups) or 'none'}, got "
                f"{self.group!r}."
            )
        if self.observation_space is None:
            shapes = eval_reset(self.env, lambda state, obs, *_: self._see(obs))
            if groups:  # of one agent
                shapes = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes
                )
            space = space_of(shapes)
        else:
            space = as_space(self.observation_space, "observation_space")
        object.__setattr__(self, "observation_space", space)

    @property
    def observation_spaces(self) -> Mapping[str, AnySpace]:
        """Space of one agent's `obs`, by group."""
        space: Any = self.observation_space
        return {**super().observation_spaces, **space.spaces}

    def _see(self, obs: ArrayTree) -> ArrayTree:
        if not has_agents(self.env):
            return self.fn(obs)
        chosen = obs if self.group is None else (self.group,)
        return {**obs, **{name: jax.vmap(self.fn)(obs[name]) for name in chosen}}

    def reset(self, key: chex.PRNGKey) -> tuple:
        """Starts an episode: `(state, fn(obs))`.

        Raises:
            ValueError: while tracing, if `fn` returns another shape than that of
                `observation_space`.
        """
        state, obs, *acting = self.env.reset(key)
        obs, space = self._see(obs), self.observation_space
        if isinstance(space, Box | Discrete) and jnp.shape(obs) != space.shape:
            raise ValueError(
                f"`fn` must return the shape of `observation_space`, {space.shape}, "
                f"got {checks.describe(obs)}."
            )
        return state, obs, *acting

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> Any:
        """Takes one step."""
        result = self.env.step(key, state, action)
        return result.replace(obs=self._see(result.obs))


class AgentNumber(Wrapper):
    """Shows every agent which one it is, for policies that several agents share.

    A dict observation gains `agent`; any other becomes `{"obs": obs, "agent": agent}`.
    `agent` is one-hot, `[A]` float32, in the order of `env.agents`.

    Attributes:
        env: the environment, of several agents.

    Raises:
        ValueError: if `env` has one agent; while tracing, if there is an `agent`.
    """

    for_agents = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if hasattr(self.env, "step") and not has_agents(self.env):
            raise ValueError(
                "`env` must be a `MultiAgentEnv` for `AgentNumber`, got "
                f"{type(self.env).__name__}, of one agent."
            )

    @property
    def observation_spaces(self) -> dict[str, AnySpace]:
        """Space of one agent's `obs`, by group."""
        number = Box(0.0, 1.0, (len(self.agents),))
        spaces = {name: as_space(x) for name, x in super().observation_spaces.items()}
        return {
            name: Dict({**_by_name(getattr(x, "spaces", x), x), "agent": number})
            for name, x in spaces.items()
        }

    def reset(self, key: chex.PRNGKey) -> tuple:
        """Starts an episode: `(state, obs, acting)`."""
        state, obs, acting = self.env.reset(key)
        return state, self._see(obs), acting

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> Any:
        """Takes one step."""
        result = self.env.step(key, state, action)
        return result.replace(obs=self._see(result.obs))

    def _see(self, obs: dict[str, ArrayTree]) -> dict[str, ArrayTree]:
        every = jnp.eye(len(self.agents), dtype=jnp.float32)
        return {
            name: {
                **_by_name(obs[name], obs[name]),
                "agent": jnp.stack([every[self.agents.index(x)] for x in members]),
            }
            for name, members in self.groups.items()
        }


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
        info = space_of(eval_reset(self.env, self.initial))
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


class ObserveState(Wrapper):
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

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`, and an unbounded one of the state."""
        space = space_of(eval_reset(self.env, lambda state, obs: prng.words(state)))
        return Dict({"obs": super().observation_space, "state": space})

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`."""
        state, obs = self.env.reset(key)
        return state, {"obs": obs, "state": state}

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step."""
        result = self.env.step(key, state, action)
        return result.replace(obs={"obs": result.obs, "state": result.state})


class ObservePrevious(Wrapper):
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

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`; the reward is unbounded."""
        return space_with_previous(super().observation_space, self.action_space)

    @property
    def observation_spaces(self) -> dict[str, AnySpace]:
        """Space of one agent's `obs`, by group."""
        return {
            name: space_with_previous(as_space(space), self.action_spaces[name])
            for name, space in super().observation_spaces.items()
        }

    def reset(self, key: chex.PRNGKey) -> tuple:
        """Starts an episode: `(state, obs)`, without a previous step."""
        state, obs, *acting = self.env.reset(key)
        if not acting:
            action = first_of(self.action_space)
            obs = with_previous(obs, action, jnp.float32(0), jnp.bool_(True))
            return state, obs
        action = {
            name: first_of(Repeated(as_space(self.action_spaces[name]), len(members)))
            for name, members in self.groups.items()
        }
        reward = jnp.zeros(len(self.agents), jnp.float32)
        return state, self._see(obs, action, reward, True), *acting

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> Any:
        """Takes one step."""
        result = self.env.step(key, state, action)
        reward = jnp.asarray(result.reward, jnp.float32)
        if isinstance(result, MultiAgentStep):
            return result.replace(obs=self._see(result.obs, action, reward, False))
        obs = with_previous(result.obs, action, reward, jnp.bool_(False))
        return result.replace(obs=obs)

    def _see(
        self, obs: ArrayTree, action: ArrayTree, reward: jax.Array, first: bool
    ) -> dict[str, ArrayTree]:
        """Shows every agent its own, by group `[A_g, ...]`."""
        shown = {}
        for name, members in self.groups.items():
            own = reward[jnp.asarray([self.agents.index(x) for x in members])]
            flag = jnp.full(own.shape, first)
            shown[name] = with_previous(obs[name], action[name], own, flag)
        return shown


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


def first_of(space: AnySpace) -> ArrayTree:
    """Returns zeros like an element."""
    # The shape of a key only: `probe` takes a key for a draw of the environment's own.
    key = jax.eval_shape(jax.random.key, 0)
    return prng.blank(jax.eval_shape(space.sample, key))


def _by_name(tree: Any, otherwise: Any) -> dict[str, Any]:
    """Returns the entries of a dict, or `{"obs": otherwise}`; none may be `agent`."""
    if not isinstance(tree, Mapping):
        return {"obs": otherwise}
    if "agent" in tree:
        raise ValueError("`obs` must be without `agent` for `AgentNumber`, got one.")
    return dict(tree)


def space_with_previous(obs: AnySpace, action: AnySpace) -> AnySpace:
    """Returns the space of what `with_previous` returns."""
    return Dict(
        {
            "obs": obs,
            "action": as_space(action),
            "reward": Box(-jnp.inf, jnp.inf, ()),
            "first": Box(False, True, (), jnp.dtype(bool)),
        }
    )


def with_previous(
    obs: ArrayTree, action: ArrayTree, reward: jax.Array, first: jax.Array
) -> dict[str, ArrayTree]:
    """Shows an observation with the step before it."""
    return {"obs": obs, "action": action, "reward": reward, "first": first}


def eval_reset(env: Any, fn: Callable[..., ArrayTree]) -> ArrayTree:
    """Returns the shapes and dtypes of `fn(state, obs)` at a start of an episode."""
    return jax.eval_shape(lambda: fn(*env.reset(jax.random.key(0))))


def _arrays(tree: ArrayTree) -> ArrayTree:
    return jax.tree.map(jnp.asarray, tree)
