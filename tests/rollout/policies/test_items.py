"""Tests of policies that choose among items with masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit

import rollout
from rollout.envs import Discrete


def make_obs(*mask):
    return {"action_mask": np.array(mask, bool)}


def apply(policy, params, obs, seed=0):
    """Applies a stateless policy in one program."""
    decide = quick_jit(lambda *args: policy.apply(args[0], args[1], (), args[2]))
    return jax.device_get(decide(params, obs, jax.random.key(seed)))


def scores(params, obs):
    return jnp.broadcast_to(params, obs["action_mask"].shape)


def test_invalid_items_lose_against_negative_scores():
    policy = rollout.recommendation.item_policy(scores, start=4)
    params = np.float32([-1.0, -2.0, -3.0])
    decision = apply(policy, params, make_obs([0, 1, 1], [1, 1, 1], [0, 0, 1]))
    assert decision.action.tolist() == [5, 4, 6]
    assert not decision.extras["no_valid_action"].any()


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("worst", [-jnp.inf, float(np.finfo(np.float32).min), 0.0])
def test_only_valid_item_is_chosen_for_any_score(sample, worst):
    policy = rollout.recommendation.item_policy(scores, sample=sample)
    decision = apply(policy, np.float32([5.0, worst, 7.0]), make_obs([0, 1, 0]))
    assert decision.action.tolist() == [1]
    assert decision.extras["log_prob"].tolist() == [0.0]


def test_softmax_samples_valid_items_by_probability():
    policy = rollout.recommendation.item_policy(scores, sample=True)
    params = np.log(np.arange(1, 5, dtype=np.float32))
    obs = {"action_mask": np.broadcast_to([True, False, True, True], (8_000, 4))}
    decision = apply(policy, params, obs)
    shares = np.bincount(decision.action, minlength=4) / 8_000
    expected = np.array([1, 0, 3, 4]) / 8
    np.testing.assert_allclose(shares, expected, atol=0.025)
    chosen = expected[np.asarray(decision.action)]
    np.testing.assert_allclose(np.exp(decision.extras["log_prob"]), chosen, rtol=1e-5)
    greedy = apply(rollout.policies.Greedy(policy), params, obs)
    assert (greedy.action == 3).all()


@pytest.mark.parametrize("sample", [False, True])
def test_empty_mask_sets_no_valid_action(sample):
    policy = rollout.recommendation.item_policy(scores, sample=sample)
    obs = make_obs([0, 0, 0], [1, 0, 0])
    decision = apply(policy, np.float32([-1.0, -2.0, -3.0]), obs)
    assert decision.extras["no_valid_action"].tolist() == [True, False]
    assert decision.action[1] == 0
    assert 0 <= decision.action[0] < 3
    assert np.isfinite(decision.extras["log_prob"]).all()


def test_continuous_action_is_the_nearest_valid_item():
    rng = np.random.default_rng(0)
    items = rng.normal(size=(30, 4)).astype(np.float32)
    points = rng.normal(size=(100, 4)).astype(np.float32)
    mask = rng.random((100, 30)) < 0.5
    policy = rollout.recommendation.item_policy(lambda params, obs: params, items=items)
    decision = apply(policy, points, {"action_mask": mask})
    distance = np.linalg.norm(points[:, None] - items[None], axis=-1)
    expected = np.where(mask, distance, np.inf).argmin(axis=1)
    np.testing.assert_array_equal(decision.action, expected)
    np.testing.assert_array_equal(decision.extras["point"], points)


def test_mask_is_read_from_wrapped_observations():
    policy = rollout.recommendation.item_policy(lambda params, obs: params[None])
    obs = {"obs": {"obs": make_obs([0, 1])}, "length": np.zeros(1)}
    assert apply(policy, np.float32([2.0, 1.0]), obs).action.tolist() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.002])
def test_random_items_of_a_large_catalog_are_uniform(share):
    num_lanes, num_items = 4_000, 1_000
    mask = np.random.default_rng(0).random(num_items) < share
    assert mask.sum() >= 2
    policy = rollout.random_policy(
        Discrete(num_items), action_mask_fn=lambda obs: obs["action_mask"]
    )
    obs = {"action_mask": jnp.broadcast_to(jnp.asarray(mask), (num_lanes, num_items))}
    act = jax.jit(lambda obs, key: policy.apply(None, obs, (), key).action)
    actions = np.concatenate(
        [act(obs, key) for key in jax.random.split(jax.random.key(0), 5)]
    )
    assert mask[actions].all()
    expected = actions.size / mask.sum()
    counts = np.bincount(actions, minlength=num_items)[mask]
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected) + 1
    first_lanes = jax.tree.map(lambda x: x[:7], obs)
    key = jax.random.key(1)
    assert (
        act(first_lanes, jax.random.clone(key)).tolist() == act(obs, key)[:7].tolist()
    )
