"""`from_pgx`: adapts a game to `MultiAgentEnv`; `from_pgx_seat`: one seat to `Env`.

The players act in turn. A pgx state contains only the observation and the legal actions
of the current player. The adapters do not use pgx's auto-reset.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout.base.checks import import_optional
from rollout.envs.multi_agent import MultiAgentEnv, MultiAgentStep
from rollout.envs.spaces import Discrete, space_of
from rollout.envs.suites.convert import check_methods
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep

_GROUP = "players"
_SEAT = 0

OpponentFn = Callable[[ArrayTree, dict[str, jax.Array], chex.PRNGKey], jax.Array]


def from_pgx(env: Any) -> MultiAgentEnv:
    """Adapts a pgx game to `MultiAgentEnv`.

    The agents are "player_0", "player_1", ..., in a single group "players". All agents
    receive the observation of the player who acts next, `{"observation": ...,
    "action_mask": [n] bool}`. In the final state, pgx still defines a current player,
    and `acting` is True for this player. Most games sample the first player. An illegal
    action ends the game with pgx's penalty and sets `info["illegal_action"]`, `()`
    bool.

    Args:
        env: result of `pgx.make`, or another `pgx.Env`.

    Returns:
        A `MultiAgentEnv` with the state of `env`.

    Raises:
        TypeError: if `env` lacks the methods of a `pgx.Env`.
    """
    return _PgxEnv(env=env, **_describe(env))


def from_pgx_seat(
    env: Any, opponent: OpponentFn | None = None, opponent_params: ArrayTree = None
) -> Env:
    """Adapts one player's seat in a pgx game to `Env`, with opponents inside the step.

    The agent is pgx's player 0. Most games sample the first player. The opponents act
    within a step, and the reward of the step is the agent's sum of rewards until its
    next turn or the end of the game. The observation is always the agent's view,
    `{"observation": ..., "action_mask": [n] bool}`, also in the final state. An illegal
    action ends the game with pgx's penalty and sets `info["illegal_action"]`, `()`
    bool.

    Args:
        env: result of `pgx.make`, or another `pgx.Env`.
        opponent: function `(params, obs, key) -> action` that selects the action of the
            current opponent in a single game. `obs` is the observation of this
            opponent. The default samples legal actions uniformly.
        opponent_params: parameters of `opponent`. They are the leaves of the `Env`, so
            `vectorize_each` can assign a different opponent to every lane (a league).

    Returns:
        An `Env` with the state of `env`.

    Raises:
        TypeError: if `env` lacks the methods of a `pgx.Env`.
    """
    return _PgxSeat(
        opponent_params=opponent_params,
        env=env,
        opponent=opponent or _sample_uniformly,
        **_describe(env),
    )


def ids() -> tuple[str, ...]:
    """Lists the ids of pgx."""
    return tuple(import_optional("pgx").available_envs())


def make(name: str, **options: Any) -> Env | MultiAgentEnv:
    """Creates a game by id, as a `MultiAgentEnv` for all players.

    The result is an `Env` if `options` of `from_pgx_seat` are set or if the game has
    one player.
    """
    game = import_optional("pgx").make(name)
    is_seat = options or game.num_players == 1
    return from_pgx_seat(game, **options) if is_seat else from_pgx(game)


class _Pgx(struct.PyTreeNode, kw_only=True):
    """Common base of both adapters: a pgx game and the spaces of one player."""

    env: Any = struct.field(pytree_node=False)
    observation_space: AnySpace = struct.field(pytree_node=False)
    action_space: Discrete = struct.field(pytree_node=False)


class _PgxEnv(_Pgx, kw_only=True):
    """A `MultiAgentEnv` over a pgx game, without parameters."""

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
        player_action = action[_GROUP][state.current_player]
        next_state = self.env.step(state, player_action, key)
        no_agent = jnp.zeros((len(self.agents),), bool)
        return MultiAgentStep(
            state=next_state,
            obs=self._observe(next_state),
            acting=self._turn(next_state),
            reward=jnp.asarray(next_state.rewards, jnp.float32),
            terminated=no_agent,
            truncated=no_agent,
            episode_terminated=next_state.terminated,
            episode_truncated=next_state.truncated,
            info={"illegal_action": ~state.legal_action_mask[player_action]},
        )

    def _observe(self, state: ArrayTree) -> dict[str, ArrayTree]:
        """Repeats the observation of the current player for all players."""
        # A state contains no other observations, and all other players do not act.
        repeat = lambda x: jnp.broadcast_to(x, (len(self.agents), *x.shape))  # noqa: E731
        return {_GROUP: jax.tree.map(repeat, _with_mask(state, state.observation))}

    def _turn(self, state: ArrayTree) -> jax.Array:
        return jnp.arange(len(self.agents)) == state.current_player


class _PgxSeat(_Pgx, kw_only=True):
    """An `Env` over one seat; the leaves are the parameters of the opponents."""

    opponent_params: ArrayTree
    opponent: OpponentFn = struct.field(pytree_node=False)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, dict[str, jax.Array]]:
        init_key, reply_key = jax.random.split(key)
        state, _ = self._until_turn(self.env.init(init_key), reply_key)
        return state, self._observe(state)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: jax.Array) -> EnvStep:
        step_key, reply_key = jax.random.split(key)
        # Opponents reply within this step: the successor is the agent's next turn.
        reply_state = self.env.step(state, action, step_key)
        next_state, reward = self._until_turn(reply_state, reply_key)
        return EnvStep(
            state=next_state,
            obs=self._observe(next_state),
            reward=reply_state.rewards[_SEAT].astype(jnp.float32) + reward,
            terminated=next_state.terminated,
            truncated=next_state.truncated,
            info={"illegal_action": ~state.legal_action_mask[action]},
        )

    def _until_turn(
        self, state: ArrayTree, key: chex.PRNGKey
    ) -> tuple[ArrayTree, jax.Array]:
        """Steps the opponents until the agent's turn or the end of the game."""
        if self.env.num_players == 1:
            return state, jnp.float32(0.0)

        def is_reply(carry: tuple) -> jax.Array:
            state, _, _ = carry
            done = state.terminated | state.truncated
            return ~done & (state.current_player != _SEAT)

        def reply(carry: tuple) -> tuple:
            state, number, reward = carry
            # Fold in the number of the reply, because the number of replies varies.
            action_key, step_key = jax.random.split(jax.random.fold_in(key, number))
            obs = _with_mask(state, state.observation)
            action = self.opponent(self.opponent_params, obs, action_key)
            state = self.env.step(state, action, step_key)
            return state, number + 1, reward + state.rewards[_SEAT].astype(jnp.float32)

        start = state, jnp.int32(0), jnp.float32(0.0)
        state, _, reward = jax.lax.while_loop(is_reply, reply, start)
        return state, reward

    def _observe(self, state: ArrayTree) -> dict[str, jax.Array]:
        # Do not use `state.observation`: in a final state it may be an opponent's view.
        return _with_mask(state, self.env._observe(state, jnp.int32(_SEAT)))


def _describe(env: Any) -> dict[str, Any]:
    """Returns the spaces of a game as keyword arguments of an adapter."""
    check_methods(env, "pgx", ("init", "step", "num_players"))
    # Trace `init` once: the properties `env.num_actions` and `env.observation_shape`
    # each compute a full state.
    state = jax.eval_shape(env.init, jax.eval_shape(jax.random.key, 0))
    return {
        "observation_space": space_of(_with_mask(state, state.observation)),
        "action_space": Discrete(state.legal_action_mask.shape[0]),
    }


def _with_mask(state: ArrayTree, observation: jax.Array) -> dict[str, jax.Array]:
    return {"observation": observation, "action_mask": state.legal_action_mask}


def _sample_uniformly(
    params: ArrayTree, obs: dict[str, jax.Array], key: chex.PRNGKey
) -> jax.Array:
    del params  # unused
    # Logits are log(mask): 0 for legal and -inf for illegal actions.
    return jax.random.categorical(key, jnp.log(obs["action_mask"])).astype(jnp.int32)
