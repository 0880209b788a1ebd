"""Adapting grids of XLand-MiniGrid."""

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

xminigrid = pytest.importorskip("xminigrid")
wrappers = pytest.importorskip("xminigrid.wrappers")
pytestmark = [
    pytest.mark.slow,
    # The suite reuses keys in branches.
    pytest.mark.usefixtures("key_reuse"),
]

RULES = "XLand-MiniGrid-R1-9x9"


@functools.cache
def grid(name="MiniGrid-EmptyRandom-5x5", **options):
    return xminigrid.make(name, **{"max_steps": 20, **options})


def plain(env, params):
    """How an episode begins and goes on by the suite's own functions."""

    @quick_jit
    def advance(key, timestep, action):
        keyed = timestep.replace(state=timestep.state.replace(key=key))
        after = env.step(params, keyed, action)
        last, ends = after.last(), after.discount == 0
        return after, after.observation, after.reward, last & ends, last & ~ends, {}

    @quick_jit
    def begin(key):
        timestep = env.reset(params, key)
        return timestep, timestep.observation

    return begin, advance


@pytest.mark.parametrize("name", ["MiniGrid-EmptyRandom-5x5", "MiniGrid-MemoryS8"])
def test_rows_are_those_of_a_plain_loop(name):
    env, params = grid(name)
    trajectory = collect(envs.suites.from_xminigrid(env, params))
    # The reward is a product of floats, which one program rounds otherwise.
    check_is_as_in_plain_loop(trajectory, *plain(env, params), rtol=1e-6)
    assert trajectory.truncated.sum() > 10
    assert trajectory.terminated.any()


@pytest.mark.parametrize("name", ["MiniGrid-DoorKey-5x5", RULES])
def test_contract_is_kept(name):
    env = envs.make(f"xminigrid:{name}")
    check_contract(env)
    assert env.action_space == envs.Discrete(6)
    assert env.observation_space.shape == (7, 7, 2) if name != RULES else True


def test_rules_vary_from_lane_to_lane():
    env, params = grid(RULES)
    rules = params.ruleset
    stacked = jax.tree.map(lambda x: jnp.stack([x, x + 1]), rules)
    each = jax.vmap(
        lambda x: envs.suites.from_xminigrid(env, params.replace(ruleset=x))
    )
    vector = envs.vectorize_each(each(stacked), 2)
    state, _ = quick_jit(vector.reset)(jax.random.split(jax.random.key(0), 2))
    np.testing.assert_array_equal(state.goal_encoding, stacked.goal)
    np.testing.assert_array_equal(state.rule_encoding, stacked.rules)


def test_observations_of_wrappers_come_through():
    env, params = grid()
    env = envs.suites.from_xminigrid(wrappers.DirectionObservationWrapper(env), params)
    check_contract(env)
    assert set(env.observation_space.spaces) == {"img", "direction"}


def test_states_are_drawn():
    check_is_drawn(envs.suites.from_xminigrid(*grid()))


def test_other_objects_are_refused():
    env, params = grid()
    with pytest.raises(TypeError, match=r"`env` must have reset, .* got object"):
        envs.suites.from_xminigrid(object(), params)
    resetting = wrappers.GymAutoResetWrapper(env)
    with pytest.raises(ValueError, match="must not reset itself"):
        envs.suites.from_xminigrid(resetting, params)
