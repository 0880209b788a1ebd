"""The environment that recommends items: who comes, who leaves, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
from cases import in_one_program, quick_jit
from plain_recommendation import Model
from suite_checks import check_spaces, collect

from rollout import envs

FEEDBACK = np.arange(12, dtype=np.float32).reshape(3, 4) - 5.0


def walk(**cases):
    """Recommends rows of items to a user of each environment, in one program.

    Args:
        cases: `(env, rows, user)` by name.
    """

    def one(case, key):
        env, rows, user = case

        def step(state, given):
            result = env.step(given[0], state, given[1])
            return result.state, result.replace(state=())

        def play(items):
            return jax.lax.scan(step, state, (keys[1:], items))[1]

        keys = jax.random.split(key, 1 + len(rows[0]))
        state, obs = env.reset(keys[0])
        state = state.replace(user=jnp.int32(user))
        return obs, jax.vmap(play)(np.int32(rows))

    return in_one_program(one, cases)


def test_reward_is_what_the_user_thinks():
    env = envs.RecommendationEnv(FEEDBACK, max_turn=3)
    obs, steps = walk(env=(env, [[3, 1, 1]], 2))["env"]
    assert obs["item"] == 4
    assert obs["mask"].all()
    assert steps.reward.tolist() == [[6.0, 4.0, 4.0]]
    assert steps.obs["item"].tolist() == [[3, 1, 1]]
    assert steps.truncated.tolist() == [[False, False, True]]
    assert not steps.terminated.any()


def test_feedback_may_be_a_function():
    table = envs.RecommendationEnv(FEEDBACK)
    env = envs.RecommendationEnv(
        lambda user, item: 4.0 * user + item - 5.0, num_users=3, num_items=4
    )
    found = walk(table=(table, [[0, 2, 3]], 1), function=(env, [[0, 2, 3]], 1))
    (_, one), (_, other) = found.values()
    assert one.reward.tolist() == other.reward.tolist()
    assert one.obs["mask"].shape == other.obs["mask"].shape == (1, 3, 4)


def test_every_user_comes_and_every_item_may_be_first():
    env = envs.RecommendationEnv(FEEDBACK, random_first=True)

    @quick_jit
    def start(key):
        return jax.vmap(env.reset)(jax.random.split(key, 400))[1]

    obs = jax.device_get(start(jax.random.key(0)))
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
            ([0, 1, 2, 3, 4, 4, 0], [0, 0, 0, 0, 0, 0, 0]),
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


def test_leave_rule_is_right_from_the_first_turn_on():
    cases = {}
    for name, (rule, rows) in RULES.items():
        num_items = len(jax.tree.leaves(rule)[0])
        env = envs.RecommendationEnv(np.zeros((1, num_items), np.float32), rule)
        cases[name] = env, [items for items, _ in rows], 0
    for name, (_, steps) in walk(**cases).items():
        leaves = [leaves for _, leaves in RULES[name][1]]
        np.testing.assert_array_equal(steps.terminated, leaves, err_msg=name)
    model = Model(np.zeros((1, 6)), OF_CATEGORY, 5, 1, 100)
    for items, leaves in RULES["category"][1]:
        assert [model.leaves(items[:t], items[t]) for t in range(7)] == leaves


def test_action_outside_of_the_catalogue_is_no_data():
    env = envs.RecommendationEnv(FEEDBACK)

    @quick_jit
    def act(keys, items):
        state, _ = env.reset(keys[0])
        return jax.vmap(lambda item: env.step(keys[1], state, item).reward)(items)

    reward = act(jax.random.split(jax.random.key(0)), np.int32([-1, 4]))
    assert np.isnan(reward).all()


def test_spaces_contain_what_there_is():
    env = envs.wrappers.NoRepeat(envs.RecommendationEnv(FEEDBACK))
    run = quick_jit(lambda: collect(envs.vectorize(env, 2), num_steps=3))
    check_spaces(env, jax.device_get(run()))


def test_a_large_catalogue_has_many_lanes():
    num_items, num_lanes = 10_000, 1_024
    env = envs.RecommendationEnv(
        lambda user, item: jnp.sin(user * 1.0 + item), num_users=50, num_items=num_items
    )
    vector = envs.vectorize(envs.wrappers.NoRepeat(env), num_lanes)
    action = np.arange(num_lanes, dtype=np.int32)

    @quick_jit
    def act(key):
        reset_keys, step_keys = jax.random.split(key, (2, num_lanes))
        state, _ = vector.reset(reset_keys)
        return vector.step(step_keys, state, action).obs["mask"]

    mask = np.asarray(act(jax.random.key(0)))
    assert (mask.sum(axis=1) == num_items - 1).all()
    assert not mask[action, action].any()


def test_tables_may_be_lists():
    rule = envs.recommendation.LeaveByCategory([[True], [False]], 5, 1)
    env = envs.RecommendationEnv([[1.0, 2.0]], rule, known=[[True, False]])
    assert jax.jit(env.reset)(jax.random.key(0))[1]["mask"].tolist() == [True, False]
