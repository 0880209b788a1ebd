"""Spaces of Gymnasium become ours, and our actions become Gymnasium's."""

import functools

import gymnasium.spaces as gym_spaces
import jax
import numpy as np
import pytest
from cases import quick_jit

from rollout.envs.host.arrays import batched_action, split_action
from rollout.envs.spaces import as_space

EVERY = {
    "float64": gym_spaces.Box(-1.0, 2.0, (3,), np.float64),
    "float32": gym_spaces.Box(np.float32([0, -np.inf]), np.float32([1, np.inf])),
    "pixels": gym_spaces.Box(0, 255, (4, 4, 1), np.uint8),
    "int64": gym_spaces.Box(-(2**40), 2**40, (2,), np.int64),
    "number": gym_spaces.Box(0.0, 1.0, ()),
    "discrete": gym_spaces.Discrete(3, start=-1),
    "multi": gym_spaces.MultiDiscrete([2, 5], start=[1, -2]),
    "binary": gym_spaces.MultiBinary([2, 3]),
    "tree": gym_spaces.Dict(
        {
            "a": gym_spaces.Discrete(2),
            "b": gym_spaces.Tuple(
                [gym_spaces.Box(0.0, 1.0, (2,)), gym_spaces.Discrete(4)]
            ),
        }
    ),
}
DTYPES = {
    "float64": "float32",
    "float32": "float32",
    "pixels": "uint8",
    "int64": "int32",
    "number": "float32",
    "discrete": "int32",
    "multi": "int32",
    "binary": "int8",
}


@functools.cache
def drawn():
    """Twenty elements of each space of ours, and whether it contains them."""

    @quick_jit
    def draw(keys):
        found = {}
        for name, space in EVERY.items():
            actions = jax.vmap(as_space(space).sample)(keys)
            found[name] = actions, jax.vmap(as_space(space).contains)(actions)
        return found

    with jax.debug_key_reuse(False):  # the same keys for all
        return jax.device_get(draw(jax.random.split(jax.random.key(0), 20)))


@pytest.mark.parametrize("name", DTYPES)
def test_space_has_the_shape_and_a_dtype_of_at_most_32_bits(name):
    ours = as_space(EVERY[name])
    assert ours.shape == EVERY[name].shape
    assert ours.dtype == DTYPES[name]


def test_bounds_are_those_of_gymnasium():
    for name, low, high in (
        ("float32", [0, -np.inf], [1, np.inf]),
        ("discrete", -1, 1),
        ("multi", [1, -2], [2, 2]),
        ("binary", 0, 1),
    ):
        space = as_space(EVERY[name])
        np.testing.assert_array_equal(space.low, low)
        np.testing.assert_array_equal(space.high, high)


def test_bounds_beyond_32_bits_are_the_widest_there_are():
    box = as_space(EVERY["int64"])
    np.testing.assert_array_equal(box.low, [-(2**31)] * 2)
    np.testing.assert_array_equal(box.high, [2**31 - 1] * 2)
    wide = as_space(gym_spaces.Box(-1e300, 1e300, (1,), np.float64))
    assert wide.high == np.inf


@pytest.mark.parametrize("name", sorted({*EVERY} - {"float32"}))
def test_actions_are_elements_of_gymnasiums_space_alone_and_in_a_batch(name):
    space, (actions, contained) = EVERY[name], drawn()[name]
    assert contained.all()
    split, batch = split_action(space)(actions), batched_action(space)(actions)
    assert len(split) == 20
    for action in split:
        assert space.contains(action), action
    if name == "tree":
        assert set(batch) == {"a", "b"}
        assert batch["b"][0].shape == (20, 2)
        assert batch["a"].dtype == batch["b"][1].dtype == np.int64
    else:
        assert batch.dtype == space.dtype
        assert batch.shape == (20, *space.shape)


def test_actions_are_copies_that_an_environment_may_write_to():
    given = np.zeros((2, 1), np.float32)
    split = split_action(gym_spaces.Box(-1.0, 1.0, (1,)))(given)
    split[0][0] = 1.0
    assert not given.any()
