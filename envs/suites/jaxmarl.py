"""`from_jaxmarl`: adapts JaxMARL environments to `MultiAgentEnv`.

Every agent that is not done acts at every step. JaxMARL merges the time limit into
`dones`. If the environment has `max_steps` and its state counts the steps, an episode
that ends at or after the limit counts as truncated, and otherwise as terminated. (MPE
and SMAX end one step after the limit.)

The adapter never calls JaxMARL's `step`, which resets the environment and discards the
last observation.
"""

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.base import prng
from rollout.base.checks import import_optional
from rollout.envs import spaces
from rollout.envs.multi_agent import MultiAgentEnv, MultiAgentStep, group_agents
from rollout.envs.suites.convert import (
    check_methods,
    keep_dtypes,
    promote,
    shapes_of_reset,
)
from rollout.envs.types import AnySpace, ArrayTree

# Time limits of JaxMARL's environments, and the step counts in their states.
_LIMITS = {"max_steps": ("step", "time", "t"), "num_outer_steps": ("outer_t",)}
_MASKS = ("get_avail_actions", "get_legal_moves")  # Hanabi has the second method
_WORLD = "world_state"


def from_jaxmarl(
    env: Any,
    *,
    limit_field: str | None = None,
    time_field: str | None = None,
) -> MultiAgentEnv:
    """Adapts a JaxMARL environment to `MultiAgentEnv`.

    The adapter returns JaxMARL's observations. If the environment provides action masks
    or a world state, an observation is a dict with the keys "observation";
    "action_mask", `[n]` bool for `n` discrete actions; and "world_state", equal for all
    agents.

    Agents with equal spaces form a group. A single group is named "agents". Several
    groups are named after their agents without the numbers ("adversary" for
    "adversary_0" and "adversary_1"), or after the first agent of each group if these
    names are ambiguous. Groups do not determine the policy of an agent, see
    `rollout.agents.policy_map`.

    Args:
        env: result of `jaxmarl.make`, or another object with `agents`, `reset(key)`,
            `step_env(key, state, actions)`, `action_space(agent)` and
            `observation_space(agent)`.
        limit_field: name of the time limit in `env`. The limit is a number, or a
            sequence or mapping with one number per agent. The default is `max_steps` or
            coin_game's `num_outer_steps`, if the environment has either.
        time_field: name of the step count in the state, or in its field `state`. The
            default is `step`, `time` or `t`, or coin_game's `outer_t`.

    Returns:
        A `MultiAgentEnv` that returns true successor observations and separates
        termination from truncation. Its state is the state of `env`.

    Raises:
        TypeError: if `env` lacks one of these methods, or is a JaxMARL wrapper.
        ValueError: if `limit_field` or `time_field` does not exist.
    """
    methods = ("agents", "reset", "step_env", "action_space", "observation_space")
    check_methods(env, "JaxMARL", methods)
    _check_bare(env)
    obs, state = jax.eval_shape(env.reset, jax.eval_shape(jax.random.key, 0))
    limit_field, time_field = _find_limit(env, state, limit_field, time_field)
    return _JaxmarlEnv(
        env=env,
        agents=tuple(env.agents),
        members=tuple(
            group_agents(
                {name: env.observation_space(name) for name in env.agents},
                {name: env.action_space(name) for name in env.agents},
            ).items()
        ),
        mask_method=_find_mask(env, state),
        has_world=_WORLD in obs and _WORLD not in env.agents,
        limit_field=limit_field,
        time_field=time_field,
    )


def ids() -> tuple[str, ...]:
    """Lists the ids of JaxMARL."""
    return tuple(import_optional("jaxmarl").registered_envs)


def make(name: str, **options: Any) -> MultiAgentEnv:
    """Creates an environment by id; `options` are arguments of `jaxmarl.make`."""
    return from_jaxmarl(import_optional("jaxmarl").make(name, **options))


class _JaxmarlEnv(struct.PyTreeNode, kw_only=True):
    """A `MultiAgentEnv` over a JaxMARL environment, without parameters."""

    simultaneous = True

    env: Any = struct.field(pytree_node=False)
    agents: tuple[str, ...] = struct.field(pytree_node=False)
    members: tuple[tuple[str, tuple[str, ...]], ...] = struct.field(pytree_node=False)
    mask_method: str | None = struct.field(pytree_node=False)
    has_world: bool = struct.field(pytree_node=False)
    limit_field: str | None = struct.field(pytree_node=False)
    time_field: Any = struct.field(pytree_node=False)

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return dict(self.members)

    @property
    def observation_spaces(self) -> dict[str, AnySpace]:
        group_spaces, shapes = {}, shapes_of_reset(self)[1]
        for group, (agent, *_) in self.members:
            space = spaces.as_space(self.env.observation_space(agent))
            shape = jax.tree.map(  # remove the agent axis
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes[group]
            )
            parts = shape if self._has_parts else {"observation": shape}
            if isinstance(space, spaces.Box):
                # Overcooked declares a wrong shape, several environments a wrong dtype.
                obs = parts["observation"]
                space = space.replace(shape=obs.shape, dtype=obs.dtype)
            parts = {**parts, "observation": space}
            group_spaces[group] = spaces.space_of(parts) if self._has_parts else space
        return group_spaces

    @property
    def action_spaces(self) -> dict[str, AnySpace]:
        return {
            group: spaces.as_space(self.env.action_space(names[0]))
            for group, names in self.members
        }

    def reset(
        self, key: chex.PRNGKey
    ) -> tuple[ArrayTree, dict[str, ArrayTree], jax.Array]:
        obs, state = self.env.reset(self._inline(key))
        obs = self._observe(obs, state)
        state, obs = promote(self, key, state, obs, type(self)._step)
        return state, obs, jnp.ones((len(self.agents),), bool)

    def step(
        self, key: chex.PRNGKey, state: ArrayTree, action: dict[str, jax.Array]
    ) -> MultiAgentStep:
        result = self._step(key, state, action)
        # Observations may be floats after `reset` and integers after a step.
        return result.replace(obs=keep_dtypes(result.obs, shapes_of_reset(self)[1]))

    def _step(
        self, key: chex.PRNGKey, state: ArrayTree, action: dict[str, jax.Array]
    ) -> MultiAgentStep:
        index = {
            name: (group, i) for group, x in self.members for i, name in enumerate(x)
        }
        # Some environments read actions in the order of the agents.
        actions = {x: action[index[x][0]][index[x][1]] for x in self.agents}
        # `step_env` returns the true successor; `step` replaces it by a reset.
        obs, next_state, reward, dones, info = self.env.step_env(
            self._inline(key), state, actions
        )
        next_state = keep_dtypes(next_state, state)
        done = jnp.stack([jnp.asarray(dones[name], bool) for name in self.agents])
        all_done = jnp.asarray(dones["__all__"], bool)
        at_limit = self._at_limit(next_state)
        if at_limit.ndim:  # one limit per agent: the last agent ends the episode
            all_done &= ~done.all()
        return MultiAgentStep(
            state=next_state,
            obs=self._observe(obs, next_state),
            acting=~done,
            reward=jnp.stack([jnp.float32(reward[name]) for name in self.agents]),
            terminated=done & ~at_limit,
            truncated=done & at_limit,
            episode_terminated=all_done & ~at_limit.any(),
            episode_truncated=all_done & at_limit.any(),
            info=_arrays(info),
        )

    @property
    def _has_parts(self) -> bool:
        """Whether an observation is a dict with an action mask or a world state."""
        return self.mask_method is not None or self.has_world

    def _inline(self, key: chex.PRNGKey) -> chex.PRNGKey:
        # MPE samples noise at every step, which is faster with inline keys. Inline keys
        # would enlarge the compiled programs of all other environments.
        is_mpe = type(self.env).__module__.startswith("jaxmarl.environments.mpe.")
        return prng.inline(key) if is_mpe else key

    def _at_limit(self, state: ArrayTree) -> jax.Array:
        """Returns whether the time limit is reached, `()` or `[A]` bool."""
        # Use `>=`: some environments exceed the limit by one step.
        if self.limit_field is None:
            return jnp.zeros((), bool)
        limit = getattr(self.env, self.limit_field)
        if isinstance(limit, Mapping):
            limit = [limit[name] for name in self.agents]
        return jnp.asarray(_time(state, self.time_field) >= jnp.asarray(limit))

    def _observe(
        self, obs: Mapping[str, ArrayTree], state: ArrayTree
    ) -> dict[str, ArrayTree]:
        """Stacks the observations of all agents in each group."""
        parts = {"observation": obs}
        if self.mask_method is not None:
            masks = getattr(self.env, self.mask_method)(state)
            parts["action_mask"] = {x: jnp.asarray(masks[x], bool) for x in self.agents}
        if self.has_world:
            parts[_WORLD] = dict.fromkeys(self.agents, obs[_WORLD])

        def select(agent: str) -> ArrayTree:
            if not self._has_parts:
                return obs[agent]
            return {name: part[agent] for name, part in parts.items()}

        return {
            group: jax.tree.map(lambda *x: jnp.stack(x), *map(select, names))
            for group, names in self.members
        }


def _check_bare(env: Any) -> None:
    """Raises for JaxMARL's wrappers, because the adapter never calls their `step`."""
    if any(cls.__name__ == "JaxMARLWrapper" for cls in type(env).__mro__):
        raise TypeError(
            "`env` must be an environment of JaxMARL without its wrappers, got "
            f"{type(env).__name__}. Instead of `LogWrapper` and similar wrappers, use "
            "`rollout.agents.summarize_agents` for returns and an `Accumulator` for "
            "other metrics. Instead of `CTRolloutManager`, use "
            "`rollout.envs.vectorize`: observations contain the `world_state`."
        )


def _find_mask(env: Any, state: ArrayTree) -> str | None:
    """Returns the name of the method that returns the agents' action masks, or None."""
    action_spaces = [spaces.as_space(env.action_space(name)) for name in env.agents]
    if not all(isinstance(space, spaces.Discrete) for space in action_spaces):
        return None
    for name in _MASKS:
        if (method := getattr(env, name, None)) is None:
            continue
        try:
            # The method of the base class raises `NotImplementedError`.
            masks = jax.eval_shape(method, state)
        except NotImplementedError:
            continue
        # JaxNav's masks do not have one entry per action.
        pairs = zip(env.agents, action_spaces, strict=True)
        if all(np.shape(masks[agent]) == (space.n,) for agent, space in pairs):
            return name
    return None


def _find_limit(
    env: Any, state: ArrayTree, limit_field: str | None, time_field: str | None
) -> tuple[str | None, str | None]:
    """Returns the field names of the time limit and the step count, None if absent."""
    limits = _LIMITS
    if limit_field is not None:
        limits = {limit_field: _LIMITS.get(limit_field, _LIMITS["max_steps"])}
    for limit, times in limits.items():
        for time in times if time_field is None else (time_field,):
            is_limited = getattr(env, limit, None) is not None
            if is_limited and _time(state, time) is not None:
                return limit, time
    if limit_field is None and time_field is None:
        return None, None
    raise ValueError(
        "`limit_field` must be a field of `env`, and `time_field` of its state, "
        f"got {limit_field!r} and {time_field!r} with {type(env).__name__} and "
        f"{type(state).__name__}."
    )


def _time(state: ArrayTree, time_field: str) -> Any:
    """Reads the step count of a state or of the state that it wraps; None if absent."""
    while state is not None and not hasattr(state, time_field):
        state = getattr(state, "state", None)
    return getattr(state, time_field, None)


def _arrays(info: Any) -> ArrayTree:
    """Converts `info` to arrays; returns `{}` if a leaf is not numeric."""
    numbers = jax.Array | np.ndarray | np.generic | bool | int | float
    if not all(isinstance(x, numbers) for x in jax.tree.leaves(info)):
        # `jit` cannot return leaves such as strings.
        return {}
    return jax.tree.map(jnp.asarray, info)
