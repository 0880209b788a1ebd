"""Interaction logs as tables, compared with a dictionary; dropped records."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from cases import quick_jit

import rollout
from rollout import envs
from rollout.envs.ratings import from_interactions

RNG = np.random.default_rng(0)
LOG = {  # ids have gaps, and many pairs have about two rows
    "user_id": 7 * RNG.integers(0, 12, 200) - 3,
    "item_id": np.array([f"i{x}" for x in RNG.integers(0, 15, 200)]),
    "feedback": RNG.normal(size=200),
}


def plain_pairs(log):
    """Returns the mean feedback by user id and item id."""
    feedback_by_pair = {}
    for user, item, feedback in zip(*log.values(), strict=True):
        feedback_by_pair.setdefault((user, str(item)), []).append(feedback)
    return {pair: np.mean(rows) for pair, rows in feedback_by_pair.items()}


def plain_missing(pairs, user, item, missing):
    """Returns the feedback of an unknown pair."""
    if missing == "user_mean":
        return np.mean([x for (user_id, _), x in pairs.items() if user_id == user])
    if missing == "item_mean":
        return np.mean([x for (_, item_id), x in pairs.items() if item_id == item])
    return 0.0 if missing == "mask" else missing


@pytest.mark.parametrize("missing", ["user_mean", "item_mean", "mask", -2.5])
def test_tables_equal_dictionary_of_pairs(missing):
    tables, pairs = from_interactions(LOG, missing=missing), plain_pairs(LOG)
    assert list(tables.users) == sorted({user for user, _ in pairs})
    assert list(tables.items) == sorted({item for _, item in pairs})
    for (u, i), is_known in np.ndenumerate(tables.known):
        pair = tables.users[u], tables.items[i]
        assert is_known == (pair in pairs)
        want = pairs[pair] if is_known else plain_missing(pairs, *pair, missing)
        # The table has float32. Means of positive and negative numbers may be near 0.
        np.testing.assert_allclose(tables.feedback[u, i], want, rtol=1e-6, atol=1e-6)
    expected_popularity = np.float32(np.sum(tables.known, axis=0) / len(tables.users))
    np.testing.assert_array_equal(tables.popularity, expected_popularity)
    assert tables.feedback.dtype == tables.popularity.dtype == np.float32
    assert 0 < len(pairs) < min(len(LOG["user_id"]), tables.known.size)
    assert set(tables.num_dropped.values()) == {0}


def test_data_formats_give_equal_tables(tmp_path):
    path = tmp_path / "ratings.csv"
    names = {"user": "who", "item": "what", "feedback": "stars"}
    columns = LOG["user_id"], LOG["item_id"], LOG["feedback"]
    frame = pd.DataFrame({"x": 1, **dict(zip(names.values(), columns, strict=True))})
    frame.to_csv(path, index=False)
    want = from_interactions(LOG, missing="user_mean")
    for data in (path, str(path), frame, frame.set_index("x", drop=False), columns):
        got = from_interactions(data, missing="user_mean", **names)
        for name in ("feedback", "known", "users", "items", "popularity"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_invalid_records_are_dropped_with_a_warning(tmp_path):
    path = tmp_path / "ratings.csv"
    rows = ["5,b,1", ",b,2", "5,,", "6,a,inf", "6,c,", "7,c,1e300", "7,a,4", "5,b,3"]
    path.write_text("\n".join(["user_id,item_id,feedback", *rows]))
    message = "5 of 8 records of `data`: 2 .*id, 3 .*feedback"
    with pytest.warns(UserWarning, match=message) as caught:
        tables = from_interactions(path, missing=0)
    assert [x.filename for x in caught] == [__file__]
    assert tables.num_dropped == {"missing_id": 2, "nonfinite_feedback": 3}
    assert (list(tables.users), list(tables.items)) == ([5, 7], ["a", "b"])
    assert tables.users.dtype == np.int64
    np.testing.assert_array_equal(tables.feedback, [[0, 2], [4, 0]])


def test_environment_uses_tables_and_masks_unknown_pairs():
    tables = from_interactions(LOG, missing="mask")
    env = envs.recommendation.RecommendationEnv(
        tables.feedback, max_turn=3, known=tables.known
    )
    policy = rollout.recommendation.item_policy(
        lambda params, obs: jnp.zeros(obs["action_mask"].shape)
    )
    collector = rollout.Collector(env=envs.vectorize(env, 8), policy=policy)

    @quick_jit
    def run(key):
        return collector.collect_steps(collector.init(key), None, 12)[1]

    rows = jax.device_get(run(jax.random.key(0)))
    user, next_user = rows.obs["user"], rows.next_obs["user"]
    assert len(np.unique(user)) > 3
    np.testing.assert_array_equal(rows.obs["action_mask"], tables.known[user])
    np.testing.assert_array_equal(rows.next_obs["action_mask"], tables.known[next_user])
    assert tables.known[user, rows.action].all()
    np.testing.assert_array_equal(rows.reward, tables.feedback[user, rows.action])


LARGE = 2**53


@pytest.mark.filterwarnings("ignore:Dropped .* missing_id")
@pytest.mark.parametrize(
    ("users", "ids"),
    [
        ([LARGE, LARGE + 1, None], [LARGE, LARGE + 1]),
        (np.array([3.0, np.nan]), [3]),  # floats are integers again
    ],
)
def test_integer_ids_with_missing_values(users, ids):
    number = np.arange(len(users))
    tables = from_interactions((users, number, number), missing=0)
    assert tables.users.dtype == np.int64
    assert tables.users.tolist() == ids
    np.testing.assert_array_equal(tables.feedback.diagonal(), number[: len(ids)])


@pytest.mark.parametrize(
    ("texts", "ids"),
    [
        (["007", "7"], ["007", "7"]),
        (["10", "9"], [9, 10]),
        (["7.0", "-8"], [-8, 7]),
        ([str(LARGE), str(LARGE + 1)], [LARGE, LARGE + 1]),
    ],
)
def test_ids_of_a_file_keep_their_text(tmp_path, texts, ids):
    path = tmp_path / "log.csv"
    rows = [f"{x},a,{number}" for number, x in enumerate(texts)]
    path.write_text("\n".join(["user_id,item_id,feedback", *rows]))
    tables = from_interactions(path, missing=0)
    assert tables.users.tolist() == ids
