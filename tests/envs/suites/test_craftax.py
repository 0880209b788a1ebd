"""Adapting Craftax and Craftax-Classic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from suite_checks import (
    check_contract,
    check_is_as_in_plain_loop,
    check_is_drawn,
    collect,
)

from rollout import envs

pytest.importorskip("craftax")
pytestmark = [
    pytest.mark.slow,
    # The suite reuses keys, and promotes ranks.
    pytest.mark.usefixtures("key_reuse", "rank_promotion"),
]

CLASSIC = "Craftax-Classic-Symbolic-v1"
LIMIT = 60


@functools.cache
def classic():
    return envs.make(f"craftax:{CLASSIC}", max_timesteps=LIMIT)


def plain(env, params):
    """How an episode begins and goes on by Craftax's own functions."""

    @quick_jit
    def advance(key, state, action):
        obs, state, reward, done, info = env.step_env(key, state, action, params)
        is_late = state.timestep >= params.max_timesteps
        row, column = state.player_position
        is_dead = (state.player_health <= 0) | (state.map[row, column] == LAVA)
        return state, obs, reward, is_dead, done & is_late & ~is_dead, info

    @quick_jit
    def begin(key):
        obs, state = env.reset_env(key, params)
        return state, obs

    return begin, advance


LAVA = 14  # `BlockType.LAVA`


def test_rows_are_those_of_a_plain_loop():
    env = classic()
    trajectory = collect(env)
    # Another program rounds light and rewards otherwise.
    loop = plain(env.env, env.env_params)
    check_is_as_in_plain_loop(trajectory, *loop, rtol=1e-5)
    assert trajectory.truncated.sum() >= 12


def test_death_is_a_termination_also_at_the_limit():
    env = classic()
    state, _ = quick_jit(env.reset)(jax.random.key(0))
    step = quick_jit(env.step)
    for health, time, ending in (
        (9, 3, (False, False)),
        (-9, 3, (True, False)),
        (9, LIMIT - 1, (False, True)),
        (-9, LIMIT - 1, (True, False)),
    ):
        before = state.replace(
            player_health=jnp.full_like(state.player_health, health),
            timestep=jnp.full_like(state.timestep, time),
        )
        result = step(jax.random.key(1), before, jnp.int32(0))
        assert (bool(result.terminated), bool(result.truncated)) == ending


def test_parameters_are_leaves():
    leaves = jax.tree.leaves(classic())
    assert LIMIT in leaves
    limits = jnp.array([5, 7])
    each = jax.vmap(
        lambda limit: envs.suites.from_craftax(
            classic().env, classic().env_params.replace(max_timesteps=limit)
        )
    )(limits)
    assert jax.tree.structure(each) == jax.tree.structure(classic())


def test_large_game_keeps_the_contract():
    env = envs.make("craftax:Craftax-Symbolic-v1")
    check_contract(env)
    assert env.action_space == envs.Discrete(43)
    assert np.prod(env.observation_space.shape) == 8268


def test_states_are_drawn():
    check_is_drawn(classic())


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match=r"`env` must have reset_env, .* got object"):
        envs.suites.from_craftax(object())
    with pytest.raises(ValueError, match=r"with max_time=3 fails"):
        envs.make(f"craftax:{CLASSIC}", max_time=3)
