"""The environment that recommends items: who comes, who leaves, and its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_one_program, quick_jit

from rollout import envs

FEEDBACK = np.arange(12, dtype=np.float32).reshape(3, 4) - 5.0


PLACES = np.array([[0, 0], [0.6, 0], *([10 * x, 5] for x in range(5))], "f")
OF_CATEGORY = np.eye(4, dtype=bool)[[0, 0, 1, 1, 2, 3]]
SHARED = np.array([[1, 0], [0, 1], [1, 1]], bool)
LeaveByCategory = envs.recommendation.LeaveByCategory
BY_DISTANCE = envs.recommendation.LeaveByDistance(PLACES, window=5, threshold=1.0)
BY_CATEGORY = LeaveByCategory(OF_CATEGORY, window=5, threshold=1)
# A rule, rows of items, and where a user leaves.
RULES = {
    # Turn t looks at the items of turns max(0, t - 5) to t - 1. Items 0 and 1 share
    # a category, so do 2 and 3; a user leaves at the third of one within those and
    # the last.
    "category": (
        BY_CATEGORY,
        [
            ([0, 1, 0, 2, 2, 2, 2], [0, 0, 1, 0, 0, 1, 1]),
            ([0, 2, 1, 2, 0, 3, 2], [0, 0, 0, 0, 1, 1, 1]),
            ([0, 1, 4, 5, 4, 5, 0], [0, 0, 0, 0, 0, 0, 0]),
            ([0, 4, 1, 5, 4, 0, 4], [0, 0, 0, 0, 0, 1, 1]),
        ],
    ),
    "distance": (
        BY_DISTANCE,
        [
            ([0, 0, 1, 2, 3, 1, 1], [0, 1, 1, 0, 0, 1, 1]),
            ([0, 2, 3, 4, 5, 1, 0], [0, 0, 0, 0, 0, 1, 1]),
            ([0, 2, 3, 4, 5, 6, 0], [0, 0, 0, 0, 0, 0, 0]),
        ],
    ),
    # As in KuaiEnv: the last items share two categories with it, each one once.
    "shared": (LeaveByCategory(SHARED, 5, 0), [([0, 1, 2], [0, 0, 1])]),
    "shared twice": (LeaveByCategory(SHARED, 5, 1), [([0, 1, 2], [0, 0, 0])]),
}


def lenient(rule):
    """An environment whose users leave by a rule alone."""
    num_items = len(jax.tree.leaves(rule)[0])
    return envs.recommendation.RecommendationEnv(
        np.zeros((1, num_items), np.float32), rule
    )


TABLE = envs.recommendation.RecommendationEnv(FEEDBACK, max_turn=3)
FUNCTION = envs.recommendation.RecommendationEnv(
    lambda user, item: 4.0 * user + item - 5.0, num_users=3, num_items=4
)
# An environment, rows of items, and a user.
WALKS = {
    "table": (TABLE, [[3, 1, 1]], 2),
    "function": (FUNCTION, [[3, 1, 1]], 2),
    "no repeat": (envs.wrappers.NoRepeat(TABLE), [[3, 1, 1]], 2),
    "beyond": (TABLE, [[-1], [4]], 0),
    **{
        x: (lenient(rule), [r for r, _ in rows], 0) for x, (rule, rows) in RULES.items()
    },
}


@functools.cache
def walked():
    """What each shows first and at every step, and whether its space has both."""

    def one(case, key):
        env, rows, user = case

        def step(state, given):
            result = env.step(given[0], state, given[1])
            inside = env.observation_space.contains(result.obs)
            return result.state, (result.replace(state=()), inside)

        def play(items):
            return jax.lax.scan(step, state, (keys[1:], items))[1]

        keys = jax.random.split(key, 1 + len(rows[0]))
        state, obs = env.reset(keys[0])
        if hasattr(state, "user"):
            state = state.replace(user=jnp.int32(user))
        steps, inside = jax.vmap(play)(np.int32(rows))
        return obs, steps, inside.all() & env.observation_space.contains(obs)

    return in_one_program(one, WALKS)


def test_reward_is_what_the_user_thinks():
    obs, steps, _ = walked()["table"]
    assert obs["item"] == 4
    assert obs["action_mask"].all()
    assert steps.reward.tolist() == [[6.0, 4.0, 4.0]]
    assert steps.obs["item"].tolist() == [[3, 1, 1]]
    assert steps.truncated.tolist() == [[False, False, True]]
    assert not steps.terminated.any()


def test_feedback_may_be_a_function():
    (_, table, _), (_, function, _) = (walked()[x] for x in ("table", "function"))
    assert table.reward.tolist() == function.reward.tolist()
    assert (
        table.obs["action_mask"].shape == function.obs["action_mask"].shape == (1, 3, 4)
    )


@pytest.mark.parametrize("name", sorted({*WALKS} - {"beyond"}))
def test_observations_are_in_the_space(name):
    assert walked()[name][-1]


def test_action_outside_of_the_catalog_is_no_data():
    assert np.isnan(walked()["beyond"][1].reward).all()


@pytest.mark.parametrize("name", RULES)
def test_leave_rule_is_right_from_the_first_turn_on(name):
    _, steps, _ = walked()[name]
    np.testing.assert_array_equal(
        steps.terminated, [left for _, left in RULES[name][1]]
    )


def test_every_user_comes_and_every_item_may_be_first():
    env = envs.recommendation.RecommendationEnv(FEEDBACK, random_first=True)

    @quick_jit
    def start(key):
        return jax.vmap(env.reset)(jax.random.split(key, 400))[1]

    obs = jax.device_get(start(jax.random.key(0)))
    for name, num in (("user", 3), ("item", 4)):
        counts = np.bincount(obs[name], minlength=num)
        assert len(counts) == num
        assert (np.abs(counts - 400 / num) < 60).all()
