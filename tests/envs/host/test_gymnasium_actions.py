"""Conversion of Gymnasium spaces, and of actions to Gymnasium's format."""

import functools

import gymnasium.spaces as gym_spaces
import jax
import numpy as np
import pytest
from cases import quick_jit

from rollout.envs.host.arrays import batched_action, split_action
from rollout.envs.spaces import as_space

SPACES = {
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
def sample_spaces():
    """Returns 20 samples of every converted space and the results of `contains`."""

    @quick_jit
    def run(keys):
        results = {}
        for name, space in SPACES.items():
            actions = jax.vmap(as_space(space).sample)(keys)
            results[name] = actions, jax.vmap(as_space(space).contains)(actions)
        return results

    with jax.debug_key_reuse(False):  # all spaces use the same keys
        return jax.device_get(run(jax.random.split(jax.random.key(0), 20)))


@pytest.mark.parametrize("name", DTYPES)
def test_converted_space_has_32_bit_dtype(name):
    space = as_space(SPACES[name])
    assert space.shape == SPACES[name].shape
    assert space.dtype == DTYPES[name]


def test_bounds_are_converted():
    for name, low, high in (
        ("float32", [0, -np.inf], [1, np.inf]),
        ("discrete", -1, 1),
        ("multi", [1, -2], [2, 2]),
        ("binary", 0, 1),
    ):
        space = as_space(SPACES[name])
        np.testing.assert_array_equal(space.low, low)
        np.testing.assert_array_equal(space.high, high)


def test_bounds_beyond_32_bits_are_clipped():
    box = as_space(SPACES["int64"])
    np.testing.assert_array_equal(box.low, [-(2**31)] * 2)
    np.testing.assert_array_equal(box.high, [2**31 - 1] * 2)
    wide = as_space(gym_spaces.Box(-1e300, 1e300, (1,), np.float64))
    assert wide.high == np.inf


@pytest.mark.parametrize("name", sorted({*SPACES} - {"float32"}))
def test_actions_are_elements_of_gymnasium_space(name):
    space, (actions, contained) = SPACES[name], sample_spaces()[name]
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


def test_split_actions_are_copies():
    batch = np.zeros((2, 1), np.float32)
    split = split_action(gym_spaces.Box(-1.0, 1.0, (1,)))(batch)
    split[0][0] = 1.0
    assert not batch.any()
