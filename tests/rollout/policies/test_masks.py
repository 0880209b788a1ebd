"""Tests of masks for spaces with several entries or parts."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_one_program, on_a_gpu, quick_jit
from scipy import stats

import rollout
from rollout import envs
from rollout.policies import EpsilonGreedy, masks
from rollout.recommendation import item_policy

NUM_LANES = 6_000
LANES = np.zeros((NUM_LANES, 1), np.float32)
KEY = jax.random.key(1)
RNG = np.random.default_rng(0)
JOINT = RNG.random((2, 3, 4)) < 0.4
# A space, its mask in one lane, and whether the mask allows an element.
CASES = {
    "discrete": (
        envs.Discrete(7),
        np.isin(np.arange(7), [1, 4, 5]),
        lambda x: x[0] in (1, 4, 5),
    ),
    "entries": (
        envs.spaces.MultiDiscrete((2, 3)),
        (np.array([True, True]), np.array([True, False, True])),
        lambda x: x[1] != 1,
    ),
    "equal entries": (
        envs.spaces.MultiDiscrete((2, 2)),
        (np.array([False, True]), np.array([True, True])),
        lambda x: x[0] == 1,
    ),
    "joint": (envs.spaces.MultiDiscrete((2, 3, 4)), JOINT, lambda x: JOINT[x]),
    "joint, as many as entries": (
        envs.spaces.MultiDiscrete((2, 2), start=(1, -1)),
        np.array([[True, False], [False, True]]),
        lambda x: x in ((1, -1), (2, 0)),
    ),
    "binary": (
        envs.spaces.MultiBinary((2, 2)),
        np.array([[[1, 1], [1, 0]], [[0, 1], [1, 1]]], bool),
        lambda x: x[1] == 0 and x[2] == 1,
    ),
}


def spread(mask, num_lanes=NUM_LANES):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_lanes, *x.shape)), mask)


def elements(space):
    low, high = (
        np.broadcast_to(x, space.shape).reshape(-1) for x in (space.low, space.high)
    )
    ranges = [range(a, b + 1) for a, b in zip(low, high, strict=True)]
    return list(itertools.product(*ranges))


def random_policy(space, mask):
    return rollout.random_policy(
        space, action_mask_fn=lambda obs: spread(mask, len(obs))
    )


@functools.cache
def sample_cases():
    """Returns decisions of every case, and actions for the first seven lanes."""

    def sample(case, key):
        policy, same_key = random_policy(*case[:2]), jax.random.clone(key)
        decision = policy.apply(None, LANES, (), key)
        return decision, policy.apply(None, LANES[:7], (), same_key).action

    return in_one_program(sample, CASES)


@pytest.mark.parametrize("name", CASES)
def test_masked_sample_is_uniform_over_valid_actions(name):
    space, _, is_allowed = CASES[name]
    decision, first_actions = sample_cases()[name]
    assert decision.action.shape == (NUM_LANES, *space.shape)
    assert decision.action.dtype == space.dtype
    assert not decision.extras["no_valid_action"].any()
    actions = [tuple(x) for x in decision.action.reshape(NUM_LANES, -1)]
    valid_actions = [x for x in elements(space) if is_allowed(x)]
    assert 1 < len(valid_actions) < len(elements(space))
    counts = np.array([actions.count(x) for x in valid_actions])
    assert counts.sum() == NUM_LANES
    mean = NUM_LANES / len(valid_actions)
    assert np.abs(counts - mean).max() < 5 * np.sqrt(mean)
    np.testing.assert_array_equal(first_actions, decision.action[:7])


TWO, JOINT_TWO = np.ones(2, bool), np.ones((2, 2), bool)
# The last action of each case is in the space.
OUTSIDE = {
    "entry": (envs.spaces.MultiDiscrete((2, 2)), (TWO, TWO), [[2, 0], [0, -1], [1, 1]]),
    "pair": (envs.spaces.MultiDiscrete((2, 2)), JOINT_TWO, [[2, 0], [0, -1], [1, 1]]),
    "number": (envs.Discrete(2), TWO, [2, -1, 1]),
}


@functools.cache
def correct_actions():
    """Applies masks to all actions of the spaces and to actions outside them."""

    def correct(case, key):
        space, mask, actions = case
        actions = np.reshape(actions, (-1, *space.shape)).astype(space.dtype)
        policy = rollout.stateless_policy(lambda params, obs, key: params)
        action_mask_fn = lambda obs: spread(mask, len(obs))  # noqa: E731
        policy = EpsilonGreedy(policy, space, 0.0, action_mask_fn=action_mask_fn)
        return policy.apply(actions, LANES[: len(actions)], (), key).action

    inside = {name: (*x[:2], elements(x[0])) for name, x in CASES.items()}
    return in_one_program(correct, inside | OUTSIDE)


@pytest.mark.parametrize("name", CASES)
def test_only_invalid_actions_are_replaced(name):
    space, _, is_allowed = CASES[name]
    actions = elements(space)
    sent = correct_actions()[name].reshape(len(actions), -1)
    for action, valid_action in zip(actions, sent, strict=True):
        assert is_allowed(tuple(valid_action))
        if is_allowed(action):
            assert action == tuple(valid_action)


@pytest.mark.parametrize("name", OUTSIDE)
def test_actions_outside_the_space_are_replaced(name):
    sent = correct_actions()[name]
    assert ((sent >= 0) & (sent < 2)).all()
    np.testing.assert_array_equal(sent[2:], OUTSIDE[name][-1][2:])


def test_empty_mask_samples_any_action_and_sets_the_flag():
    cases = {
        "one entry": (envs.spaces.MultiDiscrete((2, 3)), (TWO, np.zeros(3, bool))),
        "equal entries": (envs.spaces.MultiDiscrete((2, 2)), (TWO, ~TWO)),
        "joint": (envs.spaces.MultiDiscrete((2, 3)), np.zeros((2, 3), bool)),
        "discrete": (envs.Discrete(7), np.zeros(7, bool)),
    }

    def act(case, key):
        decision = random_policy(*case).apply(None, LANES[:500], (), key)
        return decision, jax.vmap(case[0].contains)(decision.action)

    for name, (decision, is_inside) in in_one_program(act, cases).items():
        assert decision.extras["no_valid_action"].all(), name
        assert is_inside.all(), name
        num_drawn = len(np.unique(decision.action, axis=0))
        assert num_drawn == len(elements(cases[name][0])), name


@pytest.mark.parametrize("space_type", ["dict", "tuple", "tree"])
def test_parts_have_separate_masks(space_type):
    box = envs.Box(0.0, 1.0, (2,))
    parts = {"a": envs.Discrete(3), "b": box, "c": envs.Discrete(2)}
    mask = {"a": np.array([True, False, True]), "b": None, "c": None}
    space = (
        envs.spaces.Dict(parts)
        if space_type == "dict"
        else envs.spaces.Composite(parts)
    )
    if space_type == "tuple":
        space, mask = envs.spaces.Tuple(tuple(parts.values())), tuple(mask.values())
    action_mask_fn = lambda obs: spread(mask, len(obs))  # noqa: E731
    policy = rollout.random_policy(space, action_mask_fn=action_mask_fn)
    greedy = rollout.stateless_policy(lambda params, obs, key: (params, ()))
    wrapper = EpsilonGreedy(greedy, space, 0.0, action_mask_fn=action_mask_fn)

    @quick_jit
    def act(obs, key, wrapper_key):
        decision = policy.apply(None, obs, (), key)
        ones = jax.tree.map(jnp.ones_like, decision.action)
        return decision, wrapper.apply(ones, obs, (), wrapper_key).action

    keys = jax.random.key(0), jax.random.key(1)
    decision, sent = jax.device_get(act(LANES[:200], *keys))
    a, b, c = jax.tree.leaves(decision.action)
    assert set(a.tolist()) == {0, 2}
    assert ((b >= 0) & (b <= 1)).all()
    assert set(c.tolist()) == {0, 1}
    assert not decision.extras["no_valid_action"].any()
    assert set(jax.tree.leaves(sent)[0].tolist()) == {0, 2}  # 1 is not allowed


@pytest.mark.parametrize("n", [2, 128, 255])
def test_columns_and_blocks_sample_the_same_actions(n, monkeypatch):
    """Lanes without a valid action are included."""
    rng, results = np.random.default_rng(n), []
    action_mask = rng.random((37, n)) < 0.1
    action_mask[0], action_mask[1], action_mask[2, -1] = False, True, True
    for wide in (n + 1, n):
        monkeypatch.setattr(masks, "_WIDE", wide)
        sample = quick_jit(lambda mask, key: masks.among(mask, key))
        results.append(jax.device_get(sample(action_mask, KEY)))
    (index, no_valid), (block_index, block_no_valid) = results
    np.testing.assert_array_equal(index, block_index)
    np.testing.assert_array_equal(no_valid, ~action_mask.any(axis=1))
    np.testing.assert_array_equal(block_no_valid, no_valid)
    assert action_mask[np.arange(37), index][~no_valid].all()


def test_wide_masks_have_equal_bits_on_every_platform():
    """If few columns are valid, most lanes have no valid candidate."""
    rng, num_lanes = np.random.default_rng(0), 4000
    action_mask = np.zeros((num_lanes, 300), bool)
    action_mask[:, [3, 150, 299]] = True
    action_mask[num_lanes // 2 :] = rng.random(300) < 0.9
    action_mask[0] = False

    def sample(mask, key):
        return masks.among(mask, key)

    index, no_valid = jax.device_get(quick_jit(sample)(action_mask, KEY))
    with on_a_gpu():
        gpu_result = jax.device_get(quick_jit(lambda *x: sample(*x))(action_mask, KEY))
    np.testing.assert_array_equal(gpu_result[0], index)
    np.testing.assert_array_equal(gpu_result[1], no_valid)
    np.testing.assert_array_equal(no_valid, np.arange(num_lanes) == 0)
    assert action_mask[np.arange(num_lanes), index][1:].all()
    for rows in (slice(1, num_lanes // 2), slice(num_lanes // 2, None)):
        valid = action_mask[rows][0]
        counts = np.bincount(index[rows], minlength=300)[valid]
        expected = counts.sum() / valid.sum()
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert chi_squared < stats.chi2.ppf(0.999, valid.sum() - 1)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_numeric_masks_are_accepted(dtype):
    space, obs = envs.Discrete(3), np.zeros((NUM_LANES, 1), np.float32)
    mask = np.tile([[0, 1, 0]], (NUM_LANES, 1)).astype(dtype)
    policies = [
        rollout.random_policy(space, action_mask_fn=lambda obs: mask),
        item_policy(
            lambda params, obs: -np.float32(mask), action_mask_fn=lambda obs: mask
        ),
    ]
    for policy in policies:
        step = quick_jit(policy.apply)(None, obs, (), KEY)
        np.testing.assert_array_equal(step.action, 1)


def test_mask_values_ignores_a_row_without_a_valid_action():
    values = np.float32([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    mask = np.array([[1, 0, 1], [0, 0, 0]], np.int8)
    masked = quick_jit(masks.mask_values)(values, mask)
    np.testing.assert_array_equal(masked, [[1.0, -1e9, 2.0], [1.0, 3.0, 2.0]])
    assert masks.mask_values(values, None) is values
