"""The pgx adapters: games of several players, and a single seat of a game."""

import functools

import jax
import jax.numpy as jnp
import pgx
import pytest
from cases import quick_jit
from plain_suites import first_valid_action
from suite_checks import collect

from rollout import envs

KEY = jax.random.key(3)


make_game = functools.cache(pgx.make)


def test_illegal_action_ends_the_game(key_reuse):
    env = envs.suites.from_pgx(make_game("tic_tac_toe"))
    step = quick_jit(env.step)
    state, _, _ = quick_jit(env.reset)(KEY)
    for is_illegal in (False, True):
        player = state.current_player
        result = step(KEY, state, {"players": jnp.full(2, 4, jnp.int32)})
        assert result.info["illegal_action"] == is_illegal
        assert result.episode_terminated == is_illegal
        assert result.reward[player] == -is_illegal
        state = result.state


def test_spaces_of_connect_four():
    env = envs.suites.from_pgx(pgx.make("connect_four"))
    assert env.agents == ("player_0", "player_1")
    assert env.groups == {"players": env.agents}
    assert env.action_spaces == {"players": envs.Discrete(7)}
    spaces = env.observation_spaces["players"].spaces
    assert spaces["observation"].shape == (6, 7, 2)
    assert spaces["action_mask"].shape == (7,)
    assert spaces["observation"].dtype == bool


def test_single_player_game_has_one_agent(key_reuse):
    env = envs.suites.from_pgx(pgx.make("2048"))
    assert env.agents == ("player_0",)
    lanes = envs.vectorize(env, 3)
    rows = jax.eval_shape(lambda: collect(lanes, num_steps=2))
    assert rows.info.agents.reward.shape == (2, 3, 1)
    assert rows.next_obs["players"]["action_mask"].shape == (2, 3, 1, 4)


@pytest.mark.slow
def test_opponent_parameters_differ_between_lanes(key_reuse):
    game = make_game("tic_tac_toe")
    params = jnp.arange(3, dtype=jnp.int32)
    make_envs = jax.vmap(
        lambda number: envs.suites.from_pgx_seat(game, first_valid_action, number)
    )
    vector = envs.vectorize_each(make_envs(params))
    keys = jax.random.split(jax.random.key(2), 3)
    state, _ = quick_jit(vector.reset)(keys)
    step = quick_jit(vector.step)(keys, state, jnp.full((3,), 8, jnp.int32))
    board = jax.device_get(step.obs["observation"])[..., 1].reshape(3, 9)
    board_before_step = jax.device_get(
        state._x.board if hasattr(state, "_x") else state._board
    )
    for lane in range(3):
        free_cells = [x for x in range(9) if board_before_step[lane, x] < 0 and x != 8]
        opponent_action = min(free_cells, key=lambda x: (x - lane) % 9)
        assert board[lane, opponent_action]


def test_seats_share_structure_for_all_opponent_parameters():
    game = make_game("tic_tac_toe")
    first_seat, second_seat = (
        envs.suites.from_pgx_seat(game, first_valid_action, x) for x in (1, 2)
    )
    assert jax.tree.structure(first_seat) == jax.tree.structure(second_seat)
    assert jax.tree.leaves(first_seat) == [1]
