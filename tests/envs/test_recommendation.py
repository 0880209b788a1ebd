"""The environment that recommends items: who comes, who leaves, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_recommendation import Model
from suite_checks import check_spaces, collect

from rollout import envs

FEEDBACK = np.arange(12, dtype=np.float32).reshape(3, 4) - 5.0


def walk(env, items, user=0):
    """Recommends items to one user; the steps."""
    state, obs = env.reset(jax.random.key(0))
    state = state.replace(user=jnp.int32(user))
    steps = []
    for item in items:
        steps.append(env.step(jax.random.key(1), state, jnp.int32(item)))
        state = steps[-1].state
    return obs, steps


def test_reward_is_what_the_user_thinks():
    obs, steps = walk(envs.RecommendationEnv(FEEDBACK, max_turn=3), [3, 1, 1], user=2)
    assert obs["item"] == 4
    assert obs["mask"].all()
    assert [float(x.reward) for x in steps] == [6.0, 4.0, 4.0]
    assert [int(x.obs["item"]) for x in steps] == [3, 1, 1]
    assert [bool(x.truncated) for x in steps] == [False, False, True]
    assert not any(x.terminated for x in steps)


def test_feedback_may_be_a_function():
    table = envs.RecommendationEnv(FEEDBACK)
    env = envs.RecommendationEnv(
        lambda user, item: 4.0 * user + item - 5.0, num_users=3, num_items=4
    )
    one, other = (walk(x, [0, 2, 3], user=1)[1] for x in (table, env))
    assert [float(x.reward) for x in one] == [float(x.reward) for x in other]
    assert one[0].obs["mask"].shape == other[0].obs["mask"].shape == (4,)


def test_every_user_comes_and_every_item_may_be_first():
    env = envs.RecommendationEnv(FEEDBACK, random_first=True)
    keys = jax.random.split(jax.random.key(0), 400)
    obs = jax.vmap(env.reset)(keys)[1]
    for name, num in (("user", 3), ("item", 4)):
        counts = np.bincount(obs[name], minlength=num)
        assert len(counts) == num
        assert (np.abs(counts - 400 / num) < 60).all()


PLACES = np.array([[0, 0], [0.6, 0], *([10 * x, 5] for x in range(5))], "f")
OF_CATEGORY = np.eye(4, dtype=bool)[[0, 0, 1, 1, 2, 3]]
SHARED = np.array([[1, 0], [0, 1], [1, 1]], bool)
LeaveByCategory = envs.recommendation.LeaveByCategory
BY_DISTANCE = envs.recommendation.LeaveByDistance(PLACES, window=5, threshold=1.0)
BY_CATEGORY = LeaveByCategory(OF_CATEGORY, window=5, threshold=1)


@pytest.mark.parametrize(
    ("rule", "items", "leaves"),
    [
        # Turn t looks at the items of turns max(0, t - 5) to t - 1. Items 0 and 1 share
        # a category, so do 2 and 3; a user leaves at the third of one within those and
        # the last.
        (BY_CATEGORY, [0, 1, 0, 2, 2, 2, 2], [0, 0, 1, 0, 0, 1, 1]),
        (BY_CATEGORY, [0, 2, 1, 2, 0, 3, 2], [0, 0, 0, 0, 1, 1, 1]),
        (BY_CATEGORY, [0, 1, 2, 3, 4, 4, 0], [0, 0, 0, 0, 0, 0, 0]),
        (BY_CATEGORY, [0, 1, 4, 5, 4, 5, 0], [0, 0, 0, 0, 0, 0, 0]),
        (BY_CATEGORY, [0, 4, 1, 5, 4, 0, 4], [0, 0, 0, 0, 0, 1, 1]),
        (BY_DISTANCE, [0, 0, 1, 2, 3, 1, 1], [0, 1, 1, 0, 0, 1, 1]),
        (BY_DISTANCE, [0, 2, 3, 4, 5, 1, 0], [0, 0, 0, 0, 0, 1, 1]),
        (BY_DISTANCE, [0, 2, 3, 4, 5, 6, 0], [0, 0, 0, 0, 0, 0, 0]),
        # As in KuaiEnv: the last items share two categories with it, each one once.
        (LeaveByCategory(SHARED, window=5, threshold=0), [0, 1, 2], [0, 0, 1]),
        (LeaveByCategory(SHARED, window=5, threshold=1), [0, 1, 2], [0, 0, 0]),
    ],
)
def test_leave_rule_is_right_from_the_first_turn_on(rule, items, leaves):
    num_items = len(jax.tree.leaves(rule)[0])
    env = envs.RecommendationEnv(np.zeros((1, num_items), np.float32), rule)
    _, steps = walk(env, items)
    assert [int(x.terminated) for x in steps] == leaves
    if rule is BY_CATEGORY:
        model = Model(np.zeros((1, 6)), OF_CATEGORY, 5, 1, 100)
        assert [model.leaves(items[:t], items[t]) for t in range(7)] == leaves


def test_action_outside_of_the_catalogue_is_no_data():
    env = envs.RecommendationEnv(FEEDBACK)
    state, _ = env.reset(jax.random.key(0))
    for item in (-1, 4):
        step = jax.jit(env.step)(jax.random.key(0), state, jnp.int32(item))
        assert np.isnan(step.reward)


def test_spaces_contain_what_there_is():
    env = envs.wrappers.NoRepeat(envs.RecommendationEnv(FEEDBACK))
    check_spaces(env, collect(envs.vectorize(env, 2), num_steps=3))


def test_a_large_catalogue_has_many_lanes():
    num_items, num_lanes = 10_000, 1_024
    env = envs.RecommendationEnv(
        lambda user, item: jnp.sin(user * 1.0 + item), num_users=50, num_items=num_items
    )
    vector = envs.vectorize(envs.wrappers.NoRepeat(env), num_lanes)
    state, _ = vector.reset(jax.random.split(jax.random.key(0), num_lanes))
    action = jnp.arange(num_lanes, dtype=jnp.int32)
    keys = jax.random.split(jax.random.key(1), num_lanes)
    result = jax.jit(vector.step)(keys, state, action)
    assert (result.obs["mask"].sum(axis=1) == num_items - 1).all()
    assert not result.obs["mask"][action, action].any()


def test_tables_may_be_lists():
    rule = envs.recommendation.LeaveByCategory([[True], [False]], 5, 1)
    env = envs.RecommendationEnv([[1.0, 2.0]], rule, known=[[True, False]])
    assert env.reset(jax.random.key(0))[1]["mask"].tolist() == [True, False]
