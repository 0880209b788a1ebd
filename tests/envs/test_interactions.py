"""Logs as tables: against a dictionary of rows, and what is dropped or refused."""

import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import envs
import rollout

MEAN_RTOL = 1e-6  # sums of some numbers in float64, rounded to float32
NOTHING = {
    "missing_id": 0,
    "missing_timestamp": 0,
    "nonfinite_feedback": 0,
    "duplicate": 0,
}


def make_log(num_rows=200, num_users=12, num_items=15, seed=0):
    """Columns, with gaps in the ids and about two rows for each of many pairs."""
    rng = np.random.default_rng(seed)
    return {
        "user_id": 7 * rng.integers(0, num_users, num_rows) - 3,
        "item_id": np.array([f"i{x}" for x in rng.integers(0, num_items, num_rows)]),
        "feedback": rng.normal(size=num_rows),
        "time": rng.integers(0, 5, num_rows),
    }


LOG = make_log()


def rows_of(log):
    """For each pair of ids, its feedback with the time, in the order of rows."""
    found = {}
    for user, item, feedback, time in zip(*log.values(), strict=True):
        found.setdefault((user, str(item)), []).append((time, feedback))
    return found


def check_known(tables, model):
    """Compares known pairs with a dictionary of ids to feedback."""
    assert np.sum(tables.known) == len(model)
    for (user, item), value in model.items():
        place = list(tables.users).index(user), list(tables.items).index(item)
        assert tables.known[place]
        np.testing.assert_allclose(tables.feedback[place], value, rtol=MEAN_RTOL)


def read_last(data, **options):
    """Reads with the last row of each pair, of which there are several."""
    with pytest.warns(UserWarning, match="duplicate"):
        return envs.from_interactions(data, duplicates="last", missing=0.0, **options)


def columns(user, item, feedback):
    return np.array(user), np.array(item), np.array(feedback)


def test_several_rows_of_a_pair_count_by_their_mean():
    tables = envs.from_interactions(LOG, missing=0.0)
    model = {pair: np.mean([x for _, x in rows]) for pair, rows in rows_of(LOG).items()}
    assert len(model) < len(LOG["time"])
    check_known(tables, model)
    assert tables.num_dropped == NOTHING


def test_last_row_of_a_pair_counts():
    tables = read_last(LOG)
    model = {pair: rows[-1][1] for pair, rows in rows_of(LOG).items()}
    check_known(tables, model)
    num_dropped = len(LOG["time"]) - len(model)
    assert tables.num_dropped == {**NOTHING, "duplicate": num_dropped}


def test_row_of_the_latest_time_counts_and_of_equal_times_the_later_row():
    model = {}
    for pair, rows in rows_of(LOG).items():
        latest = max(time for time, _ in rows)
        model[pair] = [x for time, x in rows if time == latest][-1]
    check_known(read_last(LOG, timestamp="time"), model)
    assert model != {pair: rows[-1][1] for pair, rows in rows_of(LOG).items()}


def test_times_are_dates_too():
    data = (["u", "u"], ["i", "i"], [1, 2], np.array(["2021", "2020"], "M8[D]"))
    assert read_last(data, timestamp="time").feedback == 1.0


def test_pair_of_several_rows_can_be_an_error():
    data = columns([1, 2, 2, 1, 2], ["a", "b", "c", "a", "b"], [1, 2, 3, 4, 5])
    message = "each pair once, got another row of user 1 and item a, and 1 more"
    with pytest.raises(ValueError, match=message):
        envs.from_interactions(data, missing=0, duplicates="error")
    once = tuple(column[:3] for column in data)
    tables = envs.from_interactions(once, missing=0, duplicates="error")
    np.testing.assert_array_equal(tables.feedback, [[1, 0, 0], [0, 2, 3]])


def test_ids_are_numbered_in_sorted_order():
    tables = envs.from_interactions(LOG, missing=0.0)
    assert list(tables.users) == sorted(set(LOG["user_id"]))
    assert list(tables.items) == sorted(set(LOG["item_id"]))
    assert tables.feedback.shape == (len(tables.users), len(tables.items))
    assert (tables.feedback.dtype, tables.known.dtype) == (np.float32, bool)


def test_ids_may_be_tuples_or_dates():
    data = {
        "user_id": [("b", 1), ("a", 2), ("b", 1)],
        "item_id": np.array(["2021", "2020", "2020"], "M8[D]"),
        "feedback": [1, 2, 3],
    }
    tables = envs.from_interactions(data, missing=0)
    assert list(tables.users) == [("a", 2), ("b", 1)]
    assert list(tables.items.astype(str)) == ["2020-01-01", "2021-01-01"]
    np.testing.assert_array_equal(tables.feedback, [[2, 0], [3, 1]])


def test_popularity_is_the_share_of_users_who_know_an_item():
    tables = envs.from_interactions(LOG, missing=0.0)
    for number, item in enumerate(tables.items):
        users = {user for user, x in rows_of(LOG) if x == item}
        share = np.float32(len(users) / len(tables.users))
        assert tables.popularity[number] == share > 0
    assert tables.popularity.dtype == np.float32


def test_pairs_that_are_not_known_get_a_number():
    tables = envs.from_interactions(LOG, missing=-2.5)
    assert not tables.known.all()
    np.testing.assert_array_equal(tables.feedback[~tables.known], -2.5)


@pytest.mark.parametrize(("missing", "axis"), [("user_mean", 0), ("item_mean", 1)])
def test_pairs_that_are_not_known_get_the_mean_of_known_ones(missing, axis):
    tables = envs.from_interactions(LOG, missing=missing)
    found = rows_of(LOG)
    check_known(tables, {pair: np.mean([x for _, x in found[pair]]) for pair in found})
    ids = tables.users, tables.items
    for place in np.argwhere(~tables.known):
        own = ids[axis][place[axis]]
        known = [
            np.mean([x for _, x in rows])
            for pair, rows in found.items()
            if pair[axis] == own
        ]
        want = np.mean(known)
        # Means of both signs may be close to zero.
        np.testing.assert_allclose(tables.feedback[tuple(place)], want, atol=1e-6)


def test_with_mask_pairs_that_are_not_known_are_zero():
    tables = envs.from_interactions(LOG, missing="mask")
    np.testing.assert_array_equal(tables.feedback[~tables.known], 0.0)
    check_known(
        tables,
        {pair: np.mean([x for _, x in rows]) for pair, rows in rows_of(LOG).items()},
    )


def test_path_frame_mapping_and_tuple_give_the_same(tmp_path):
    path = tmp_path / "ratings.csv"
    frame = pd.DataFrame({"extra": 1, **LOG})[[*LOG, "extra"]]
    frame.to_csv(path, index=False)
    want = envs.from_interactions(LOG, missing="user_mean")
    of_tuple = tuple(LOG[name] for name in ("user_id", "item_id", "feedback"))
    for data in (path, str(path), frame, frame[::-1][::-1], of_tuple):
        got = envs.from_interactions(data, missing="user_mean")
        for name in ("feedback", "known", "users", "items", "popularity"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_columns_have_the_names_that_are_given():
    data = {"who": LOG["user_id"], "what": LOG["item_id"], "stars": LOG["feedback"]}
    names = {"user": "who", "item": "what", "feedback": "stars"}
    got = envs.from_interactions(data, missing=0.0, **names)
    want = envs.from_interactions(LOG, missing=0.0)
    np.testing.assert_array_equal(got.feedback, want.feedback)


def test_rows_without_an_id_or_finite_feedback_are_dropped_with_one_warning():
    user = [1, None, 2, 2, 3, None]
    item = ["a", "a", float("nan"), "b", "c", "c"]
    feedback = [1.0, 2.0, 3.0, 4.0, np.inf, np.nan]
    message = "lost 4 of 6 rows: 3 missing_id, 1 nonfinite_feedback"
    with pytest.warns(UserWarning, match=message) as caught:
        tables = envs.from_interactions((user, item, feedback), missing=0)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert list(tables.users) == [1, 2]
    assert list(tables.items) == ["a", "b"]
    np.testing.assert_array_equal(tables.feedback, [[1, 0], [0, 4]])
    assert tables.num_dropped == {**NOTHING, "missing_id": 3, "nonfinite_feedback": 1}


def test_feedback_that_float32_does_not_reach_is_not_finite():
    with pytest.warns(UserWarning, match="1 nonfinite_feedback"):
        tables = envs.from_interactions(columns([1, 2], [1, 2], [1e300, 1]), missing=0)
    assert list(tables.users) == [2]


def test_row_without_a_time_is_dropped():
    frame = pd.DataFrame(
        {
            "user_id": [1, 1, 2],
            "item_id": [1, 1, 2],
            "feedback": [1, 2, 3],
            "at": [0, None, 1],
        }
    )
    with pytest.warns(UserWarning, match="lost 1 of 3 rows: 1 missing_timestamp"):
        tables = envs.from_interactions(
            frame, missing=0, duplicates="last", timestamp="at"
        )
    np.testing.assert_array_equal(tables.feedback, [[1, 0], [0, 3]])


def test_file_with_gaps_keeps_integer_ids(tmp_path):
    path = tmp_path / "ratings.csv"
    # 2^53 + 1 is no float64.
    path.write_text(
        "user_id,item_id,feedback\n9007199254740993,a,1.5\n,b,2\n5,,3\n5,b,\n5,b,4\n"
    )
    with pytest.warns(UserWarning, match="2 missing_id, 1 nonfinite_feedback"):
        tables = envs.from_interactions(path, missing=0)
    assert list(tables.users) == [5, 9007199254740993]
    assert tables.users.dtype == np.int64
    np.testing.assert_array_equal(tables.feedback, [[0, 4], [1.5, 0]])


def test_file_with_a_word_as_feedback_is_refused(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text("user_id,item_id,feedback\n1,a,1.5\n1,b,\n2,b,five\n")
    with pytest.raises(ValueError, match="as 'feedback', got 'five' in row 2"):
        envs.from_interactions(path, missing=0)


def test_missing_values_of_pandas_are_missing():
    frame = pd.DataFrame(
        {
            "user_id": pd.array([1, None, 3], "Int64"),
            "item_id": pd.Categorical(["a", "b", None]),
            "feedback": pd.array([True, True, None], "boolean"),
        },
        index=[7, 7, 7],
    )
    of_objects = {name: frame[name].to_numpy(object) for name in frame}
    for data in (frame, of_objects, dict(frame)):
        with pytest.warns(UserWarning, match="2 missing_id"):
            tables = envs.from_interactions(data, missing=0)
        assert (list(tables.users), list(tables.items)) == ([1], ["a"])
        assert tables.feedback == 1.0


def test_what_is_whole_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs.from_interactions(LOG, missing=0.0)


def test_column_that_is_not_there_is_named(tmp_path):
    message = "`data` must have the column 'rating', got user_id, item_id, feedback"
    path = tmp_path / "ratings.csv"
    pd.DataFrame(LOG).to_csv(path, index=False)
    for data in (LOG, pd.DataFrame(LOG), path):
        with pytest.raises(ValueError, match=message):
            envs.from_interactions(data, missing=0, feedback="rating")


def test_tuple_has_a_column_for_each_name():
    with pytest.raises(
        ValueError, match="must have 3 columns, user_id, item_id, feedback"
    ):
        envs.from_interactions(([1], [2]), missing=0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "`data` must be a path, a DataFrame, a mapping or a tuple .*, got int"),
        (([1, 2], [1], [1]), r"one length, got \(2,\), \(1,\), \(1,\)"),
        ((np.ones((2, 2)), [1], [1]), r"1-D columns .* got \(2, 2\), \(1,\), \(1,\)"),
        ((1, [1], [1]), "1-D columns, got int for 'user_id'"),
        ((["a", 1], [1, 1], [1, 1]), "hashed and sorted as 'user_id', got an error"),
        (([{}], [1], [1]), "hashed and sorted as 'user_id', got an error"),
        (([1, 2], [1, 2], [1, "five"]), "numbers as 'feedback', got 'five' in row 1"),
        (([], [], []), "must have a row .*, got none in 0 rows"),
        (([1, None], [1, 1], [np.nan, 1]), "must have a row .*, got none in 2 rows"),
    ],
)
def test_data_that_cannot_be_read_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        envs.from_interactions(data, missing=0)


@pytest.mark.parametrize("missing", ["mean", None, True, np.nan, 1e300, np.ones(2)])
def test_missing_must_be_a_number_or_a_way(missing):
    message = "`missing` must be a finite number or one of user_mean, item_mean, mask"
    with pytest.raises(ValueError, match=message):
        envs.from_interactions(LOG, missing=missing)


def test_way_to_complete_must_be_said():
    with pytest.raises(TypeError, match="missing"):
        envs.from_interactions(LOG)


def test_duplicates_must_be_a_way():
    with pytest.raises(ValueError, match="`duplicates` must be one of mean, last"):
        envs.from_interactions(LOG, missing=0, duplicates="first")


def test_timestamp_is_for_the_last_row_only():
    with pytest.raises(ValueError, match="unless `duplicates` is \"last\", got 'time'"):
        envs.from_interactions(LOG, missing=0, timestamp="time")


def test_a_file_needs_pandas_and_arrays_do_not(monkeypatch, tmp_path):
    def import_module(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ImportError, match=r'pip install "rollout\[recommend\]"'):
        envs.from_interactions(tmp_path / "ratings.csv", missing=0)
    assert envs.from_interactions(LOG, missing=0).known.any()


def test_tables_make_an_environment_with_the_feedback_of_ids():
    tables = envs.from_interactions(LOG, missing="user_mean")
    env = envs.RecommendationEnv(tables.feedback)
    state, obs = env.reset(jax.random.key(0))
    assert obs["mask"].all()
    for item in range(len(tables.items)):
        result = env.step(jax.random.key(1), state, jnp.int32(item))
        assert result.reward == tables.feedback[obs["user"], item]


def test_mask_of_the_environment_is_what_is_known_of_the_user():
    tables = envs.from_interactions(LOG, missing="mask")
    env = envs.RecommendationEnv(tables.feedback, max_turn=3, known=tables.known)
    policy = rollout.item_policy(lambda params, obs: jnp.zeros(obs["mask"].shape))
    collector = rollout.Collector(env=envs.vectorize(env, 8), policy=policy)
    carry = collector.init(jax.random.key(0))
    _, rows = jax.device_get(collector.collect_steps(carry, None, 12))
    assert len(np.unique(rows.obs["user"])) > 3
    np.testing.assert_array_equal(rows.obs["mask"], tables.known[rows.obs["user"]])
    np.testing.assert_array_equal(
        rows.next_obs["mask"], tables.known[rows.next_obs["user"]]
    )
    assert tables.known[rows.obs["user"], rows.action].all()


def test_item_outside_of_the_mask_may_be_recommended():
    known = np.array([[True, False]])
    env = envs.RecommendationEnv(np.array([[1.0, 2.0]]), known=known)
    state, obs = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs["mask"], known[0])
    result = env.step(jax.random.key(1), state, jnp.int32(1))
    assert result.reward == 2.0
    assert not result.terminated


def test_items_are_shown_once_and_only_those_that_are_known():
    known = np.array([[True, False, True]])
    env = envs.NoRepeat(envs.RecommendationEnv(np.ones((1, 3)), known=known))
    state, obs = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs["mask"], [True, False, True])
    result = env.step(jax.random.key(1), state, jnp.int32(0))
    np.testing.assert_array_equal(result.obs["mask"], [False, False, True])


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (np.ones((2, 4), bool), r"`known` must have the shape \(2, 3\) .* \(2, 4\)"),
        (np.ones((2, 3)), r"`known` must be \[U, I\] bool, got float64"),
        (np.ones(3, bool), r"`known` must be \[U, I\] bool, got bool of shape \(3,\)"),
    ],
)
def test_mask_must_be_of_these_users_and_items(known, message):
    with pytest.raises(ValueError, match=message):
        envs.RecommendationEnv(np.ones((2, 3)), known=known)
    with pytest.raises(ValueError, match=message):
        envs.RecommendationEnv(
            lambda user, item: jnp.float32(0), num_users=2, num_items=3, known=known
        )
