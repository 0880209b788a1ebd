"""`from_jaxmarl`: adapts any environment of JaxMARL to `MultiAgentEnv`.

Every agent that has not ended acts at every step. JaxMARL merges the time limit into
`dones`. If the environment has `max_steps` and its state counts the steps, an ending at
the limit or past it counts as truncation, and an earlier one as termination. (MPE and
SMAX end one step past their limit.)

JaxMARL's own `step` is never called: it resets the environment and loses the last
observation.
"""

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.envs import prng, spaces
from rollout.envs.multi_agent import ACTING, MultiAgentEnv, MultiAgentStep
from rollout.envs.optional_import import load
from rollout.envs.suites.convert import check_methods, like
from rollout.envs.types import AnySpace, ArrayTree, strong

# Time limits of the suite, and the counts of steps in its states that reach them.
_LIMITS = {"max_steps": ("step", "time", "t"), "num_outer_steps": ("outer_t",)}
_MASKS = ("get_avail_actions", "get_legal_moves")  # the second is Hanabi's
_WORLD = "world_state"


def from_jaxmarl(
    env: Any,
    *,
    limit_field: str | None = None,
    time_field: str | None = None,
) -> MultiAgentEnv:
    """Makes a `MultiAgentEnv` of an environment of JaxMARL.

    An agent's observation is JaxMARL's own. If the environment has a mask of allowed
    actions or a state of the world, it becomes a dict: "observation"; "action_mask",
    `[n]` bool, for `n` discrete actions; "world_state", the same for every agent.

    Agents with equal spaces are one group. A single group is called "agents"; of
    several, each is called like its agents without their numbers ("adversary" for
    "adversary_0" and "adversary_1"), or like its first agent if these names are
    ambiguous. Which policy an agent has is not a matter of groups: see
    `rollout.agents.policy_map`.

    Args:
        env: the result of `jaxmarl.make`, or any other object with `agents`,
            `reset(key)`, `step_env(key, state, actions)`, `action_space(agent)` and
            `observation_space(agent)`.
        limit_field: the name of the time limit in `env`, a number, or one of each agent
            in a sequence or by name; by default `max_steps`, or `num_outer_steps` of
            coin_game, if there is one.
        time_field: the name of the steps taken in the state, or in its `state`; by
            default `step`, `time` or `t`, or `outer_t` of coin_game.

    Returns:
        A `MultiAgentEnv` that returns the true successor and keeps the two endings
        apart. Its state is JaxMARL's own.

    Raises:
        TypeError: if `env` lacks one of these methods, or is in one of JaxMARL's
            wrappers.
        ValueError: if there is no such `limit_field` or `time_field`.
    """
    needed = ("agents", "reset", "step_env", "action_space", "observation_space")
    check_methods(env, "JaxMARL", needed)
    _check_bare(env)
    obs, state = jax.eval_shape(env.reset, jax.eval_shape(jax.random.key, 0))
    limit_field, time_field = _find_limit(env, state, limit_field, time_field)
    return _JaxmarlEnv(
        env=env,
        agents=tuple(env.agents),
        members=_group(env),
        mask_method=_find_mask(env, state),
        has_world=_WORLD in obs and _WORLD not in env.agents,
        limit_field=limit_field,
        time_field=time_field,
    )


def ids() -> tuple[str, ...]:
    """Lists the ids of JaxMARL."""
    return tuple(load("jaxmarl").registered_envs)


def make(name: str, **options: Any) -> MultiAgentEnv:
    """Makes the environment of this id; options are those of `jaxmarl.make`."""
    return from_jaxmarl(load("jaxmarl").make(name, **options))


class _JaxmarlEnv(struct.PyTreeNode, kw_only=True):
    """A `MultiAgentEnv` over one of JaxMARL; it has no parameters."""

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
        found, observed = {}, self._observed()
        for group, (agent, *_) in self.members:
            own = spaces.as_space(self.env.observation_space(agent))
            seen = jax.tree.map(  # of one agent
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), observed[group]
            )
            parts = seen if self._has_parts else {"observation": seen}
            if isinstance(own, spaces.Box):
                # Overcooked declares a wrong shape, and several a wrong dtype.
                given = parts["observation"]
                own = own.replace(shape=given.shape, dtype=given.dtype)
            parts = {**parts, "observation": own}
            found[group] = spaces.space_of(parts) if self._has_parts else own
        return found

    @property
    def action_spaces(self) -> dict[str, AnySpace]:
        return {
            group: spaces.as_space(self.env.action_space(names[0]))
            for group, names in self.members
        }

    def reset(
        self, key: chex.PRNGKey
    ) -> tuple[ArrayTree, dict[str, ArrayTree], jax.Array]:
        obs, state = self.env.reset(self._cheap(key))
        state = strong(state)
        return state, self._observe(obs, state), jnp.ones((len(self.agents),), bool)

    def step(
        self, key: chex.PRNGKey, state: ArrayTree, action: dict[str, jax.Array]
    ) -> MultiAgentStep:
        places = {
            name: (group, i) for group, x in self.members for i, name in enumerate(x)
        }
        # Some environments read actions in the order of the agents.
        chosen = {x: action[places[x][0]][places[x][1]] for x in self.agents}
        # `step_env` returns the true successor; `step` would replace it by a reset.
        obs, next_state, reward, dones, info = self.env.step_env(
            self._cheap(key), state, chosen
        )
        # Some states begin with a Python number and continue with an array.
        next_state = jax.tree.map(like, next_state, state)
        done = jnp.stack([jnp.asarray(dones[name], bool) for name in self.agents])
        all_done = jnp.asarray(dones["__all__"], bool)
        at_limit = self._at_limit(next_state)
        if at_limit.ndim:  # where each agent has its own, the last to end ends all
            all_done &= ~done.all()
        return MultiAgentStep(
            state=next_state,
            obs=jax.tree.map(like, self._observe(obs, next_state), self._observed()),
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
        """Whether an observation is a dict, with a mask or a state of the world."""
        return self.mask_method is not None or self.has_world

    def _cheap(self, key: chex.PRNGKey) -> chex.PRNGKey:
        # MPE draws at every step, and is faster with inline keys. The draws of the
        # others would make their programs large.
        own = type(self.env).__module__.startswith("jaxmarl.environments.mpe.")
        return prng.inline(key) if own else key

    def _at_limit(self, state: ArrayTree) -> jax.Array:
        """Returns whether the time limit is reached, `()` or `[A]` bool."""
        # Some environments count only the steps before this one, and pass the limit.
        if self.limit_field is None:
            return jnp.zeros((), bool)
        limit = getattr(self.env, self.limit_field)
        if isinstance(limit, Mapping):
            limit = [limit[name] for name in self.agents]
        return jnp.asarray(_time(state, self.time_field) >= jnp.asarray(limit))

    def _observe(
        self, obs: Mapping[str, ArrayTree], state: ArrayTree
    ) -> dict[str, ArrayTree]:
        """Stacks the observations of the agents of each group."""
        parts = {"observation": obs}
        if self.mask_method is not None:
            masks = getattr(self.env, self.mask_method)(state)
            parts["action_mask"] = {x: jnp.asarray(masks[x], bool) for x in self.agents}
        if self.has_world:
            parts[_WORLD] = dict.fromkeys(self.agents, obs[_WORLD])

        def see(agent: str) -> ArrayTree:
            if not self._has_parts:
                return obs[agent]
            return {name: part[agent] for name, part in parts.items()}

        return {
            group: jax.tree.map(lambda *x: jnp.stack(x), *map(see, names))
            for group, names in self.members
        }

    def _observed(self) -> dict[str, ArrayTree]:
        """Returns the shapes and dtypes of the first observations."""
        key = jax.eval_shape(jax.random.key, 0)
        return jax.eval_shape(lambda key: self.reset(key)[1], key)


def _group(env: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Groups agents with equal spaces, and names the groups."""
    alike: list[tuple[AnySpace, list[str]]] = []
    for agent in env.agents:
        pair = env.observation_space(agent), env.action_space(agent)
        pair = tuple(map(spaces.as_space, pair))
        # Spaces are no keys of a dict: bounds may be arrays, which have no hash.
        same = next((names for other, names in alike if _are_equal(pair, other)), None)
        if same is None:
            alike.append((pair, [agent]))
        else:
            same.append(agent)
    members = [tuple(names) for _, names in alike]
    if len(members) == 1:
        return (("agents", members[0]),)
    # Groups are called like their agents without numbers, if no two names are equal.
    stems = [{name.rstrip("0123456789_") for name in names} for names in members]
    begins = [stem.pop() if len(stem) == 1 else "" for stem in stems]
    is_clear = len(set(begins)) == len(begins) and not {"", ACTING} & set(begins)
    names = begins if is_clear else [x[0] for x in members]
    return tuple(zip(names, members, strict=True))


def _are_equal(one: Any, other: Any) -> bool:
    # Not `==`, which compares bounds that are arrays entry by entry.
    (leaves, structure), (others, structure_of_other) = map(
        jax.tree.flatten, (one, other)
    )
    is_alike = structure == structure_of_other
    return is_alike and all(map(np.array_equal, leaves, others))


def _check_bare(env: Any) -> None:
    """Refuses JaxMARL's wrappers, which change only the `step` that is never called."""
    if any(kind.__name__ == "JaxMARLWrapper" for kind in type(env).__mro__):
        raise TypeError(
            "`env` must be an environment of JaxMARL without its wrappers, got "
            f"{type(env).__name__}. Instead of `LogWrapper` and its like use the "
            "returns of `rollout.agents.summarize_agents`, and an `Accumulator` for "
            "other figures; `rollout.envs.vectorize` stands for "
            "`CTRolloutManager`, and observations have the `world_state`."
        )


def _find_mask(env: Any, state: ArrayTree) -> str | None:
    """Returns the name of the method that returns the agents' action masks, or None."""
    kinds = {name: spaces.as_space(env.action_space(name)) for name in env.agents}
    if not all(isinstance(kind, spaces.Discrete) for kind in kinds.values()):
        return None
    for method in _MASKS:
        if not hasattr(env, method):
            continue
        try:
            # The method of the base class raises.
            masks = jax.eval_shape(getattr(env, method), state)
        except NotImplementedError:
            continue
        # JaxNav's masks have another length.
        if all(np.shape(masks[name]) == (kinds[name].n,) for name in env.agents):
            return method
    return None


def _find_limit(
    env: Any, state: ArrayTree, limit_field: str | None, time_field: str | None
) -> tuple[str | None, str | None]:
    """Returns the names of the time limit and of the time, or None without a limit."""
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
        "`limit_field` must be a field of `env`, and `time_field` one of its state, "
        f"got {limit_field!r} and {time_field!r} with {type(env).__name__} and "
        f"{type(state).__name__}."
    )


def _time(state: ArrayTree, time_field: str) -> Any:
    """Reads the steps taken from a state, or one that it wraps; None if not counted."""
    while state is not None and not hasattr(state, time_field):
        state = getattr(state, "state", None)
    return getattr(state, time_field, None)


def _arrays(info: Any) -> ArrayTree:
    """Returns the info, or `{}` if it has leaves other than numbers."""
    numbers = jax.Array | np.ndarray | np.generic | bool | int | float
    if not all(isinstance(x, numbers) for x in jax.tree.leaves(info)):
        # Such as names: `jit` returns none.
        return {}
    return jax.tree.map(jnp.asarray, info)
