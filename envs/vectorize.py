"""`vectorize`: puts `B` copies of an environment side by side, with auto-reset."""

import functools
from collections.abc import Callable
from typing import Any, Self

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs import auto_reset as auto_resets
from rollout.envs import prng as env_keys
from rollout.envs.joint import _Joint
from rollout.envs.multi_agent import MultiAgentEnv, has_agents, layout_of
from rollout.envs.types import (
    RESET,
    ArrayTree,
    Env,
    EnvStep,
    LaneIndex,
    Lanes,
    VectorEnv,
    at_episode,
    hash_of_types,
    strong,
)
from rollout.envs.wrappers.wrapper import BaseWrapper, cast_step


def vectorize(
    env: Env | MultiAgentEnv, num_envs: int, *, auto_reset: str = "auto"
) -> VectorEnv:
    """Puts `num_envs` copies of `env`, the lanes, side by side.

    Rewards become float32, flags bool, and no leaf stays weakly typed.

    Of an environment of `A` agents, `obs` is `{group: [B, A_g, ...]}` with "acting",
    `[B, A]` bool, True for agents that must act, and an action `{group: [B, A_g,
    ...]}`. The reward is the sum over the agents, the flags are those of the episode,
    and `info` is a `MultiAgentInfo`. The episode also ends when every agent has ended:
    it is terminated if all of them terminated, else truncated.

    Args:
        env: the environment; its parameters are shared by all lanes.
        num_envs: B, at least 1.
        auto_reset: `"compact"` resets only the lanes that are done; `"select"` resets
            every lane at every step and keeps the done ones; `"auto"` chooses by the
            platform that the program is lowered for. All play the same episodes, bit
            for bit; what is computed from them, such as normalised observations or the
            values of a network, may be rounded otherwise.

    Returns:
        A `VectorEnv`: a pytree whose leaves are those of `env`. Of several agents it
        has the `agents`, `groups`, `observation_spaces` and `action_spaces` of `env`.

    Raises:
        ValueError: if `num_envs` is not a positive int or `auto_reset` is unknown. Of
            several agents, if one is in two groups or none, or a group has no spaces,
            or is called "acting"; while tracing, if observations are not stacked by
            group, or a value per agent is not `[A]`.
    """
    return _vectorize(env, num_envs, auto_reset, each=False)


def vectorize_each(envs: Env | MultiAgentEnv, *, auto_reset: str = "auto") -> VectorEnv:
    """Puts environments with different parameters side by side.

    Args:
        envs: environments of one kind as one pytree; every leaf has the leading axis B,
            and lane i's parameters at index i: the result of `jax.vmap(make_env)(x)` or
            of `jax.tree.map(lambda *x: jnp.stack(x), *envs)`.
        auto_reset: as in `vectorize`.

    Returns:
        A `VectorEnv`; its spaces are those of lane 0.

    Raises:
        ValueError: as `vectorize`, and if the leaves do not have one leading axis, or
            if there is no leaf.
    """
    checks.single(envs)
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(envs)]
    if () in shapes or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(
            "`envs` must have leaves with one leading axis, that of the lanes, got "
            f"{', '.join(map(str, sorted(set(shapes)))) or 'no leaves'}: `vectorize` "
            "puts equal environments side by side."
        )
    return _vectorize(envs, shapes[0][0], auto_reset, each=True)


def _vectorize(env: Any, num_envs: int, auto_reset: str, *, each: bool) -> VectorEnv:
    checks.single(env)
    checks.choice("auto_reset", auto_reset, tuple(auto_resets.BY_NAME))
    num_envs = checks.int_between("num_envs", num_envs)
    if has_agents(env):
        # The agents of lane 0 stand for those of all: their names are no parameters.
        env = _Joint(env, layout_of(jax.tree.map(lambda x: x[0], env) if each else env))
    return _VectorizedEnv(env=env, num_envs=num_envs, auto_reset=auto_reset, each=each)


class _VectorizedEnv(BaseWrapper, VectorEnv, kw_only=True):
    """A `VectorEnv` made of one `Env` by `jax.vmap`."""

    env: Any  # an `Env`
    num_envs: int = struct.field(pytree_node=False)
    auto_reset: str = struct.field(pytree_node=False)
    each: bool = struct.field(pytree_node=False, default=False)  # parameters per lane
    first_lane: jax.Array | None = None  # () int32, see `local`
    _types: int = struct.field(pytree_node=False, default=0, repr=False)

    def __post_init__(self) -> None:
        # Static data: without it `jit` may take two classes of `env` for one.
        object.__setattr__(self, "_types", hash_of_types(self.env))

    @property
    def _one(self) -> Any:
        return jax.tree.map(lambda x: x[0], self.env) if self.each else self.env

    def local(self, num_envs: int, first_lane: jax.Array) -> Self:
        """Returns the lanes of one device.

        Parameters per lane are already those of the device, `[num_envs, ...]`.
        """
        return self.replace(num_envs=num_envs, first_lane=first_lane)

    def reset(self, keys: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        # The first episode of a lane has the number of the lane, counted over all
        # devices.
        number = jnp.arange(self.num_envs, dtype=jnp.int32)
        if self.first_lane is not None:
            number = number + self.first_lane
        return strong(self._reset(self.env, keys, number))

    def step(self, keys: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        env, axes = self._lay_out(self.env, self.num_envs)
        step = functools.partial(_step, self._types)
        result = jax.vmap(step, (axes, 0, 0, 0))(env, keys, state, action)
        return cast_step(result)

    def reset_done(
        self, key_fn: Callable[[LaneIndex], chex.PRNGKey], done: jax.Array, lanes: Lanes
    ) -> Lanes:
        every = jnp.arange(self.num_envs, dtype=jnp.int32)

        def start(env: Env, lane: LaneIndex) -> Lanes:
            episode_key = key_fn(lane)
            if self.each:
                # Only the parameters of the lanes that are reset.
                env = jax.tree.map(lambda x: x[lane], env)
            # A collector's `key_fn` numbers the episodes; for any other, a lane has its
            # own number. `every` also makes numbers of `ALL_LANES`.
            number = getattr(key_fn, "number", lambda lane: every[lane])(lane)
            reset_key = env_keys.fold_in(episode_key, RESET)
            state, obs = self._reset(env, reset_key, number)
            return Lanes(episode_key=episode_key, state=state, obs=obs)

        return auto_resets.reset(self.auto_reset, self.env, start, done, lanes)

    def _reset(
        self, env: Env, reset_keys: chex.PRNGKey, number: jax.Array
    ) -> tuple[ArrayTree, ArrayTree]:
        """Resets `[K]` lanes, which start the episodes `number`, `[K]` int32."""
        env, axes = self._lay_out(env, number.size)
        reset = functools.partial(_reset, self._types)
        return jax.vmap(reset, (axes, 0, 0))(env, reset_keys, number)

    def _lay_out(self, env: Env, num_lanes: int) -> tuple[Env, Env]:
        """Returns the parameters of `num_lanes` lanes, and the mapped axis of each.

        A float that all lanes share is repeated here, once, and not by XLA at each use:
        the way XLA divides by a number depends on the number of its uses, and that of
        equal numbers on the number of devices.
        """
        if self.each:
            return env, jax.tree.map(lambda _: 0, env)
        # Scalar floats get a lane axis; integers and arrays stay shared, unmapped.
        axes = jax.tree.map(lambda x: 0 if _is_float(x) else None, env)
        repeated = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (num_lanes,)) if _is_float(x) else x, env
        )
        return repeated, axes


# A program may hold a step or a reset several times, one for each kind of platform.
# Jitted, the environment's own code is traced once. For `types` see `hash_of_types`.
@functools.partial(jax.jit, static_argnums=0)
def _step(
    types: int, env: Env, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree
) -> EnvStep:
    del types  # unused: only for the cache
    result = env.step(key, state, action)
    if isinstance(result, EnvStep):
        return result
    got = checks.describe(result)
    raise ValueError(f"`env.step` must return a `rollout.envs.EnvStep`, got {got}.")


@functools.partial(jax.jit, static_argnums=0)
def _reset(
    types: int, env: Any, key: chex.PRNGKey, number: jax.Array
) -> tuple[ArrayTree, ArrayTree]:
    del types  # unused: only for the cache
    result = at_episode(env, number).reset(key)
    if type(result) is tuple and len(result) == 2:
        return result
    got = checks.describe(result)
    raise ValueError(f"`env.reset` must return (state, obs), got {got}.")


def _is_float(x: jax.typing.ArrayLike) -> bool:
    return jnp.ndim(x) == 0 and jnp.issubdtype(jnp.result_type(x), jnp.floating)
