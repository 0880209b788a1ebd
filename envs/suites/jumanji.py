"""`from_jumanji`: adapts Jumanji environments, single-agent or multi-agent.

The discount at the end of a Jumanji episode is 0 for termination and positive for
truncation. Several games return the discount 0 at their time limit, which therefore
counts as termination. The adapter does not use Jumanji's auto-reset wrappers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.base.checks import import_optional
from rollout.envs.multi_agent import MultiAgentEnv, MultiAgentStep
from rollout.envs.spaces import Box, Composite, Discrete, MultiDiscrete, Space, space_of
from rollout.envs.suites.convert import check_methods, check_no_reset
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep, strong

_GROUP = "agents"


def from_jumanji(env: Any) -> Env | MultiAgentEnv:
    """Adapts a Jumanji environment to `Env` or `MultiAgentEnv`.

    The adapter returns Jumanji's observations, usually a NamedTuple with an
    `action_mask`. `info` contains Jumanji's `extras`. The key of each step replaces
    `state.key`.

    If `env` has one reward per agent, the agents are "agent_0", "agent_1", ..., in a
    single group "agents". Observation leaves with an agent axis are split among the
    agents, and all other leaves are repeated for every agent. An agent terminates when
    its discount is 0.

    Args:
        env: result of `jumanji.make`, or another Jumanji environment without an
            auto-reset wrapper.

    Returns:
        An `Env`, or a `MultiAgentEnv` if `env` has one reward per agent. Its state is
        the state of `env` without the key. It has no parameters.

    Raises:
        TypeError: if `env` lacks the methods of a Jumanji environment.
        ValueError: if `env` resets automatically.
    """
    methods = ("reset", "step", "observation_spec", "action_spec", "reward_spec")
    check_methods(env, "Jumanji", methods)
    check_no_reset(env)
    if not env.reward_spec.shape:
        return _JumanjiEnv(env=env)
    (num_agents,) = env.reward_spec.shape
    return _JumanjiAgents(
        env=env, agents=tuple(f"agent_{number}" for number in range(num_agents))
    )


def ids() -> tuple[str, ...]:
    """Lists the ids of Jumanji."""
    return tuple(sorted(import_optional("jumanji").registered_environments()))


def make(name: str, **options: Any) -> Env | MultiAgentEnv:
    """Creates an environment by id; `options` are arguments of the constructor."""
    return from_jumanji(import_optional("jumanji").make(name, **options))


class _Jumanji(struct.PyTreeNode, kw_only=True):
    """Common base of both adapters, which resets, steps and renders."""

    env: Any = struct.field(pytree_node=False)

    def reset_game(self, key: chex.PRNGKey) -> tuple[ArrayTree, Any]:
        state, timestep = self.env.reset(key)
        # Drop the key, which every step replaces, to keep it out of the carry.
        return strong((state.replace(key=()), timestep))

    def step_game(
        self, key: chex.PRNGKey, state: Any, action: jax.Array
    ) -> tuple[ArrayTree, Any]:
        # `timestep` contains the true successor, because no wrapper resets.
        next_state, timestep = self.env.step(state.replace(key=key), action)
        return strong((next_state.replace(key=()), timestep))

    @property
    def draws(self) -> bool:
        """Whether the environment has a viewer."""
        return self._viewer() is not None

    def _viewer(self) -> Any:
        # The attribute has different names in different games; some lack a viewer.
        names = "_viewer", "_env_viewer", "viewer"
        return next(filter(None, (getattr(self.env, x, None) for x in names)), None)

    def render_frames(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Renders states with Jumanji's viewer, `[H, W, 4]` uint8 each."""
        viewer = self._viewer()
        display = viewer._display
        viewer._display = viewer._display_rgb_array  # the default opens a window
        try:
            for state in states:
                yield np.array(viewer.render(state))
        finally:
            viewer._display = display
            viewer.close()


class _JumanjiEnv(_Jumanji, kw_only=True):
    """An `Env` over a Jumanji environment with a single reward."""

    @property
    def observation_space(self) -> AnySpace:
        return _to_space(self.env.observation_spec)

    @property
    def action_space(self) -> AnySpace:
        return _to_action_space(self.env.action_spec)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        state, timestep = self.reset_game(key)
        return state, timestep.observation

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: jax.Array) -> EnvStep:
        next_state, timestep = self.step_game(key, state, action)
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
    """A `MultiAgentEnv` over a Jumanji environment with one reward per agent."""

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
        state, timestep = self.reset_game(key)
        return state, self._observe(timestep), jnp.ones((len(self.agents),), bool)

    def step(
        self, key: chex.PRNGKey, state: ArrayTree, action: dict[str, jax.Array]
    ) -> MultiAgentStep:
        next_state, timestep = self.step_game(key, state, action[_GROUP])
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
            # Compare shapes, because specs do not mark leaves with an agent axis.
            if x.shape[:1] == (num_agents,):
                return x
            return jnp.broadcast_to(x, (num_agents, *x.shape))

        return {_GROUP: jax.tree.map(split, timestep.observation)}


def _to_action_space(spec: Any) -> AnySpace:
    """Converts an action spec to a space; bounded integers support action masks."""
    space = _to_space(spec)
    if isinstance(space, Box) and jnp.issubdtype(space.dtype, jnp.integer):
        low, high = (np.broadcast_to(x, space.shape) for x in (space.low, space.high))
        return MultiDiscrete(high.astype(int) - low + 1, space.dtype, low.astype(int))
    return space


def _to_space(spec: Any, num_agents: int | None = None) -> AnySpace:
    """Converts a spec to a space, for a single agent if `num_agents` is set."""
    parts = _to_parts(spec, num_agents)
    return parts if isinstance(parts, Space) else Composite(parts)


def _to_parts(spec: Any, num_agents: int | None) -> Any:
    """Converts a spec to a tree of spaces with the structure of the observations."""
    if not hasattr(spec, "dtype"):
        inner = {name: _to_parts(x, num_agents) for name, x in spec._specs.items()}
        return spec._constructor(**inner)
    shape, dtype = spec.shape, jnp.dtype(spec.dtype)
    sizes = getattr(spec, "num_values", None)
    if sizes is not None and num_agents is None:
        sizes = np.asarray(sizes)
        return MultiDiscrete(sizes, dtype) if shape else Discrete(int(sizes), dtype)
    space = space_of(jax.ShapeDtypeStruct(shape, dtype))
    bounds = getattr(spec, "minimum", space.low), getattr(spec, "maximum", space.high)
    low, high = map(np.asarray, bounds)
    if num_agents is not None and shape[:1] == (num_agents,):
        shape = shape[1:]
        low, high = (x if x.ndim == 0 else x[0] for x in (low, high))
    return Box(low, high, shape, dtype)
