"""Masks of spaces of several entries or parts, against lists of allowed actions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit

import rollout
from rollout import envs
from rollout.envs import prng
from rollout.policies import uniform

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


@pytest.mark.parametrize("name", CASES)
def test_masked_draw_is_uniform_over_allowed_actions(name):
    space, mask, is_allowed = CASES[name]
    policy = rollout.random_policy(space, mask_fn=lambda obs: spread(mask, len(obs)))
    act = quick_jit(lambda obs, key: policy.apply(None, obs, (), key))
    decision = jax.device_get(act(LANES, KEY))
    assert decision.action.shape == (NUM_LANES, *space.shape)
    assert decision.action.dtype == space.dtype
    assert not decision.extras["none_allowed"].any()
    drawn = [tuple(x) for x in np.asarray(decision.action).reshape(NUM_LANES, -1)]
    wanted = [x for x in elements(space) if is_allowed(x)]
    assert 1 < len(wanted) < len(elements(space))
    counts = np.array([drawn.count(x) for x in wanted])
    assert counts.sum() == NUM_LANES
    mean = NUM_LANES / len(wanted)
    assert np.abs(counts - mean).max() < 5 * np.sqrt(mean)
    few = act(LANES[:7], KEY).action
    np.testing.assert_array_equal(few, decision.action[:7])


def corrected(space, mask, actions):
    """What a mask makes of the actions of a policy."""
    policy = rollout.epsilon_greedy(
        rollout.stateless_policy(lambda params, obs, key: params),
        space,
        0.0,
        mask_fn=lambda obs: spread(mask, len(obs)),
    )
    lanes, actions = LANES[: len(actions)], np.asarray(actions, space.dtype)
    apply = quick_jit(lambda obs, key: policy.apply(actions, obs, (), key).action)
    return np.asarray(apply(lanes, KEY))


@pytest.mark.parametrize("name", CASES)
def test_only_forbidden_actions_of_a_policy_are_replaced(name):
    space, mask, is_allowed = CASES[name]
    every = elements(space)
    sent = corrected(space, mask, np.reshape(every, (-1, *space.shape)))
    for before, after in zip(every, sent.reshape(len(every), -1), strict=True):
        assert is_allowed(tuple(after))
        if is_allowed(before):
            assert before == tuple(after)


TWO, JOINT_TWO = np.ones(2, bool), np.ones((2, 2), bool)


@pytest.mark.parametrize(
    ("space", "mask", "actions"),
    [
        (envs.spaces.MultiDiscrete((2, 2)), (TWO, TWO), [[2, 0], [0, -1], [1, 1]]),
        (envs.spaces.MultiDiscrete((2, 2)), JOINT_TWO, [[2, 0], [0, -1], [1, 1]]),
        (envs.Discrete(2), TWO, [2, -1, 1]),
    ],
)
def test_action_outside_of_the_space_is_not_allowed(space, mask, actions):
    sent = corrected(space, mask, actions)
    assert ((sent >= 0) & (sent < 2)).all()
    np.testing.assert_array_equal(sent[2:], actions[2:])


@pytest.mark.parametrize(
    ("space", "mask"),
    [
        (envs.spaces.MultiDiscrete((2, 3)), (TWO, np.zeros(3, bool))),
        (envs.spaces.MultiDiscrete((2, 2)), (TWO, ~TWO)),
        (envs.spaces.MultiDiscrete((2, 3)), np.zeros((2, 3), bool)),
        (envs.Discrete(7), np.zeros(7, bool)),
    ],
)
def test_where_nothing_is_allowed_any_action_is_drawn_and_flagged(space, mask):
    policy = rollout.random_policy(space, mask_fn=lambda obs: spread(mask, len(obs)))

    @quick_jit
    def act(obs, key):
        decision = policy.apply(None, obs, (), key)
        return decision, jax.vmap(space.contains)(decision.action)

    decision, is_inside = jax.device_get(act(LANES[:500], KEY))
    assert decision.extras["none_allowed"].all()
    assert is_inside.all()
    assert len(np.unique(decision.action, axis=0)) == len(elements(space))


@pytest.mark.parametrize("kind", ["dict", "tuple", "tree"])
def test_parts_have_masks_of_their_own_or_none(kind):
    box = envs.Box(0.0, 1.0, (2,))
    parts = {"a": envs.Discrete(3), "b": box, "c": envs.Discrete(2)}
    mask = {"a": np.array([True, False, True]), "b": None, "c": None}
    space = envs.Dict(parts) if kind == "dict" else envs.spaces.Composite(parts)
    if kind == "tuple":
        space, mask = envs.Tuple(tuple(parts.values())), tuple(mask.values())
    mask_fn = lambda obs: spread(mask, len(obs))  # noqa: E731
    policy = rollout.random_policy(space, mask_fn=mask_fn)
    greedy = rollout.stateless_policy(lambda params, obs, key: (params, ()))
    around = rollout.epsilon_greedy(greedy, space, 0.0, mask_fn=mask_fn)

    @quick_jit
    def act(obs, key, own_key):
        decision = policy.apply(None, obs, (), key)
        ones = jax.tree.map(jnp.ones_like, decision.action)
        return decision, around.apply(ones, obs, (), own_key).action

    keys = jax.random.key(0), jax.random.key(1)
    decision, sent = jax.device_get(act(LANES[:200], *keys))
    a, b, c = jax.tree.leaves(decision.action)
    assert set(a.tolist()) == {0, 2}
    assert ((b >= 0) & (b <= 1)).all()
    assert set(c.tolist()) == {0, 1}
    assert not decision.extras["none_allowed"].any()
    assert set(jax.tree.leaves(sent)[0].tolist()) == {0, 2}  # 1 is not allowed


def assert_same_draws(programs, masks):
    """Of two programs, for each mask."""
    for mask in masks:
        drawn = [jax.device_get(program(mask, KEY)) for program in programs]
        np.testing.assert_array_equal(drawn[0][0], drawn[1][0])
        for _, none_allowed in drawn:
            np.testing.assert_array_equal(none_allowed, ~mask.any(axis=1))


@pytest.mark.parametrize("n", [2, 33, 127, 128, 255])
def test_draw_by_columns_has_the_bits_of_the_one_by_blocks(n, monkeypatch):
    """Also where nothing is allowed."""
    rng, programs = np.random.default_rng(n), []
    masks = [rng.random((37, n)) < rate for rate in (0.0, 0.02, 0.5)]
    for mask in masks:
        mask[0], mask[1], mask[2, -1] = False, True, True
    for wide in (n + 1, n):
        monkeypatch.setattr(uniform, "_WIDE", wide)
        draw = quick_jit(lambda mask, key: uniform.allowed(mask, key))
        programs.append(draw.lower(masks[0], KEY).compile())
    assert_same_draws(programs, masks)


def test_draw_without_a_loop_has_the_bits_of_the_one_with_a_loop():
    """The program for a GPU and for several devices, run here."""
    rng, programs = np.random.default_rng(0), []
    masks = [rng.random((36, 1000)) < rate for rate in (0.0, 0.02, 0.5, 1.0)]
    for num_parts in (1, 2):
        with prng.in_parts(num_parts):
            traced = quick_jit(lambda *x: uniform.allowed(*x)).trace(masks[0], KEY)
            programs.append(traced.lower().compile())
        assert ("while[" in str(traced.jaxpr)) == (num_parts == 1)
    assert_same_draws(programs, masks)
