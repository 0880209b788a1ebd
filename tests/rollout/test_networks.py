"""Tests of the encoder of observations: images, parts and one-hot integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit

from rollout.envs import Box, Discrete
from rollout.envs.spaces import Dict, MultiDiscrete, Tuple
from rollout.envs.wrappers import flatten_obs
from rollout.networks import Encoder, image_axes, is_bytes, join, obs_keys

UINT8 = jnp.dtype("uint8")


def image_space(*shape):
    return Box(0, 255, shape, UINT8)


@pytest.mark.parametrize(
    ("space", "cnn", "axes"),
    [
        (image_space(84, 84, 4), None, (0, 1)),
        (image_space(4, 84, 84), None, (1, 2)),
        (image_space(84, 96), None, (0, 1)),
        (image_space(4, 84, 84, 3), None, (1, 2)),
        (image_space(36, 36, 3), None, (0, 1)),
        (Box(0.0, 1.0, (3, 40, 50)), None, (1, 2)),
        (image_space(35, 84, 4), None, None),
        (image_space(84, 84, 4), False, None),
        (image_space(10, 10, 4), True, (0, 1)),
        (Box(False, True, (10, 10, 4), jnp.dtype(bool)), True, (0, 1)),
        (image_space(2, 2, 3), True, None),
        (Box(-1.0, 1.0, (40, 40)), None, None),  # a matrix
        (Box(-1.0, 1.0, (4,)), True, None),
        (Discrete(5), True, None),
    ],
)
def test_image_axes_depend_on_the_shape(space, cnn, axes):
    assert image_axes(space, cnn) == axes


def test_bytes_are_uint8_from_0_to_255():
    assert is_bytes(image_space(3))
    assert not is_bytes(Box(0, 10, (7, 7, 3), UINT8))
    assert not is_bytes(Box(0, 255, (3,), jnp.dtype("int32")))


def encode(space, obs, **options):
    """Returns features and parameters for seed 0."""
    encoder = Encoder(space, **options)

    @quick_jit
    def run(obs):
        params = encoder.init(jax.random.key(0), obs)
        return encoder.apply(params, obs), params

    return jax.device_get(run(obs))


def test_vectors_are_flattened_without_parameters():
    space = Dict(
        {
            "turn": Discrete(3, start=2),
            "pair": Tuple((Box(-1.0, 1.0, (2, 2)), MultiDiscrete([2, 3]))),
            "action_mask": Box(0, 1, (3,), jnp.dtype("int8")),
        }
    )
    sample = quick_jit(lambda key: jax.vmap(space.sample)(jax.random.split(key, 6)))
    obs = jax.device_get(sample(jax.random.key(0)))
    obs = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), obs)
    features, params = encode(space, obs)
    assert not params
    assert list(features) == ["pair", "turn"]
    expected = quick_jit(lambda obs: flatten_obs(space, obs))(obs)
    np.testing.assert_array_equal(np.concatenate([*features.values()], -1), expected)


def test_bytes_are_scaled_to_1():
    obs = np.uint8([[0, 51, 255]])
    features, _ = encode(image_space(3), obs)
    np.testing.assert_allclose(features["obs"], [[0, 0.2, 1]], rtol=1e-6)
    features, _ = encode(Box(0, 10, (3,), UINT8), np.uint8([[0, 5, 10]]))
    np.testing.assert_array_equal(features["obs"], [[0, 5, 10]])


def test_channel_order_does_not_change_features():
    channels_last = (
        np.random.default_rng(0).integers(0, 256, (2, 3, 40, 36, 4)).astype(np.uint8)
    )
    channels_first = np.moveaxis(channels_last, -1, -3)
    features, params = encode(image_space(40, 36, 4), channels_last)
    expected, expected_params = encode(image_space(4, 40, 36), channels_first)
    assert features["obs"].shape == (2, 3, 512)
    np.testing.assert_array_equal(features["obs"], expected["obs"])
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)
    assert features["obs"].std() > 0.01
    kernel = params["params"]["cnn"]["Conv_0"]["kernel"]
    assert kernel.shape == (8, 8, 4, 32)


def test_frame_stacks_merge_channels():
    stack = (
        np.random.default_rng(0).integers(0, 256, (1, 2, 40, 36, 3)).astype(np.uint8)
    )
    merged = np.concatenate([stack[:, 0], stack[:, 1]], axis=-1)
    features, _ = encode(image_space(2, 40, 36, 3), stack)
    expected, _ = encode(image_space(40, 36, 6), merged)
    np.testing.assert_array_equal(features["obs"], expected["obs"])


def test_missing_and_unselected_parts_are_skipped():
    space = Dict(
        {"a": Box(-1.0, 1.0, (2,)), "b": Discrete(2), "c": image_space(40, 40, 1)}
    )
    obs = {"a": np.zeros((5, 2), np.float32), "b": np.zeros(5, np.int32)}
    features, params = encode(space, obs, keys=("a", "c"))
    assert {key: x.shape for key, x in features.items()} == {"a": (5, 2)}
    assert not params
    with pytest.raises(
        ValueError, match="`obs` must have the parts a, c, got a without"
    ):
        join(features, ("a", "c"))


def test_small_images_are_flattened_by_default():
    obs = np.zeros((2, 10, 10, 4), np.uint8)
    features, params = encode(image_space(10, 10, 4), obs)
    assert features["obs"].shape == (2, 400)
    assert not params
    features, params = encode(image_space(10, 10, 4), obs, cnn=True)
    assert features["obs"].shape == (2, 128)
    assert params["params"]["cnn"]["Conv_0"]["kernel"].shape == (3, 3, 4, 16)


PARTS = Dict({"state": Box(-1.0, 1.0, (2,)), "privileged_state": Box(-1.0, 1.0, (3,))})


@pytest.mark.parametrize("keys", [("other",), (), "other", ("state", "action_mask")])
def test_unknown_keys_raise(keys):
    with pytest.raises(
        ValueError, match=r"`config\.actor_obs` must name parts .*state"
    ):
        obs_keys("actor_obs", keys, PARTS)


def test_keys_of_a_space_without_parts_raise():
    with pytest.raises(ValueError, match=r"`config\.critic_obs` must name parts"):
        obs_keys("critic_obs", ("state",), Box(-1.0, 1.0, (2,)))
    assert obs_keys("critic_obs", None, Box(-1.0, 1.0, (2,))) is None


def test_keys_default_to_all_parts():
    assert obs_keys("actor_obs", None, PARTS, without="privileged_state") == ("state",)
    assert set(obs_keys("critic_obs", None, PARTS)) == {"state", "privileged_state"}
    assert obs_keys("actor_obs", "state", PARTS) == ("state",)
    info = Dict({"action_mask": Box(0, 1, (3,))})  # by `observe_info`
    assert obs_keys("actor_obs", None, Dict({"obs": PARTS, "info": info})) == ("obs",)
