"""Compares recommendation environments and metrics with a plain loop."""

import functools

import jax
import numpy as np
import pytest
from cases import quick_jit
from plain_recommendation import Model, Setting, metrics

import rollout
from rollout import envs, recommendation

NUM_USERS, NUM_ITEMS, NUM_LANES, NUM_EPISODES = 7, 12, 8, 200
SETTINGS = {
    "FB": Setting(no_repeats=False),
    "NX_0": Setting(no_repeats=True),
    "NX_10": Setting(no_repeats=True, force_length=10),
}
RNG = np.random.default_rng(0)
MODEL = Model(
    feedback=RNG.normal(size=(NUM_USERS, NUM_ITEMS)).astype(np.float32),
    categories=RNG.random((NUM_ITEMS, 5)) < 0.3,
    window=5,
    threshold=2,
    max_turn=9,
)
SCORES = RNG.normal(size=(NUM_USERS, NUM_ITEMS + 1, NUM_ITEMS)).astype(np.float32)
CATALOG = recommendation.Catalog(
    features=RNG.normal(size=(NUM_ITEMS, 3)).astype(np.float32),
    popularity=RNG.uniform(0.1, 1.0, NUM_ITEMS).astype(np.float32),
    dominated=RNG.random(NUM_ITEMS) < 0.4,
)


def score(params, obs):
    """Returns the score of each item by user and last item. Most are negative."""
    return params[obs["user"], obs["item"]]


def read_mask(obs):
    return obs["action_mask"]


KEY = jax.random.key(0)
POLICY = recommendation.item_policy(score)


def make_env(model=MODEL, **options):
    rule = model.categories, model.window, model.threshold
    return envs.recommendation.RecommendationEnv(
        model.feedback,
        envs.recommendation.LeaveByCategory(*rule),
        max_turn=model.max_turn,
        **options,
    )


def make_settings(force_length=10, **options):
    return recommendation.recommendation_settings(make_env(**options), force_length)


def evaluate(settings, num, catalog=None):
    """Evaluates settings with or without tables of the catalog."""
    args = settings, SCORES, KEY, num
    return recommendation.evaluate_settings(*args, catalog=catalog)


def make_collector(env, num_lanes=NUM_LANES, policy=POLICY, **options):
    vector = envs.vectorize(env, num_lanes, **options)
    return rollout.Collector(env=vector, policy=policy)


@functools.partial(quick_jit, static_argnames="num_episodes")
def play(collectors, num_episodes=NUM_EPISODES):
    """Returns padded rows and the table of episodes by setting."""

    def play_one(collector):
        carry = collector.init(jax.random.key(0))
        _, episodes = collector.collect_episodes(
            carry, SCORES, num_episodes, max_episode_steps=16, return_trajectory=True
        )
        return episodes.trajectory, episodes

    return {name: play_one(collector) for name, collector in collectors.items()}


@functools.partial(quick_jit, static_argnames="num_steps")
def collect(collector, key, params, num_steps):
    return collector.collect_steps(collector.init(key), params, num_steps)[1]


@pytest.fixture(scope="module")
def collectors():
    return {name: make_collector(env) for name, env in make_settings().items()}


@pytest.fixture(scope="module")
def results(collectors):
    return jax.device_get(play(collectors))


@pytest.mark.parametrize("name", list(SETTINGS))
def test_rows_equal_a_plain_loop(results, name):
    setting = SETTINGS[name]
    rows, episodes = results[name]
    lengths = []
    for number in range(NUM_EPISODES):
        episode = MODEL.play(SCORES, int(rows.obs["user"][0, number]), setting)
        length = len(episode.item)
        lengths.append(length)
        lane_rows = jax.tree.map(lambda x, lane=number: x[: x.shape[0], lane], rows)
        assert lane_rows.mask.sum() == length
        np.testing.assert_array_equal(lane_rows.action[:length], episode.item)
        np.testing.assert_array_equal(lane_rows.reward[:length], episode.reward)
        np.testing.assert_array_equal(lane_rows.obs["item"][:length], episode.last)
        np.testing.assert_array_equal(
            lane_rows.obs["action_mask"][:length], episode.mask
        )
        np.testing.assert_array_equal(lane_rows.next_obs["item"][:length], episode.item)
        np.testing.assert_array_equal(lane_rows.next_obs["user"][:length], episode.user)
        is_left = lane_rows.terminated | lane_rows.truncated
        if setting.force_length:
            is_left = lane_rows.info["left"]
            assert not lane_rows.terminated.any()
            flags = [False] * (length - 1) + [True]
            assert lane_rows.truncated[:length].tolist() == flags
        np.testing.assert_array_equal(is_left[:length], episode.has_left)
        total = np.float32(0)
        for reward in episode.reward:
            total += reward
        assert episodes.episode_return[number] == total
    np.testing.assert_array_equal(episodes.episode_length, lengths)


def test_metrics_equal_a_plain_loop(collectors, results):
    stats = evaluate(collectors, NUM_EPISODES, CATALOG)
    assert list(stats) == list(SETTINGS)
    tables = CATALOG.features, CATALOG.popularity, CATALOG.dominated
    for name, setting in SETTINGS.items():
        rows, _ = results[name]
        users = rows.obs["user"][0]
        episodes = [MODEL.play(SCORES, int(user), setting) for user in users]
        expected = metrics(episodes, NUM_ITEMS, *tables)
        for metric, value in expected.items():
            np.testing.assert_allclose(getattr(stats[name], metric), value, rtol=1e-5)
        lengths = [len(episode.item) for episode in episodes]
        assert stats[name].episodes.lengths.mean == np.float32(np.mean(lengths))
        assert stats[name].episodes.num_episodes == NUM_EPISODES


def test_metric_without_a_table_is_none(collectors):
    shapes = jax.eval_shape(lambda: evaluate({"FB": collectors["FB"]}, 3))
    stats = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    assert stats["FB"].diversity is stats["FB"].novelty is None
    logged = rollout.log_stats(stats, prefix="test/")
    assert "test/FB/click_through_rate" in logged
    assert "test/FB/novelty" not in logged


def test_force_length_fixes_every_episode_length():
    env = make_settings(force_length=3)["NX_3"]
    collector = make_collector(env, num_lanes=2)
    run = quick_jit(lambda carry: collector.collect_steps(carry, SCORES, 2))
    carry, flags = collector.init(jax.random.key(0)), []
    for _ in range(3):  # each call continues the episodes
        carry, rows = run(carry)
        flags.extend(rows.truncated.tolist())
    assert flags == [[x, x] for x in [False, False, True] * 2]


@pytest.mark.slow
def test_random_first_item_is_not_repeated():
    env = make_settings(random_first=True, force_length=5)["NX_5"]
    results = jax.device_get(play({"once": make_collector(env)}, num_episodes=50))
    rows, _ = results["once"]
    first = rows.obs["item"][0]
    assert len(set(first.tolist())) > 5
    assert not (rows.action[:5] == first).any()
    assert not rows.obs["action_mask"][0][np.arange(50), first].any()


@pytest.mark.slow
def test_exhausted_items_set_no_valid_action():
    env = envs.wrappers.FixedLength(envs.wrappers.NoRepeat(make_env()), NUM_ITEMS + 3)
    setting = Setting(no_repeats=True, force_length=NUM_ITEMS + 3)
    collector = make_collector(env)
    # Every lane plays one episode.
    rows = jax.device_get(collect(collector, KEY, SCORES, NUM_ITEMS + 3))
    flags = rows.extras["no_valid_action"]
    assert flags[NUM_ITEMS:].all()
    assert flags.sum() == 3 * NUM_LANES
    assert np.isfinite(rows.extras["log_prob"]).all()
    episode = MODEL.play(SCORES, int(rows.obs["user"][0, 0]), setting)
    assert rows.action[:, 0].tolist() == episode.item
    stats = evaluate({"all": collector}, 20, CATALOG)["all"]
    assert stats.no_valid_action_share == np.float32(3 / (NUM_ITEMS + 3))
    assert all(np.isfinite(x) for x in rollout.log_stats(stats).values())


def test_wrong_tables_and_actions_raise():
    settings = {"FB": make_collector(make_env())}
    short = recommendation.Catalog(popularity=np.ones(3))
    with pytest.raises(ValueError, match="must have one entry for each of 12 items"):
        evaluate(settings, 2, short)
    pendulum = envs.make("Pendulum-v1")
    policy = rollout.random_policy(pendulum.action_space)
    with pytest.raises(ValueError, match=r"must have items as actions, .* got Box"):
        evaluate({"FB": make_collector(pendulum, policy=policy)}, 2)
