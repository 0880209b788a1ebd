"""`from_jumanji`: adapts environments of Jumanji, of one agent or several.

The discount at the end of a Jumanji episode is 0 for a termination, and another one for
a truncation. Several games return the discount 0 at their own time limit, which is then
a termination. Jumanji's auto-reset wrappers are never used.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.envs.multi_agent import MultiAgentEnv, MultiAgentStep
from rollout.envs.optional_import import load
from rollout.envs.spaces import Box, Composite, Discrete, MultiDiscrete, Space, space_of
from rollout.envs.suites.convert import check_methods, check_no_reset
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep, strong

_GROUP = "agents"


def from_jumanji(env: Any) -> Env | MultiAgentEnv:
    """Makes an `Env` of an environment of Jumanji, or a `MultiAgentEnv`.

    The observation is Jumanji's own, most often a NamedTuple with an `action_mask`.
    `info` has Jumanji's `extras`. The key of a step takes the place of `state.key`.

    An environment with a reward per agent has the agents "agent_0", "agent_1", ..., in
    one group, "agents". Leaves of the observation with an agent axis are split between
    them; all get the rest. An agent whose discount is 0 has terminated.

    Args:
        env: the result of `jumanji.make`, or another environment of Jumanji without a
            wrapper that resets.

    Returns:
        An `Env`, or a `MultiAgentEnv` if `env` has a reward per agent, whose state is
        Jumanji's own, without the key. It has no parameters.

    Raises:
        TypeError: if `env` lacks the methods of an environment of Jumanji.
        ValueError: if `env` resets itself.
    """
    needed = ("reset", "step", "observation_spec", "action_spec", "reward_spec")
    check_methods(env, "Jumanji", needed)
    check_no_reset(env)
    if not env.reward_spec.shape:
        return _JumanjiEnv(env=env)
    (num_agents,) = env.reward_spec.shape
    return _JumanjiAgents(
        env=env, agents=tuple(f"agent_{number}" for number in range(num_agents))
    )


def ids() -> tuple[str, ...]:
    """Lists the ids of Jumanji."""
    return tuple(sorted(load("jumanji").registered_environments()))


def make(name: str, **options: Any) -> Env | MultiAgentEnv:
    """Makes the environment of this id; options are those of its constructor."""
    return from_jumanji(load("jumanji").make(name, **options))


class _Jumanji(struct.PyTreeNode, kw_only=True):
    """The shared part of both adapters: resetting, stepping and drawing."""

    env: Any = struct.field(pytree_node=False)

    def begin(self, key: chex.PRNGKey) -> tuple[ArrayTree, Any]:
        state, timestep = self.env.reset(key)
        # Without the key, which every step replaces: the carry need not hold it.
        return strong((state.replace(key=()), timestep))

    def advance(
        self, key: chex.PRNGKey, state: Any, action: jax.Array
    ) -> tuple[ArrayTree, Any]:
        # Without a wrapper, `timestep` has the true successor, also at an ending.
        next_state, timestep = self.env.step(state.replace(key=key), action)
        return strong((next_state.replace(key=()), timestep))

    @property
    def draws(self) -> bool:
        """Whether the environment has a viewer."""
        return self._viewer() is not None

    def _viewer(self) -> Any:
        # Games hold it under different names, and some have none.
        names = "_viewer", "_env_viewer", "viewer"
        return next(filter(None, (getattr(self.env, x, None) for x in names)), None)

    def render_frames(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Draws states with the viewer of Jumanji, `[H, W, 4]` uint8 each."""
        viewer = self._viewer()
        display = viewer._display
        viewer._display = viewer._display_rgb_array  # by default it opens a window
        try:
            for state in states:
                yield np.array(viewer.render(state))
        finally:
            viewer._display = display
            viewer.close()


class _JumanjiEnv(_Jumanji, kw_only=True):
    """An `Env` over an environment of Jumanji with one reward."""

    @property
    def observation_space(self) -> AnySpace:
        return _to_space(self.env.observation_spec)

    @property
    def action_space(self) -> AnySpace:
        return _to_action_space(self.env.action_spec)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        state, timestep = self.begin(key)
        return state, timestep.observation

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: jax.Array) -> EnvStep:
        next_state, timestep = self.advance(key, state, action)
        is_terminal = timestep.discount == 0
        return EnvStep(
            state=next_state,
            obs=timestep.observation,
            reward=jnp.asarray(timestep.reward, jnp.float32),
            terminated=timestep.last() & is_terminal,
            truncated=timestep.last() & ~is_terminal,
            info=timestep.extras,
        )


class _JumanjiAgents(_Jumanji, kw_only=True):
    """A `MultiAgentEnv` over an environment of Jumanji with a reward per agent."""

    simultaneous = True

    agents: tuple[str, ...] = struct.field(pytree_node=False)

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return {_GROUP: self.agents}

    @property
    def observation_spaces(self) -> dict[str, AnySpace]:
        return {_GROUP: _to_space(self.env.observation_spec, len(self.agents))}

    @property
    def action_spaces(self) -> dict[str, AnySpace]:
        space = _to_action_space(self.env.action_spec)
        if isinstance(space, MultiDiscrete):
            return {_GROUP: Discrete(space.nvec[0], space.dtype)}
        return {_GROUP: Box(space.low, space.high, space.shape[1:], space.dtype)}

    def reset(
        self, key: chex.PRNGKey
    ) -> tuple[ArrayTree, dict[str, ArrayTree], jax.Array]:
        state, timestep = self.begin(key)
        return state, self._observe(timestep), jnp.ones((len(self.agents),), bool)

    def step(
        self, key: chex.PRNGKey, state: ArrayTree, action: dict[str, jax.Array]
    ) -> MultiAgentStep:
        next_state, timestep = self.advance(key, state, action[_GROUP])
        is_terminal = timestep.discount == 0  # [A], one discount per agent
        return MultiAgentStep(
            state=next_state,
            obs=self._observe(timestep),
            acting=~is_terminal,
            reward=jnp.asarray(timestep.reward, jnp.float32),
            terminated=is_terminal,
            truncated=jnp.zeros_like(is_terminal),
            episode_terminated=timestep.last() & is_terminal.all(),
            episode_truncated=timestep.last() & ~is_terminal.all(),
            info=timestep.extras,
        )

    def _observe(self, timestep: Any) -> dict[str, ArrayTree]:
        num_agents = len(self.agents)

        def split(x: jax.Array) -> jax.Array:
            # By shape: specs do not say which leaves belong to agents.
            if x.shape[:1] == (num_agents,):
                return x
            return jnp.broadcast_to(x, (num_agents, *x.shape))

        return {_GROUP: jax.tree.map(split, timestep.observation)}


def _to_action_space(spec: Any) -> AnySpace:
    """Returns the space of a spec of actions; bounded integers can have masks."""
    space = _to_space(spec)
    if isinstance(space, Box) and jnp.issubdtype(space.dtype, jnp.integer):
        low, high = (np.broadcast_to(x, space.shape) for x in (space.low, space.high))
        return MultiDiscrete(high.astype(int) - low + 1, space.dtype, low.astype(int))
    return space


def _to_space(spec: Any, num_agents: int | None = None) -> AnySpace:
    """Returns the space of a spec; that of one agent if `num_agents` is given."""
    parts = _to_parts(spec, num_agents)
    return parts if isinstance(parts, Space) else Composite(parts)


def _to_parts(spec: Any, num_agents: int | None) -> Any:
    """Returns the spaces of a spec, in the structure of its elements."""
    if not hasattr(spec, "dtype"):
        inner = {name: _to_parts(x, num_agents) for name, x in spec._specs.items()}
        return spec._constructor(**inner)
    shape, dtype = spec.shape, jnp.dtype(spec.dtype)
    sizes = getattr(spec, "num_values", None)
    if sizes is not None and num_agents is None:
        sizes = np.asarray(sizes)
        return MultiDiscrete(sizes, dtype) if shape else Discrete(int(sizes), dtype)
    free = space_of(jax.ShapeDtypeStruct(shape, dtype))
    bounds = getattr(spec, "minimum", free.low), getattr(spec, "maximum", free.high)
    low, high = map(np.asarray, bounds)
    if num_agents is not None and shape[:1] == (num_agents,):
        shape = shape[1:]
        low, high = (x if x.ndim == 0 else x[0] for x in (low, high))
    return Box(low, high, shape, dtype)
