"""The environment that recommends items: who comes, who leaves, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv
from flax import struct
from plain_recommendation import Model

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


# Turn t looks at the items of turns max(0, t - 5) to t - 1. Items 0 and 1 share a
# category, so do 2 and 3; a user leaves at the third of one within those and the last.
@pytest.mark.parametrize(
    ("items", "leaves"),
    [
        ([0, 1, 0, 2, 2, 2, 2], [0, 0, 1, 0, 0, 1, 1]),
        ([0, 2, 1, 2, 0, 3, 2], [0, 0, 0, 0, 1, 1, 1]),
        ([0, 1, 2, 3, 4, 4, 0], [0, 0, 0, 0, 0, 0, 0]),
        ([0, 1, 4, 5, 4, 5, 0], [0, 0, 0, 0, 0, 0, 0]),
        ([0, 4, 1, 5, 4, 0, 4], [0, 0, 0, 0, 0, 1, 1]),
    ],
)
def test_leave_rule_of_categories_is_right_from_the_first_turn_on(items, leaves):
    categories = np.zeros((6, 4), bool)
    categories[np.arange(6), [0, 0, 1, 1, 2, 3]] = True
    rule = envs.recommendation.LeaveByCategory(categories, window=5, threshold=1)
    env = envs.RecommendationEnv(np.zeros((1, 6), np.float32), rule)
    _, steps = walk(env, items)
    assert [int(x.terminated) for x in steps] == leaves
    model = Model(np.zeros((1, 6)), categories, 5, 1, 100)
    assert [model.leaves(items[:t], items[t]) for t in range(7)] == leaves


@pytest.mark.parametrize(
    ("items", "leaves"),
    [
        ([0, 0, 1, 2, 3, 1, 1], [0, 1, 1, 0, 0, 1, 1]),
        ([0, 2, 3, 4, 5, 1, 0], [0, 0, 0, 0, 0, 1, 1]),
        ([0, 2, 3, 4, 5, 6, 0], [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_leave_rule_of_distance_is_right_from_the_first_turn_on(items, leaves):
    features = np.array([[0, 0], [0.6, 0], *([10 * x, 5] for x in range(5))], "f")
    rule = envs.recommendation.LeaveByDistance(features, window=5, threshold=1.0)
    env = envs.RecommendationEnv(np.zeros((1, 7), np.float32), rule)
    _, steps = walk(env, items)
    assert [int(x.terminated) for x in steps] == leaves


def test_action_outside_of_the_catalogue_is_no_data():
    env = envs.RecommendationEnv(FEEDBACK)
    state, _ = env.reset(jax.random.key(0))
    for item in (-1, 4):
        with pytest.raises(ValueError, match=f"from 0 to 3, got {item}"):
            env.step(jax.random.key(0), state, jnp.int32(item))
        step = jax.jit(env.step)(jax.random.key(0), state, jnp.int32(item))
        assert np.isnan(step.reward)


def test_spaces_contain_what_there_is():
    env = envs.wrappers.NoRepeat(envs.RecommendationEnv(FEEDBACK))
    state, obs = env.reset(jax.random.key(0))
    assert env.observation_space.contains(obs)
    result = env.step(
        jax.random.key(1), state, env.action_space.sample(jax.random.key(2))
    )
    assert env.observation_space.contains(result.obs)
    assert env.observation_space.contains(
        env.observation_space.sample(jax.random.key(3))
    )


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


def test_bad_arguments_are_refused():
    bad = FEEDBACK.copy()
    bad[1, 2] = bad[2, 0] = np.nan
    with pytest.raises(ValueError, match="nan for user 1 and item 2, and 1 more"):
        envs.RecommendationEnv(bad)
    with pytest.raises(ValueError, match=r"`feedback` must be \[U, I\]"):
        envs.RecommendationEnv(FEEDBACK[0])
    tables = envs.ratings.from_interactions(([1, 2], [3, 4], [1.0, 2.0]), missing=0.0)
    with pytest.raises(ValueError, match="got Interactions: pass its `feedback`"):
        envs.RecommendationEnv(tables)
    with pytest.raises(ValueError, match="`num_users` must be an int"):
        envs.RecommendationEnv(lambda user, item: 0.0, num_items=3)
    with pytest.raises(ValueError, match="`max_turn`"):
        envs.RecommendationEnv(FEEDBACK, max_turn=0)
    rule = envs.recommendation.LeaveByCategory(np.ones((5, 2), bool), 5, 1)
    with pytest.raises(ValueError, match=r"`leave` must be for the 4 .*, got 5"):
        envs.RecommendationEnv(FEEDBACK, rule)
    with pytest.raises(ValueError, match=r"`categories` must be \[I, C\] bool"):
        envs.recommendation.LeaveByCategory(np.ones((5, 2)), 5, 1)
    with pytest.raises(ValueError, match="`window`"):
        envs.recommendation.LeaveByDistance(np.ones((5, 2), "f"), 0, 1.0)
    with pytest.raises(ValueError, match=r"`features` must be \[I, F\] of floats"):
        envs.recommendation.LeaveByDistance(np.ones((5, 2), bool), 5, 1.0)


def test_each_category_counts_for_itself():
    """As in KuaiEnv: the last items share two categories with it, each one once."""
    categories = np.array([[1, 0], [0, 1], [1, 1]], bool)
    for threshold, leaves in ((0, True), (1, False)):
        rule = envs.recommendation.LeaveByCategory(
            categories, window=5, threshold=threshold
        )
        env = envs.RecommendationEnv(np.zeros((1, 3), np.float32), rule)
        assert bool(walk(env, [0, 1, 2])[1][-1].terminated) == leaves


def test_sizes_beside_a_table_are_those_of_the_table():
    with pytest.raises(ValueError, match=r"`num_users` must be left out, or 3 .* 7"):
        envs.RecommendationEnv(FEEDBACK, num_users=7)
    with pytest.raises(ValueError, match=r"`num_items` must be left out, or 4 .* 3"):
        envs.RecommendationEnv(FEEDBACK, num_items=3)
    env = envs.RecommendationEnv(FEEDBACK, num_users=3, num_items=4)
    assert jax.tree.map(lambda x: x, env).num_users == 3


def test_features_and_threshold_are_numbers():
    features = np.zeros((4, 2), np.float32)
    with pytest.raises(ValueError, match="`features` must be finite"):
        envs.recommendation.LeaveByDistance(
            np.where(np.eye(4, 2), np.nan, features), 5, 1.0
        )
    for threshold in (np.nan, "0.1"):
        with pytest.raises(ValueError, match="`threshold` must be a number, got"):
            envs.recommendation.LeaveByDistance(features, 5, threshold)


def test_tables_may_be_lists():
    rule = envs.recommendation.LeaveByCategory([[True], [False]], 5, 1)
    env = envs.RecommendationEnv([[1.0, 2.0]], rule, known=[[True, False]])
    assert env.reset(jax.random.key(0))[1]["mask"].tolist() == [True, False]


@struct.dataclass
class Pictures(CountEnv):
    """A `mask` in the observation that is not about actions."""

    def reset(self, key):
        state, obs = super().reset(key)
        return state, {"obs": obs, "mask": jnp.ones((3, 3), bool)}


def test_mask_that_is_not_of_the_actions_is_refused():
    env = envs.wrappers.NoRepeat(Pictures())
    with pytest.raises(ValueError, match=r"`mask` in the obs.* shape \(3,\), one for"):
        env.reset(jax.random.key(0))


@pytest.mark.parametrize("flag", ["yes", 1, None])
def test_flags_are_bools(flag):
    with pytest.raises(ValueError, match="`random_first` must be a bool, got"):
        envs.RecommendationEnv(FEEDBACK, random_first=flag)
    with pytest.raises(ValueError, match="`initial` must be a bool, got"):
        envs.wrappers.NoRepeat(envs.RecommendationEnv(FEEDBACK), initial=flag)
