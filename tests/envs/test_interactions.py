"""The mask of a recommendation environment is what is known of the user."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs


def test_item_outside_of_the_mask_may_be_recommended():
    known = np.array([[True, False]])
    env = envs.RecommendationEnv(np.array([[1.0, 2.0]]), known=known)
    state, obs = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs["mask"], known[0])
    result = env.step(jax.random.key(1), state, jnp.int32(1))
    assert result.reward == 2.0
    assert not result.terminated


def test_items_are_shown_once_and_only_those_that_are_known():
    known = np.array([[True, False, True]])
    env = envs.NoRepeat(envs.RecommendationEnv(np.ones((1, 3)), known=known))
    state, obs = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs["mask"], [True, False, True])
    result = env.step(jax.random.key(1), state, jnp.int32(0))
    np.testing.assert_array_equal(result.obs["mask"], [False, False, True])


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (np.ones((2, 4), bool), r"`known` must have the shape \(2, 3\) .* \(2, 4\)"),
        (np.ones((2, 3)), r"`known` must be \[U, I\] bool, got float64"),
        (np.ones(3, bool), r"`known` must be \[U, I\] bool, got bool of shape \(3,\)"),
    ],
)
def test_mask_must_be_of_these_users_and_items(known, message):
    with pytest.raises(ValueError, match=message):
        envs.RecommendationEnv(np.ones((2, 3)), known=known)
    with pytest.raises(ValueError, match=message):
        envs.RecommendationEnv(
            lambda user, item: jnp.float32(0), num_users=2, num_items=3, known=known
        )
