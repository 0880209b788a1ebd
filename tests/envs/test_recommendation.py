"""The recommendation environment: users, feedback and leave rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_one_program, quick_jit

from rollout import envs

FEEDBACK = np.arange(12, dtype=np.float32).reshape(3, 4) - 5.0


FEATURES = np.array([[0, 0], [0.6, 0], *([10 * x, 5] for x in range(5))], "f")
CATEGORIES = np.eye(4, dtype=bool)[[0, 0, 1, 1, 2, 3]]
SHARED_CATEGORIES = np.array([[1, 0], [0, 1], [1, 1]], bool)
LeaveByCategory = envs.recommendation.LeaveByCategory
BY_DISTANCE = envs.recommendation.LeaveByDistance(FEATURES, window=5, threshold=1.0)
BY_CATEGORY = LeaveByCategory(CATEGORIES, window=5, threshold=1)
# A rule, sequences of items, and the steps at which the user leaves.
RULES = {
    # Turn t compares its item with the items of turns max(0, t - 5) to t - 1. Items 0
    # and 1 share a category, and items 2 and 3 share a category. A user leaves at the
    # third item of a category.
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
    # KuaiEnv counts per category: two categories are shared once each.
    "shared": (LeaveByCategory(SHARED_CATEGORIES, 5, 0), [([0, 1, 2], [0, 0, 1])]),
    "shared_twice": (
        LeaveByCategory(SHARED_CATEGORIES, 5, 1),
        [([0, 1, 2], [0, 0, 0])],
    ),
}


def make_leave_env(rule):
    """Returns an environment whose episodes end by a leave rule only."""
    num_items = len(jax.tree.leaves(rule)[0])
    return envs.recommendation.RecommendationEnv(
        np.zeros((1, num_items), np.float32), rule
    )


TABLE_ENV = envs.recommendation.RecommendationEnv(FEEDBACK, max_turn=3)
FUNCTION_ENV = envs.recommendation.RecommendationEnv(
    lambda user, item: 4.0 * user + item - 5.0, num_users=3, num_items=4
)
# An environment, sequences of items, and a user.
CASES = {
    "table": (TABLE_ENV, [[3, 1, 1]], 2),
    "function": (FUNCTION_ENV, [[3, 1, 1]], 2),
    "no_repeat": (envs.wrappers.NoRepeat(TABLE_ENV), [[3, 1, 1]], 2),
    "invalid": (TABLE_ENV, [[-1], [4]], 0),
    **{
        x: (make_leave_env(rule), [r for r, _ in rows], 0)
        for x, (rule, rows) in RULES.items()
    },
}


@functools.cache
def step_cases():
    """Returns the reset observation, steps and result of `contains` of each case."""

    def run_case(case, key):
        env, rows, user = case

        def step(state, inputs):
            result = env.step(inputs[0], state, inputs[1])
            is_contained = env.observation_space.contains(result.obs)
            return result.state, (result.replace(state=()), is_contained)

        def play(items):
            return jax.lax.scan(step, state, (keys[1:], items))[1]

        keys = jax.random.split(key, 1 + len(rows[0]))
        state, obs = env.reset(keys[0])
        if hasattr(state, "user"):
            state = state.replace(user=jnp.int32(user))
        steps, is_contained = jax.vmap(play)(np.int32(rows))
        return obs, steps, is_contained.all() & env.observation_space.contains(obs)

    return in_one_program(run_case, CASES)


def test_reward_is_the_feedback():
    obs, steps, _ = step_cases()["table"]
    assert obs["item"] == 4
    assert obs["action_mask"].all()
    assert steps.reward.tolist() == [[6.0, 4.0, 4.0]]
    assert steps.obs["item"].tolist() == [[3, 1, 1]]
    assert steps.truncated.tolist() == [[False, False, True]]
    assert not steps.terminated.any()


def test_feedback_may_be_a_function():
    (_, table, _), (_, function, _) = (step_cases()[x] for x in ("table", "function"))
    assert table.reward.tolist() == function.reward.tolist()
    assert (
        table.obs["action_mask"].shape == function.obs["action_mask"].shape == (1, 3, 4)
    )


@pytest.mark.parametrize("name", sorted({*CASES} - {"invalid"}))
def test_observations_are_in_the_space(name):
    assert step_cases()[name][-1]


def test_invalid_action_has_nan_reward():
    assert np.isnan(step_cases()["invalid"][1].reward).all()


@pytest.mark.parametrize("name", RULES)
def test_leave_rule_terminates_at_expected_steps(name):
    _, steps, _ = step_cases()[name]
    np.testing.assert_array_equal(
        steps.terminated, [leave_steps for _, leave_steps in RULES[name][1]]
    )


def test_resets_sample_users_and_first_items_uniformly():
    env = envs.recommendation.RecommendationEnv(FEEDBACK, random_first=True)

    @quick_jit
    def reset_envs(key):
        return jax.vmap(env.reset)(jax.random.split(key, 400))[1]

    obs = jax.device_get(reset_envs(jax.random.key(0)))
    for name, num in (("user", 3), ("item", 4)):
        counts = np.bincount(obs[name], minlength=num)
        assert len(counts) == num
        assert (np.abs(counts - 400 / num) < 60).all()
