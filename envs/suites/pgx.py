"""`from_pgx`: adapts a game to `MultiAgentEnv`; `from_pgx_seat`: one seat to `Env`.

The players act one after the other. A pgx state holds the observation and the allowed
actions of the player whose turn it is, and of no other. pgx's auto-reset is never used.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout.envs.multi_agent import MultiAgentEnv, MultiAgentStep
from rollout.envs.optional_import import load
from rollout.envs.spaces import Discrete, space_of
from rollout.envs.suites.convert import check_methods
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep

_GROUP = "players"
_SEAT = 0

OpponentFn = Callable[[ArrayTree, dict[str, jax.Array], chex.PRNGKey], jax.Array]


def from_pgx(env: Any) -> MultiAgentEnv:
    """Makes a `MultiAgentEnv` of a game of pgx.

    The agents are "player_0", "player_1", ..., in one group, "players". All have the
    observation of the player who acts next, `{"observation": ..., "action_mask": [n]
    bool}`; at the end of a game nobody acts, but pgx still names a player, and so does
    `acting`. Most games draw who begins. An action that is not allowed ends the game,
    with pgx's penalty, and sets `info["illegal_action"]`, `()` bool.

    Args:
        env: the result of `pgx.make`, or another `pgx.Env`.

    Returns:
        A `MultiAgentEnv` whose state is pgx's own.

    Raises:
        TypeError: if `env` lacks the methods of a `pgx.Env`.
    """
    return _PgxEnv(env=env, **_describe(env))


def from_pgx_seat(
    env: Any, opponent: OpponentFn | None = None, opponent_params: ArrayTree = None
) -> Env:
    """Makes an `Env` of one player's seat in a game of pgx.

    The player is pgx's number 0; most games draw who begins. The others answer within a
    step, so the reward of a step is the sum until it is that player's turn again, or
    the game ends. The observation is `{"observation": ..., "action_mask": [n] bool}`,
    always the player's own, also at the end. An action that is not allowed ends the
    game, with pgx's penalty, and sets `info["illegal_action"]`, `()` bool.

    Args:
        env: the result of `pgx.make`, or another `pgx.Env`.
        opponent: `(params, obs, key) -> action`, chooses for the others, in one game:
            `obs` is the observation of the player whose turn it is. By default it draws
            an allowed action evenly.
        opponent_params: the parameters of `opponent`. They are the leaves of the `Env`,
            so `vectorize_each` makes a league, with another opponent in every lane.

    Returns:
        An `Env` whose state is pgx's own.

    Raises:
        TypeError: if `env` lacks the methods of a `pgx.Env`.
    """
    return _PgxSeat(
        opponent_params=opponent_params,
        env=env,
        opponent=opponent or _play_evenly,
        **_describe(env),
    )


def ids() -> tuple[str, ...]:
    """Lists the ids of pgx."""
    return tuple(load("pgx").available_envs())


def make(name: str, **options: Any) -> Env | MultiAgentEnv:
    """Makes a game for all of its players, or with options of `from_pgx_seat` for one.

    A game of one player is an `Env`, too.
    """
    game = load("pgx").make(name)
    is_seat = options or game.num_players == 1
    return from_pgx_seat(game, **options) if is_seat else from_pgx(game)


class _Pgx(struct.PyTreeNode, kw_only=True):
    """The shared part of both adapters: a game of pgx and its observations."""

    env: Any = struct.field(pytree_node=False)
    observation_space: AnySpace = struct.field(pytree_node=False)  # of one player
    action_space: Discrete = struct.field(pytree_node=False)


class _PgxEnv(_Pgx, kw_only=True):
    """A `MultiAgentEnv` over a game of pgx; it has no parameters."""

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(f"player_{number}" for number in range(self.env.num_players))

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return {_GROUP: self.agents}

    @property
    def observation_spaces(self) -> dict[str, AnySpace]:
        return {_GROUP: self.observation_space}

    @property
    def action_spaces(self) -> dict[str, AnySpace]:
        return {_GROUP: self.action_space}

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
        """Repeats the observation of the player who acts next for all players."""
        # Only the observation of the player in turn is known; the others do not act.
        repeat = lambda x: jnp.broadcast_to(x, (len(self.agents), *x.shape))  # noqa: E731
        return {_GROUP: jax.tree.map(repeat, _seen(state, state.observation))}

    def _turn(self, state: ArrayTree) -> jax.Array:
        return jnp.arange(len(self.agents)) == state.current_player


class _PgxSeat(_Pgx, kw_only=True):
    """An `Env` of one seat; the leaves are the parameters of the opponents."""

    opponent_params: ArrayTree
    opponent: OpponentFn = struct.field(pytree_node=False)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, dict[str, jax.Array]]:
        init_key, reply_key = jax.random.split(key)
        state, _ = self._until_turn(self.env.init(init_key), reply_key)
        return state, self._observe(state)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: jax.Array) -> EnvStep:
        step_key, reply_key = jax.random.split(key)
        # The others reply within this step: its successor is the seat's next turn.
        moved = self.env.step(state, action, step_key)
        next_state, reward = self._until_turn(moved, reply_key)
        return EnvStep(
            state=next_state,
            obs=self._observe(next_state),
            reward=moved.rewards[_SEAT].astype(jnp.float32) + reward,
            terminated=next_state.terminated,
            truncated=next_state.truncated,
            info={"illegal_action": ~state.legal_action_mask[action]},
        )

    def _until_turn(
        self, state: ArrayTree, key: chex.PRNGKey
    ) -> tuple[ArrayTree, jax.Array]:
        """Lets the others play until it is the player's turn, or the game ends."""
        if self.env.num_players == 1:
            return state, jnp.float32(0.0)

        def goes_on(carry: tuple) -> jax.Array:
            state, _, _ = carry
            done = state.terminated | state.truncated
            return ~done & (state.current_player != _SEAT)

        def reply(carry: tuple) -> tuple:
            state, number, reward = carry
            # A key for each reply, however many there are.
            action_key, step_key = jax.random.split(jax.random.fold_in(key, number))
            obs = _seen(state, state.observation)
            action = self.opponent(self.opponent_params, obs, action_key)
            state = self.env.step(state, action, step_key)
            return state, number + 1, reward + state.rewards[_SEAT].astype(jnp.float32)

        start = state, jnp.int32(0), jnp.float32(0.0)
        state, _, reward = jax.lax.while_loop(goes_on, reply, start)
        return state, reward

    def _observe(self, state: ArrayTree) -> dict[str, jax.Array]:
        # Not `state.observation`: at the end of a game it is that of the next player in
        # turn, and the true successor must be this seat's.
        return _seen(state, self.env._observe(state, jnp.int32(_SEAT)))


def _describe(env: Any) -> dict[str, Any]:
    """Returns the spaces of a game, as fields of an adapter."""
    check_methods(env, "pgx", ("init", "step", "num_players"))
    # Not `env.num_actions` and `env.observation_shape`: each computes a whole state.
    state = jax.eval_shape(env.init, jax.eval_shape(jax.random.key, 0))
    return {
        "observation_space": space_of(_seen(state, state.observation)),
        "action_space": Discrete(state.legal_action_mask.shape[0]),
    }


def _seen(state: ArrayTree, observation: jax.Array) -> dict[str, jax.Array]:
    return {"observation": observation, "action_mask": state.legal_action_mask}


def _play_evenly(
    params: ArrayTree, obs: dict[str, jax.Array], key: chex.PRNGKey
) -> jax.Array:
    del params  # unused
    # The logarithm of a flag: 0 of an allowed action, minus infinity of others.
    return jax.random.categorical(key, jnp.log(obs["action_mask"])).astype(jnp.int32)
