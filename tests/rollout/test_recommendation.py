"""Recommendation: every row, mask, length and metric is that of a plain loop."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from plain_recommendation import Model, Setting, metrics

import rollout
from rollout import buffers, envs, recommendation

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
CATALOGUE = recommendation.Catalogue(
    features=RNG.normal(size=(NUM_ITEMS, 3)).astype(np.float32),
    popularity=RNG.uniform(0.1, 1.0, NUM_ITEMS).astype(np.float32),
    dominated=RNG.random(NUM_ITEMS) < 0.4,
)


def score(params, obs):
    """A score of each item, by the user and the last item; most are negative."""
    return params[obs["user"], obs["item"]]


def read_mask(obs):
    return obs["action_mask"]


KEY = jax.random.key(0)
POLICY = recommendation.item_policy(score)
RANDOM = rollout.random_policy(envs.Discrete(NUM_ITEMS), action_mask_fn=read_mask)


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


def evaluate(settings, num, catalogue=None):
    """The metrics of settings, with or without tables of the catalogue."""
    given = settings, SCORES, KEY, num
    return recommendation.evaluate_settings(*given, catalogue=catalogue)


def make_collector(env, num_lanes=NUM_LANES, policy=POLICY, **options):
    vector = envs.vectorize(env, num_lanes, **options)
    return rollout.Collector(env=vector, policy=policy)


@functools.partial(quick_jit, static_argnames="num_episodes")
def play(collectors, num_episodes=NUM_EPISODES):
    """By name the rows of episodes, padded, and their table, from one key."""

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
def played(collectors):
    return jax.device_get(play(collectors))


@pytest.mark.parametrize("name", list(SETTINGS))
def test_rows_are_those_of_a_plain_loop(played, name):
    setting = SETTINGS[name]
    rows, episodes = played[name]
    lengths = []
    for number in range(NUM_EPISODES):
        played = MODEL.play(SCORES, int(rows.obs["user"][0, number]), setting)
        length = len(played.item)
        lengths.append(length)
        here = jax.tree.map(lambda x, at=number: x[: x.shape[0], at], rows)
        assert here.mask.sum() == length
        np.testing.assert_array_equal(here.action[:length], played.item)
        np.testing.assert_array_equal(here.reward[:length], played.reward)
        np.testing.assert_array_equal(here.obs["item"][:length], played.last)
        np.testing.assert_array_equal(here.obs["action_mask"][:length], played.mask)
        np.testing.assert_array_equal(here.next_obs["item"][:length], played.item)
        np.testing.assert_array_equal(here.next_obs["user"][:length], played.user)
        is_left = here.terminated | here.truncated
        if setting.force_length:
            is_left = here.info["left"]
            assert not here.terminated.any()
            assert here.truncated[:length].tolist() == [False] * (length - 1) + [True]
        np.testing.assert_array_equal(is_left[:length], played.left)
        total = np.float32(0)
        for reward in played.reward:
            total += reward
        assert episodes.episode_return[number] == total
    np.testing.assert_array_equal(episodes.episode_length, lengths)


def test_metrics_are_those_of_all_episodes_in_a_plain_loop(collectors, played):
    stats = evaluate(collectors, NUM_EPISODES, CATALOGUE)
    assert list(stats) == list(SETTINGS)
    tables = CATALOGUE.features, CATALOGUE.popularity, CATALOGUE.dominated
    for name, setting in SETTINGS.items():
        rows, _ = played[name]
        users = rows.obs["user"][0]
        episodes = [MODEL.play(SCORES, int(user), setting) for user in users]
        wanted = metrics(episodes, NUM_ITEMS, *tables)
        for metric, value in wanted.items():
            np.testing.assert_allclose(getattr(stats[name], metric), value, rtol=1e-5)
        lengths = [len(played.item) for played in episodes]
        assert stats[name].episodes.lengths.mean == np.float32(np.mean(lengths))
        assert stats[name].episodes.num_episodes == NUM_EPISODES


def test_metric_without_its_table_is_none(collectors):
    shapes = jax.eval_shape(lambda: evaluate({"FB": collectors["FB"]}, 3))
    stats = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    assert stats["FB"].diversity is stats["FB"].novelty is None
    logged = rollout.log_stats(stats, prefix="test/")
    assert "test/FB/click_through_rate" in logged
    assert "test/FB/novelty" not in logged


@pytest.mark.slow
def test_last_reward_reaches_the_policy():
    env = envs.wrappers.ObservePrevious(make_env())
    collector = make_collector(env, policy=rollout.random_policy(env.action_space))
    rows = jax.device_get(collect(collector, jax.random.key(0), None, 50))
    shown = rows.obs["reward"][1:]
    wanted = jnp.where(rows.first[1:], 0.0, rows.reward[:-1])
    np.testing.assert_array_equal(shown, wanted)
    assert np.count_nonzero(shown) > 100


def test_new_episode_begins_with_its_own_observation(collectors):
    rows = jax.device_get(collect(collectors["NX_0"], KEY, SCORES, 60))
    first = rows.first
    assert first.sum() > 5 * NUM_LANES
    assert (rows.obs["item"][first] == NUM_ITEMS).all()
    assert rows.obs["action_mask"][first].all()  # nothing of the episode before
    follows = ~first[1:]
    for name in ("user", "item", "action_mask"):
        old, new = rows.next_obs[name][:-1], rows.obs[name][1:]
        np.testing.assert_array_equal(old[follows], new[follows])


def test_forced_length_is_that_of_each_episode():
    env = make_settings(force_length=3)["NX_3"]
    collector = make_collector(env, num_lanes=2)
    run = quick_jit(lambda carry: collector.collect_steps(carry, SCORES, 2))
    carry, flags = collector.init(jax.random.key(0)), []
    for _ in range(3):  # a call does not start over
        carry, rows = run(carry)
        flags.extend(rows.truncated.tolist())
    assert flags == [[x, x] for x in [False, False, True] * 2]


@pytest.mark.slow
def test_random_first_item_is_not_shown_again():
    env = make_settings(random_first=True, force_length=5)["NX_5"]
    played = jax.device_get(play({"once": make_collector(env)}, num_episodes=50))
    rows, _ = played["once"]
    first = rows.obs["item"][0]
    assert len(set(first.tolist())) > 5
    assert not (rows.action[:5] == first).any()
    assert not rows.obs["action_mask"][0][np.arange(50), first].any()


@pytest.mark.slow
def test_items_that_are_used_up_are_flagged():
    env = envs.wrappers.FixedLength(envs.wrappers.NoRepeat(make_env()), NUM_ITEMS + 3)
    setting = Setting(no_repeats=True, force_length=NUM_ITEMS + 3)
    collector = make_collector(env)
    # One episode of every lane.
    rows = jax.device_get(collect(collector, KEY, SCORES, NUM_ITEMS + 3))
    flags = rows.extras["no_valid_action"]
    assert flags[NUM_ITEMS:].all()
    assert flags.sum() == 3 * NUM_LANES
    assert np.isfinite(rows.extras["log_prob"]).all()
    played = MODEL.play(SCORES, int(rows.obs["user"][0, 0]), setting)
    assert rows.action[:, 0].tolist() == played.item
    stats = evaluate({"all": collector}, 20, CATALOGUE)["all"]
    assert stats.no_valid_action_share == np.float32(3 / (NUM_ITEMS + 3))
    assert all(np.isfinite(x) for x in rollout.log_stats(stats).values())


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("policy", ["softmax", "greedy", "random"])
def test_compact_is_select_and_lanes_do_not_matter(policy):
    made = {
        "greedy": POLICY,
        "softmax": recommendation.item_policy(score, sample=True),
        "random": RANDOM,
    }[policy]
    env, rows = make_settings()["NX_0"], []
    for num_lanes, auto_reset in ((64, "compact"), (64, "select"), (1, "compact")):
        collector = make_collector(env, num_lanes, made, auto_reset=auto_reset)
        rows.append(jax.device_get(collect(collector, jax.random.key(1), SCORES, 40)))
    jax.tree.map(np.testing.assert_array_equal, rows[0], rows[1])
    first = jax.tree.map(lambda x: x[:, :1], rows[0])
    first, alone = (x.replace(episode_id=None) for x in (first, rows[2]))
    jax.tree.map(np.testing.assert_array_equal, first, alone)


def over_four_devices(collector):
    mesh = jax.make_mesh((4,), ("lanes",), devices=jax.devices()[:4])
    return rollout.shard(collector, mesh)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_rows_without_jit_over_devices_and_of_a_stream_are_the_same():
    collector = make_collector(make_settings()["NX_10"])

    def rows_of(collector):
        carry = collector.init(jax.random.key(2))
        return collector.collect_steps(carry, SCORES, 12)[1]

    with jax.disable_jit():
        slow = rows_of(collector)
    sizes = {"steps_per_batch": 4 * NUM_LANES, "total_steps": 12 * NUM_LANES}
    key = jax.random.key(2)
    with rollout.Stream(collector, key=key, params=SCORES, **sizes) as stream:
        batches = [batch.trajectory for batch in stream]
    joined = jax.tree.map(lambda *x: jnp.concatenate(x), *batches)
    rows = rows_of(collector)
    for other in (slow, rows_of(over_four_devices(collector)), joined):
        jax.tree.map(np.testing.assert_array_equal, rows, other)


@pytest.mark.slow
def test_devices_ask_each_other_nothing_about_many_items():
    feedback = RNG.random((5, 300), np.float32)
    env = envs.wrappers.NoRepeat(
        envs.recommendation.RecommendationEnv(feedback, max_turn=8)
    )
    policy = rollout.random_policy(env.action_space, action_mask_fn=read_mask)
    alone = make_collector(env, policy=policy)
    rows = []
    for collector in (alone, over_four_devices(alone)):
        carry = collector.init(jax.random.key(0))
        run = jax.jit(lambda carry, x=collector: x.collect_steps(carry, None, 10)[1])
        compiled = run.lower(carry).compile()
        assert not re.search(r"all-\w+\(|collective-\w+\(", compiled.as_text())
        rows.append(compiled(carry))
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get(rows))


def without_history(row):
    """The ring's rows: the last item and reward, and the starts of episodes."""
    short = lambda obs: {  # noqa: E731
        "item": obs["obs"]["obs"]["item"],
        "reward": obs["obs"]["reward"],
        "first": obs["obs"]["first"],
        "wanted": {name: obs[name] for name in ("actions", "rewards", "length")},
    }
    return row.replace(obs=short(row.obs), next_obs=short(row.next_obs))


@pytest.mark.slow
def test_history_is_rebuilt_from_the_ring():
    window = 4
    env = envs.wrappers.ObservePrevious(envs.wrappers.NoRepeat(make_env()))
    env = envs.wrappers.History(env, window)
    collector = rollout.Collector(
        env=envs.vectorize(env, NUM_LANES),
        policy=rollout.random_policy(env.action_space),
        record_fn=without_history,
    )
    buffer = buffers.ReplayBuffer(NUM_LANES * 30, NUM_LANES, stack=window)

    @quick_jit
    def run(key):
        _, rows = collector.collect_steps(collector.init(key), None, 50)
        state = buffer.add(buffer.init(collector), rows)
        batch = buffer.sample(state, jax.random.key(1), 200)
        return batch, buffer.sample_sequences(state, jax.random.key(2), 50, window + 1)

    batch, pieces = jax.device_get(run(jax.random.key(0)))
    for obs in (batch.experience.obs, batch.experience.next_obs):
        for number in np.flatnonzero(batch.weights):
            one = jax.tree.map(lambda x, at=number: x[at], obs)
            wanted = jax.tree.map(lambda x: x[-1], one["wanted"])
            # A frame that begins an episode, or repeats one that does, shows no item.
            shown = ~one["first"]
            length = wanted["length"]
            assert shown.sum() == length
            assert one["item"][shown].tolist() == wanted["actions"][:length].tolist()
            assert one["reward"][shown].tolist() == wanted["rewards"][:length].tolist()
    # A piece has them from its first row on.
    rows = pieces.experience
    for number in range(50):
        for step in range(1, window + 1):
            if not pieces.mask[step, number]:
                break
            length = rows.obs["wanted"]["length"][step, number]
            wanted = rows.obs["wanted"]["actions"][step, number, :length]
            got = rows.action[max(0, step - window) : step, number]
            assert got.tolist() == wanted[length - len(got) :].tolist()


@pytest.mark.slow
def test_tables_of_a_catalogue_may_be_lists():
    settings = {"FB": make_collector(make_env())}
    lists = {name: table.tolist() for name, table in vars(CATALOGUE).items()}
    got = evaluate(settings, 4, recommendation.Catalogue(**lists))
    want = evaluate(settings, 4, CATALOGUE)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def evaluate_with(**tables):
    settings = {"FB": make_collector(make_env())}
    return evaluate(settings, 2, recommendation.Catalogue(**tables))


PENDULUM = envs.make("Pendulum-v1")


def pendulum():
    policy = rollout.random_policy(PENDULUM.action_space)
    return {"FB": make_collector(PENDULUM, policy=policy)}


ITEMS = "must have items as actions, a `Discrete` space, got Box"
REFUSED = [
    (lambda: make_settings(0), "`force_length` must be an int of at least 1, got 0"),
    (lambda: evaluate_with(popularity=np.ones(3)), "one entry for each of 12 items"),
    (lambda: evaluate([], 4), "`settings` must be a dict, got list"),
    (lambda: evaluate(pendulum(), 2), f"`settings['FB']` {ITEMS}"),
    (
        lambda: recommendation.recommendation_settings(PENDULUM),
        "`env` must have a discrete action space, got Box",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
