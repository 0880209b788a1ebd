"""Tests of `random_policy` for every kind of space."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollout
from rollout import envs


def even_mask(obs):
    return jnp.broadcast_to(jnp.arange(6) % 2 == 0, (obs.shape[0], 6))


def full_mask(obs):
    return jnp.ones((obs.shape[0], 7), bool)


class Pair(envs.spaces.Space):
    """A space with two parts and without shape and dtype."""

    def sample(self, key):
        return {"a": jax.random.bits(key), "b": jax.random.uniform(key, (2,))}


BOX = envs.Box(jnp.array([-1.0, 0.0]), jnp.array([1.0, 5.0]), (2,))
POLICIES = {
    **{n: rollout.random_policy(envs.Discrete(n)) for n in (2, 3, 7, 1000, 1 << 20)},
    "box": rollout.random_policy(BOX),
    "pair": rollout.random_policy(Pair()),
    "even mask": rollout.random_policy(envs.Discrete(6), action_mask_fn=even_mask),
    "full mask": rollout.random_policy(envs.Discrete(7), action_mask_fn=full_mask),
}


@functools.cache
def sample_policies(num_envs):
    """Applies every policy in one program."""

    @jax.jit
    def run(obs, key):
        return [policy.apply(None, obs, (), key) for policy in POLICIES.values()]

    assert all(policy.init(num_envs) == () for policy in POLICIES.values())
    with jax.debug_key_reuse(False):  # `Pair` samples two parts with one key
        steps = run(np.zeros((num_envs, 1), np.float32), jax.random.key(0))
    return dict(zip(POLICIES, jax.tree.map(np.asarray, steps), strict=True))


@pytest.mark.parametrize("n", [2, 3, 7, 1000])
def test_discrete_actions_are_uniform(n):
    num_samples = 100_000
    step = sample_policies(num_samples)[n]
    assert step.state == step.extras == ()
    count = np.bincount(step.action, minlength=n)
    assert len(count) == n
    expected = num_samples / n
    chi_squared = ((count - expected) ** 2 / expected).sum()
    # Chi-squared with n - 1 degrees of freedom: mean n - 1, variance 2 (n - 1); five
    # standard deviations and room for the skew at small n.
    assert chi_squared < n - 1 + 5 * np.sqrt(2 * n) + 10


def test_full_mask_changes_no_action():
    step = sample_policies(100_000)["full mask"]
    np.testing.assert_array_equal(step.action, sample_policies(100_000)[7].action)
    assert step.action.dtype == jnp.int32
    assert not step.extras["no_valid_action"].any()


def test_large_discrete_space_is_sampled():
    action = sample_policies(100_000)[1 << 20].action
    assert action.min() >= 0
    assert (1 << 19) < action.max() < (1 << 20)


def test_box_actions_fill_the_box():
    action = sample_policies(100_000)["box"].action
    assert action.shape == (100_000, 2)
    # The mean of 100,000 uniforms of width w has standard error w / sqrt(1,200,000).
    np.testing.assert_allclose(action.mean(axis=0), [0.0, 2.5], atol=5 * 0.0046)
    assert (action.min(axis=0) >= [-1.0, 0.0]).all()
    assert (action.max(axis=0) <= [1.0, 5.0]).all()


@pytest.mark.parametrize("name", [3, "box", "even mask", "pair"])
def test_lane_does_not_depend_on_the_number_of_lanes(name):
    small_batch, large_batch = (
        sample_policies(num)[name].action for num in (7, 100_000)
    )
    jax.tree.map(
        lambda small_batch, large_batch: np.testing.assert_array_equal(
            small_batch, large_batch[:7]
        ),
        small_batch,
        large_batch,
    )


def test_parts_of_a_space_are_sampled_per_lane():
    action = sample_policies(100_000)["pair"].action
    assert action["b"].shape == (100_000, 2)
    assert len(np.unique(action["a"][:50])) == 50
