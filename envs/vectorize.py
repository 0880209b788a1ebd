"""`vectorize`: runs `B` copies of an environment in parallel, with auto-reset."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout.base import checks
from rollout.base import prng as env_keys
from rollout.base.programs import hash_of_types
from rollout.envs import auto_reset as auto_resets
from rollout.envs.multi_agent import (
    ACTING,
    AgentLayout,
    Flag,
    MultiAgentEnv,
    MultiAgentInfo,
    MultiAgentStep,
    has_agents,
    layout_of,
    pack_status,
    stacked_spaces,
    update_agents,
)
from rollout.envs.types import (
    RESET,
    AnySpace,
    ArrayTree,
    Env,
    EnvStep,
    LaneIndex,
    Lanes,
    VectorEnv,
    at_episode,
    strong,
)
from rollout.envs.wrappers.wrapper import BaseWrapper, Wrapper, cast_step


class JointState(struct.PyTreeNode, kw_only=True):
    """State of one environment and statistics of its `A` agents."""

    env_state: ArrayTree
    agent_return: jax.Array  # [A] float32
    packed: jax.Array  # [A] uint32, as in `AgentInfo`


class _Joint(Wrapper):
    """An `Env` whose action is the joint action of all agents."""

    env: MultiAgentEnv
    layout: AgentLayout = struct.field(pytree_node=False)

    for_agents = "all"

    @property
    def observation_space(self) -> AnySpace:
        return stacked_spaces(self.layout, self.env.observation_spaces, acting=True)

    @property
    def action_space(self) -> AnySpace:
        return stacked_spaces(self.layout, self.env.action_spaces)

    def reset(self, key: chex.PRNGKey) -> tuple[JointState, dict[str, Any]]:
        result = self.env.reset(key)
        if type(result) is not tuple or len(result) != 3:
            raise ValueError(
                "`env.reset` must return (state, obs, acting), got "
                f"{checks.describe(result)}."
            )
        env_state, obs, acting = result
        shape = (len(self.layout.agents),)
        if self.layout.simultaneous:
            acting = jnp.ones(shape, bool)
        acting = self._per_agent("acting", acting, bool)
        state = JointState(
            env_state=env_state,
            agent_return=jnp.zeros(shape, jnp.float32),
            packed=pack_status(jnp.zeros(shape, jnp.int32), {Flag.ACTS_NEXT: acting}),
        )
        return state, self._observe(obs, acting)

    def step(self, key: chex.PRNGKey, state: JointState, action: ArrayTree) -> EnvStep:
        result = self.env.step(key, state.env_state, action)
        condition = "`env.step` must return a `rollout.envs.multi_agent.MultiAgentStep`"
        checks.check_type(condition, result, MultiAgentStep)
        reward = self._per_agent("reward", result.reward, jnp.float32)
        acting = True
        if not self.layout.simultaneous:
            acting = self._per_agent("acting", result.acting, bool)
        info, flags = update_agents(
            self.layout,
            state.packed,
            state.agent_return,
            reward=reward,
            terminated=self._per_agent("terminated", result.terminated, bool),
            truncated=self._per_agent("truncated", result.truncated, bool),
            acting=acting,
        )
        has_terminated = flags[Flag.HAS_TERMINATED]
        # The episode is over when every agent has ended, even if the environment does
        # not set an episode flag.
        all_done = jnp.all(has_terminated | flags[Flag.WAS_TRUNCATED])
        all_terminated = jnp.all(has_terminated)
        return EnvStep(
            state=JointState(
                env_state=result.state,
                agent_return=info.agent_return,
                packed=info.packed,
            ),
            obs=self._observe(result.obs, flags[Flag.ACTS_NEXT]),
            reward=jnp.sum(reward),
            terminated=result.episode_terminated | (all_done & all_terminated),
            truncated=result.episode_truncated | (all_done & ~all_terminated),
            info=MultiAgentInfo(info, result.info),
        )

    def _observe(self, obs: Any, acting: jax.Array) -> dict[str, ArrayTree]:
        """Checks that observations are stacked by group, and adds the acting agents."""
        names = {group.name for group in self.layout.groups}
        if not isinstance(obs, Mapping) or obs.keys() != names:
            got = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
            raise ValueError(
                f"`obs` must be a dict of the groups {', '.join(sorted(names))}, got "
                f"{got}."
            )
        for group in self.layout.groups:
            condition = f"`obs` of the group {group.name!r} must have agents"
            checks.check_leading_axes(condition, obs[group.name], (len(group.members),))
        return {**obs, ACTING: acting}

    def _per_agent(self, name: str, value: Any, dtype: Any) -> jax.Array:
        """Checks that an array has one value per agent, and casts it."""
        num_agents = len(self.layout.agents)
        if jnp.shape(value) != (num_agents,):
            raise ValueError(
                f"`{name}` must be one value per agent, shape ({num_agents},), got "
                f"{checks.describe(value)}."
            )
        return (
            checks.check_flag(name, value)
            if dtype is bool
            else jnp.asarray(value, dtype)
        )


def vectorize(
    env: Env | MultiAgentEnv, num_envs: int, *, auto_reset: str = "auto"
) -> VectorEnv:
    """Runs `num_envs` copies of `env`, called lanes, in parallel.

    Rewards are cast to float32, flags to bool, and weak types are dropped.

    For an environment with `A` agents, `obs` is `{group: [B, A_g, ...]}` with an
    additional entry "acting", `[B, A]` bool, True for agents that must act. An action
    is `{group: [B, A_g, ...]}`. The reward is the sum over the agents, the flags
    describe the episode, and `info` is a `MultiAgentInfo`. The episode also ends when
    every agent has ended: it is terminated if all agents terminated, and otherwise
    truncated.

    Args:
        env: the environment; all lanes share its parameters.
        num_envs: B, at least 1.
        auto_reset: `"compact"` resets only the done lanes; `"select"` resets every lane
            at every step and selects the result in the done lanes; `"auto"` chooses by
            the platform that the program is lowered for. All options generate the same
            episodes, bit for bit. Values computed from the episodes, such as normalized
            observations or network outputs, may be rounded differently.

    Returns:
        A `VectorEnv`: a pytree with the leaves of `env`. For several agents it has the
        `agents`, `groups`, `observation_spaces` and `action_spaces` of `env`.

    Raises:
        ValueError: if `num_envs` is not a positive int, `auto_reset` is unknown, or
            `env` lacks the method `at_episode` of an environment that it holds. For
            several agents, if an agent is in two groups or none, or if a group has no
            spaces or the name "acting"; while tracing, if observations are not stacked
            by group, or if a per-agent value is not `[A]`.
    """
    return _vectorize(env, num_envs, auto_reset, each=False)


def vectorize_each(envs: Env | MultiAgentEnv, *, auto_reset: str = "auto") -> VectorEnv:
    """Runs environments with different parameters in parallel.

    Args:
        envs: environments of the same class, stacked in a single pytree. Every leaf has
            a leading axis B, and index i contains the parameters of lane i. Create it
            with `jax.vmap(make_env)(x)` or
            `jax.tree.map(lambda *x: jnp.stack(x), *envs)`.
        auto_reset: auto-reset method, as in `vectorize`.

    Returns:
        A `VectorEnv` with the spaces of lane 0.

    Raises:
        ValueError: if the leaves do not have the same leading axis, if there is no
            leaf, or for the reasons listed in `vectorize`.
    """
    checks.check_single_env(envs)
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(envs)]
    if () in shapes or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(
            "`envs` must have leaves with the same leading axis, one per lane, got "
            f"{', '.join(map(str, sorted(set(shapes)))) or 'no leaves'}. For equal "
            "environments, call `vectorize`."
        )
    return _vectorize(envs, shapes[0][0], auto_reset, each=True)


def _vectorize(env: Any, num_envs: int, auto_reset: str, *, each: bool) -> VectorEnv:
    checks.check_single_env(env)
    _check_levels(env)
    checks.check_choice("auto_reset", auto_reset, tuple(auto_resets.BY_NAME))
    num_envs = checks.check_int("num_envs", num_envs)
    if has_agents(env):
        # Read the agents of lane 0: names are not parameters, so all lanes share them.
        env = _Joint(env, layout_of(jax.tree.map(lambda x: x[0], env) if each else env))
    return VectorizedEnv(env=env, num_envs=num_envs, auto_reset=auto_reset, each=each)


def _check_levels(env: Any) -> None:
    """Raises if an environment hides the `at_episode` of an environment inside it."""
    for name, inner in getattr(env, "__dict__", {}).items():
        if not hasattr(inner, "step") or jax.tree_util.all_leaves([inner]):
            continue
        if _has_levels(inner) and not hasattr(env, "at_episode"):
            outer = type(env).__name__
            raise ValueError(
                f"`{outer}` must have the method `at_episode` of its field `{name}`, a "
                f"{type(inner).__name__}, got none: subclass "
                "`rollout.envs.wrappers.Wrapper`, which forwards it, or define "
                f"`at_episode(number)`. It may return the {outer} unchanged."
            )
        _check_levels(inner)


def _has_levels(env: Any) -> bool:
    """Returns whether an environment, also inside wrappers, defines `at_episode`."""
    return (
        _has_levels(env.env) if isinstance(env, Wrapper) else hasattr(env, "at_episode")
    )


class VectorizedEnv(BaseWrapper, VectorEnv, kw_only=True):
    """A `VectorEnv` that maps an `Env` over lanes with `jax.vmap`."""

    env: Any  # an `Env`
    num_envs: int = struct.field(pytree_node=False)
    auto_reset: str = struct.field(pytree_node=False)
    each: bool = struct.field(pytree_node=False, default=False)  # parameters per lane
    first_lane: jax.Array | None = None  # () int32, see `local`
    _types: int = struct.field(pytree_node=False, default=0, repr=False)

    def __post_init__(self) -> None:
        # Without this static hash, `jit` may treat two classes of `env` as equal.
        object.__setattr__(self, "_types", hash_of_types(self.env))

    @property
    def _one(self) -> Any:
        return jax.tree.map(lambda x: x[0], self.env) if self.each else self.env

    def local(self, num_envs: int, first_lane: jax.Array) -> Self:
        """Returns the lanes of one device.

        Per-lane parameters are already sharded: `[num_envs, ...]` on each device.
        """
        return self.replace(num_envs=num_envs, first_lane=first_lane)

    def reset(self, keys: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode in every lane; see `VectorEnv.reset`."""
        if jnp.shape(keys)[:1] != (self.num_envs,):
            raise ValueError(
                f"`keys` must be {self.num_envs} keys, one per environment, got "
                f"{checks.describe(keys)}. Pass `jax.random.split(key, num_envs)`."
            )
        # The number of a lane's first episode is the lane number over all devices.
        number = jnp.arange(self.num_envs, dtype=jnp.int32)
        if self.first_lane is not None:
            number = number + self.first_lane
        return strong(self._reset(self.env, keys, number))

    def step(self, keys: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Steps every lane; see `VectorEnv.step`."""
        env, axes = self._lay_out(self.env, self.num_envs)
        step = functools.partial(_step, self._types)
        result = jax.vmap(step, (axes, 0, 0, 0))(env, keys, state, action)
        return cast_step(result)

    def reset_done(
        self, key_fn: Callable[[LaneIndex], chex.PRNGKey], done: jax.Array, lanes: Lanes
    ) -> Lanes:
        """Resets the lanes in `done`; see `VectorEnv.reset_done`."""
        lane_numbers = jnp.arange(self.num_envs, dtype=jnp.int32)

        def start(env: Env, lane: LaneIndex) -> Lanes:
            episode_key = key_fn(lane)
            if self.each:
                # Gather the parameters of the lanes to reset.
                env = jax.tree.map(lambda x: x[lane], env)
            # The `key_fn` of a collector numbers the episodes; otherwise use the lane
            # number. Indexing `lane_numbers` also converts `ALL_LANES` to numbers.
            number = getattr(key_fn, "number", lambda lane: lane_numbers[lane])(lane)
            reset_key = env_keys.fold_in(episode_key, RESET)
            state, obs = self._reset(env, reset_key, number)
            return Lanes(episode_key=episode_key, state=state, obs=obs)

        return auto_resets.reset(self.auto_reset, self.env, start, done, lanes)

    def _reset(
        self, env: Env, reset_keys: chex.PRNGKey, number: jax.Array
    ) -> tuple[ArrayTree, ArrayTree]:
        """Resets `[K]` lanes; `number`, `[K]` int32, are the new episode numbers."""
        env, axes = self._lay_out(env, number.size)
        reset = functools.partial(_reset, self._types)
        return jax.vmap(reset, (axes, 0, 0))(env, reset_keys, number)

    def _lay_out(self, env: Env, num_lanes: int) -> tuple[Env, Env]:
        """Returns the parameters of `num_lanes` lanes and the mapped axis of each leaf.

        Broadcast shared floats here once, instead of in XLA at each use. XLA compiles a
        division differently depending on the number of uses of its divisor, which
        depends on the number of devices.
        """
        if self.each:
            return env, jax.tree.map(lambda _: 0, env)
        # Scalar floats get a lane axis; integers and arrays remain shared and unmapped.
        axes = jax.tree.map(lambda x: 0 if _is_float(x) else None, env)
        lane_env = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (num_lanes,)) if _is_float(x) else x, env
        )
        return lane_env, axes


# A program may contain a step or a reset several times, once for each platform. `jit`
# makes jax trace the environment only once. For `types` see `hash_of_types`.
@functools.partial(jax.jit, static_argnums=0)
def _step(
    types: int, env: Env, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree
) -> EnvStep:
    del types  # only part of the cache key
    result = env.step(key, state, action)
    if isinstance(result, EnvStep):
        return result
    got = checks.describe(result)
    raise ValueError(f"`env.step` must return a `rollout.envs.EnvStep`, got {got}.")


@functools.partial(jax.jit, static_argnums=0)
def _reset(
    types: int, env: Any, key: chex.PRNGKey, number: jax.Array
) -> tuple[ArrayTree, ArrayTree]:
    del types  # only part of the cache key
    result = at_episode(env, number).reset(key)
    if type(result) is tuple and len(result) == 2:
        return result
    got = checks.describe(result)
    raise ValueError(f"`env.reset` must return (state, obs), got {got}.")


def _is_float(x: jax.typing.ArrayLike) -> bool:
    return jnp.ndim(x) == 0 and jnp.issubdtype(jnp.result_type(x), jnp.floating)
