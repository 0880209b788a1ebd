"""Adapting grids of navix, of both lines."""

import functools

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

navix = pytest.importorskip("navix")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("key_reuse", "rank_promotion"),
]


@functools.cache
def grid(name="Navix-Empty-Random-5x5-v0"):
    return navix.make(name, max_steps=20)


def plain(env):
    """How an episode begins and goes on by navix's own functions.

    Its `step` of a time step that is not the last one resets nothing.
    """

    @quick_jit
    def advance(key, timestep, action):
        keyed = timestep.replace(state=timestep.state.replace(key=key))
        after = env.step(keyed, action)
        ends = after.is_termination(), after.is_truncation()
        return after, after.observation, after.reward, *ends, {}

    @quick_jit
    def begin(key):
        timestep = env.reset(key)
        return timestep, timestep.observation

    return begin, advance


# In the second one obstacles move by chance.
@pytest.mark.parametrize(
    "name", ["Navix-Empty-Random-5x5-v0", "Navix-Dynamic-Obstacles-5x5-v0"]
)
def test_rows_are_those_of_a_plain_loop(name):
    trajectory = collect(envs.suites.from_navix(grid(name)))
    check_is_as_in_plain_loop(trajectory, *plain(grid(name)))
    assert trajectory.terminated.sum() > 3
    assert (trajectory.truncated.sum() > 3) or "Dynamic" in name


@pytest.mark.parametrize("name", ["Navix-Empty-8x8-v0", "Navix-DoorKey-5x5-v0"])
def test_contract_is_kept(name):
    env = envs.make(f"navix:{name}")
    check_contract(env)
    assert env.action_space == envs.Discrete(7)
    space = env.observation_space
    assert (space.shape[-1], space.dtype) == (3, np.uint8)
    assert envs.make(f"navix:{name}") is env  # so it is one program


def test_states_are_drawn():
    check_is_drawn(envs.suites.from_navix(grid()))


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match=r"`env` must have reset, _step, .* got object"):
        envs.suites.from_navix(object())
