"""Any game of pgx, seen through the `MultiAgentEnv` contract.

The players act one after the other. A pgx state holds the observation and the allowed
actions of the player whose turn it is, and of nobody else. pgx's own auto-reset is
never used.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from envs.multi_agent import MultiAgentEnv, MultiAgentStep
from envs.spaces import Box, Dict, Discrete
from envs.types import AnySpace, ArrayTree

_GROUP = "players"


def from_pgx(env: Any) -> MultiAgentEnv:
    """Makes a `MultiAgentEnv` of a game of pgx.

    The agents are "player_0", "player_1", ..., in one group, "players". All have the
    observation of the one who acts next, `{"observation": ..., "action_mask": [n]
    bool}`; at the end of a game nobody does, but pgx still names a player, and so does
    `acting`. An action that is not allowed ends the game, with pgx's penalty,
    and `info["illegal_action"]`, `()` bool, says so.

    Args:
        env: what `pgx.make` returns, or another `pgx.Env`.

    Returns:
        A `MultiAgentEnv` whose state is pgx's own.

    Raises:
        TypeError: if `env` lacks the methods of a `pgx.Env`.
    """
    missing = [x for x in ("init", "step") if not callable(getattr(env, x, None))]
    if missing or not hasattr(env, "num_players"):
        raise TypeError(
            "`env` must have the methods init and step of pgx, and `num_players`, got "
            f"{type(env).__name__}."
        )
    # Not `env.num_actions` and `env.observation_shape`: each computes a whole state.
    state = jax.eval_shape(env.init, jax.eval_shape(jax.random.key, 0))
    return _PgxEnv(
        env=env,
        agents=tuple(f"player_{number}" for number in range(env.num_players)),
        num_actions=state.legal_action_mask.shape[0],
        obs_shape=state.observation.shape,
        obs_dtype=state.observation.dtype,
    )


@struct.dataclass(kw_only=True)
class _PgxEnv:
    """A `MultiAgentEnv` over a game of pgx; it has no parameters."""

    env: Any = struct.field(pytree_node=False)
    agents: tuple[str, ...] = struct.field(pytree_node=False)
    num_actions: int = struct.field(pytree_node=False)
    obs_shape: tuple[int, ...] = struct.field(pytree_node=False)
    obs_dtype: jax.typing.DTypeLike = struct.field(pytree_node=False)

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return {_GROUP: self.agents}

    @property
    def observation_spaces(self) -> dict[str, AnySpace]:
        mask = Box(0, 1, (self.num_actions,), jnp.dtype(bool))
        low, high = _bounds(self.obs_dtype)
        obs = Box(low, high, self.obs_shape, self.obs_dtype)
        return {_GROUP: Dict({"observation": obs, "action_mask": mask})}

    @property
    def action_spaces(self) -> dict[str, AnySpace]:
        return {_GROUP: Discrete(self.num_actions)}

    def reset(
        self, key: chex.PRNGKey
    ) -> tuple[ArrayTree, dict[str, ArrayTree], jax.Array]:
        state = self.env.init(key)
        return state, self._observe(state), self._turn(state)

    def step(
        self, key: chex.PRNGKey, state: ArrayTree, action: dict[str, jax.Array]
    ) -> MultiAgentStep:
        chosen = action[_GROUP][state.current_player]
        next_state = self.env.step(state, chosen, key)
        none = jnp.zeros((len(self.agents),), bool)
        return MultiAgentStep(
            state=next_state,
            obs=self._observe(next_state),
            acting=self._turn(next_state),
            reward=jnp.asarray(next_state.rewards, jnp.float32),
            terminated=none,
            truncated=none,
            episode_terminated=next_state.terminated,
            episode_truncated=next_state.truncated,
            info={"illegal_action": ~state.legal_action_mask[chosen]},
        )

    def _observe(self, state: ArrayTree) -> dict[str, ArrayTree]:
        """What the player who acts next sees, to everyone."""
        obs = {
            "observation": state.observation,
            "action_mask": state.legal_action_mask,
        }
        repeat = lambda x: jnp.broadcast_to(x, (len(self.agents), *x.shape))  # noqa: E731
        return {_GROUP: jax.tree.map(repeat, obs)}

    def _turn(self, state: ArrayTree) -> jax.Array:
        return jnp.arange(len(self.agents)) == state.current_player


def _bounds(dtype: jax.typing.DTypeLike) -> tuple[float, float]:
    """The least and the greatest number of a dtype: pgx declares no others."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return 0, 1
    if jnp.issubdtype(dtype, jnp.integer):
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return -np.inf, np.inf
