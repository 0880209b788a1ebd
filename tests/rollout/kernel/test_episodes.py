"""Exactly N episodes: which ones, on which lane, whole, and without bias."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CountEnv,
    PlainPolicy,
    TwoLengthEnv,
    last_word,
    make_env,
    raw,
)
from flax import struct

import rollout
from rollout import envs

ENDLESS = 10**12
slow = pytest.mark.slow


def act_and_count(params, obs, count, key):
    """Counts its own steps and records the count."""
    return jnp.zeros(obs.shape[0], jnp.int32), count + 1, {"count": count + 1}


COUNTING = rollout.recurrent_policy(act_and_count, lambda n: jnp.zeros(n, int))


@functools.cache
def make_collector(name="count", num_envs=4, auto_reset="compact"):
    env = TwoLengthEnv() if name == "two lengths" else make_env(name)
    vector_env = envs.vectorize(env, num_envs, auto_reset=auto_reset)
    return rollout.Collector(env=vector_env, policy=COUNTING)


@functools.cache
def fixed_lengths():
    """Lanes 0 to 3 with episodes of 2, 3, 4 and 5 steps, and a carry."""
    length = np.arange(2, 6)
    env = CountEnv(min_length=length, max_length=length, limit=np.full(4, 100))
    vector_env = envs.vectorize_each(env, auto_reset="select")  # compiles faster
    collector = rollout.Collector(env=vector_env, policy=COUNTING)
    return collector, collector.init(jax.random.key(0))


# Which lane plays episode k, and its first and last step (from 1), found by hand: the
# lanes start episodes 0 to 3; lane 0 is free after step 2 and takes 4, lane 1 after 3
# and takes 5; after step 4 lanes 0 and 2 are free and take 6 and 7, lower lane first;
# after 5 lane 3 takes 8; after 6 lanes 0 and 1 take 9 and 10; after 8 lane 0 takes 11.
SCHEDULE = [
    (0, 1, 2),
    (1, 1, 3),
    (2, 1, 4),
    (3, 1, 5),
    (0, 3, 4),
    (1, 4, 6),
    (0, 5, 6),
    (2, 5, 8),
    (3, 6, 10),
    (0, 7, 8),
    (1, 7, 9),
    (0, 9, 10),
]


MAX_ROWS = 40


@functools.partial(jax.jit, static_argnames=("num_episodes", "max_episode_steps"))
def fold(collector, carry, *, num_episodes, max_episode_steps):
    """The carry afterwards, the rows that a fold saw, their number, the episodes."""

    def note(acc, transition):
        rows, step = acc
        return jax.tree.map(lambda x, y: x.at[step].set(y), rows, transition), step + 1

    row = jax.eval_shape(collector.step, carry, None)[1]
    blank = jax.tree.map(lambda x: jnp.zeros((MAX_ROWS, *x.shape), x.dtype), row)
    after, (rows, num_rows), episodes = collector.fold_episodes(
        carry,
        None,
        note,
        (blank, 0),
        num_episodes=num_episodes,
        max_episode_steps=max_episode_steps,
    )
    return after, rows, num_rows, episodes


@functools.cache
def played(num_episodes, max_episode_steps=ENDLESS):
    """The carry after a fold over `fixed_lengths`, its rows and its episodes."""
    after, rows, num_rows, episodes = fold(
        *fixed_lengths(), num_episodes=num_episodes, max_episode_steps=max_episode_steps
    )
    return after, jax.tree.map(lambda x: np.asarray(x)[:num_rows], rows), episodes


# Fewer than lanes, as many, and lanes that play twice to four times.
@pytest.mark.parametrize(
    "num_episodes",
    [pytest.param(1, marks=slow), pytest.param(4, marks=slow), 12],
)
def test_lanes_take_episodes_as_written_down_by_hand(num_episodes):
    _, carry = fixed_lengths()
    schedule = SCHEDULE[:num_episodes]
    num_iterations = max(last for _, _, last in schedule)
    after, rows, episodes = played(num_episodes)
    want = np.zeros((num_iterations, 4), bool)
    for lane, first, last in schedule:
        want[first - 1 : last, lane] = True
    lengths = np.array([last - first + 1 for _, first, last in schedule])
    np.testing.assert_array_equal(rows.mask, want)
    np.testing.assert_array_equal(episodes.lane, [lane for lane, _, _ in schedule])
    np.testing.assert_array_equal(episodes.episode_length, lengths)
    np.testing.assert_array_equal(episodes.episode_return, lengths * (lengths + 1) / 2)
    assert np.all(episodes.finished)
    assert np.all(episodes.terminated)
    assert not np.any(episodes.truncated)
    assert episodes.num_steps == want.sum()
    assert after.step == carry.step + num_iterations


NUM_REPEATS = 300


def mean_length(collector, play, num_steps=0):
    """Mean length over `NUM_REPEATS` repeats, after `num_steps` of `collect_steps`."""

    @jax.jit
    def run(collector, keys):
        def one(key):
            carry = collector.init(key)
            if num_steps:
                carry, _ = collector.collect_steps(carry, None, num_steps)
            episodes = play(collector, carry, None, max_episode_steps=ENDLESS)[1]
            return episodes.episode_length

        return jax.lax.map(one, keys)

    return np.mean(run(collector, jax.random.split(jax.random.key(5), NUM_REPEATS)))


@slow
def test_mean_length_is_not_biased():
    play = functools.partial(rollout.Collector.collect_episodes, num_episodes=6)
    got = mean_length(make_collector("two lengths"), play, num_steps=7)
    # Independent lengths of mean 11 and standard deviation 9. Taking the episodes that
    # end first gives 8.2 for N = 6, and counting unfinished ones gives 18.4 after 7
    # steps: both are more than 4 standard errors off.
    assert abs(got - 11) < 4 * 9 / np.sqrt(NUM_REPEATS * 6)


def test_two_calls_play_the_episodes_of_one_with_numbers_from_0():
    collector, start = fixed_lengths()
    options = {"max_episode_steps": 6, "per_env": True, "return_trajectory": True}
    _, whole = collector.collect_episodes(start, None, 4, **options)
    carry, first = collector.collect_episodes(start, None, 2, **options)
    _, second = collector.collect_episodes(carry, None, 2, **options)
    whole, first, second = (x.trajectory for x in (whole, first, second))
    np.testing.assert_array_equal(whole.episode_id[0], np.arange(16))
    halves = np.concatenate([first.episode_id[0], second.episode_id[0]])
    np.testing.assert_array_equal(halves, whole.episode_id[0])
    got = jnp.concatenate([first.obs, second.obs], axis=1)
    np.testing.assert_array_equal(got, whole.obs)


@slow
def test_mean_over_two_kinds_of_lanes_is_not_biased():
    # Lanes 0 and 2 last 2 or 20 steps, lanes 1 and 3 always 4: mean (11 + 4) / 2.
    env = TwoLengthEnv(
        min_length=jnp.array([2, 4, 2, 4]),
        max_length=jnp.array([20, 4, 20, 4]),
        limit=jnp.full(4, 1000),
    )
    collector = rollout.Collector(env=envs.vectorize_each(env), policy=COUNTING)

    play = functools.partial(
        rollout.Collector.collect_episodes, num_episodes=3, per_env=True
    )
    got = mean_length(collector, play, num_steps=7)
    # Half of the 3600 episodes have standard deviation 9, the others 0.
    assert abs(got - 7.5) < 4 * 9 * np.sqrt(1800) / 3600


def test_every_lane_plays_its_number_of_episodes():
    collector, carry = fixed_lengths()
    for _ in range(2):
        carry, _ = collector.collect_steps(carry, None, 3)
    after, episodes = collector.collect_episodes(
        carry, None, 3, max_episode_steps=6, per_env=True, return_trajectory=True
    )
    rows = episodes.trajectory
    np.testing.assert_array_equal(episodes.lane, list(range(4)) * 3)
    np.testing.assert_array_equal(episodes.episode_length, [2, 3, 4, 5] * 3)
    assert episodes.finished.all()
    assert episodes.num_steps == 3 * (2 + 3 + 4 + 5)
    np.testing.assert_array_equal(np.sum(rows.mask, axis=0), episodes.episode_length)
    # In 6 steps the lanes began episodes 3, 2, 1 and 1 (from 0). Those of the first two
    # have no step yet and come first; of the others the next ones do.
    first = np.array([3, 2, 2, 2]) * 4 + np.arange(4)
    ids = [first, first + 4, first + 8]
    np.testing.assert_array_equal(rows.episode_id[0], np.concatenate(ids))
    assert after.step == carry.step + 15  # the longest lane
    np.testing.assert_array_equal(after.episode.episode_id // 4, [6, 5, 5, 5])


def test_compact_equals_select_bit_for_bit():
    results = []
    for auto_reset in ("compact", "select"):
        collector = make_collector("count", 4, auto_reset)
        start = collector.init(jax.random.key(2))
        results.append(
            raw(collector.collect_episodes(start, None, 9, max_episode_steps=15))
        )
    chex.assert_trees_all_equal(*results)


@pytest.mark.parametrize("per_env", [False, True])
def test_carry_is_ready_for_steps_and_ids_are_never_reused(per_env):
    collector, carry = fixed_lengths()
    seen, num_queued = [], 0
    for _ in range(2):
        start = carry
        carry, trajectory = collector.collect_steps(carry, None, 3)
        assert np.all(trajectory.first[0])
        seen.append(np.unique(trajectory.episode_id))
        carry, _ = collector.collect_episodes(
            carry, None, 3, max_episode_steps=ENDLESS, per_env=per_env
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(raw(start), raw(carry))
        carry, rows, _, _ = fold(
            collector, carry, num_episodes=12, max_episode_steps=ENDLESS
        )
        seen.append(np.unique(rows.episode_id[np.asarray(rows.mask)]))
        num_queued += 12 + (0 if per_env else 3)
    every = np.concatenate(seen)
    assert len(np.unique(every)) == len(every)
    assert carry.next_episode == num_queued


def test_recurrent_count_restarts_at_each_episode_and_in_idle_lanes():
    for max_episode_steps in (ENDLESS, 3):
        _, rows, _ = played(12, max_episode_steps)
        count = rows.extras["count"]
        np.testing.assert_array_equal(count, rows.episode_length)
        assert (count[~rows.mask] == 1).any()  # idle lanes start over, too


def test_max_steps_cuts_and_says_so():
    _, rows, episodes = played(12, max_episode_steps=3)
    # Lanes of 2, 3, 3 (of 4) and 3 (of 5) steps; lane 0 takes 4 after step 2, lanes 1,
    # 2 and 3 take 5, 6 and 7 after 3; lane 0 takes 8 after 4; after 6 all lanes are
    # free and the lower three take the rest.
    lane = np.array([0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 1, 2])
    length, is_whole = np.array([2, 3, 3, 3])[lane], lane < 2
    np.testing.assert_array_equal(episodes.lane, lane)
    np.testing.assert_array_equal(episodes.episode_length, length)
    np.testing.assert_array_equal(episodes.finished, is_whole)
    np.testing.assert_array_equal(episodes.terminated, is_whole)
    assert not np.any(episodes.truncated)  # by the environment
    np.testing.assert_array_equal(episodes.episode_return, length * (length + 1) / 2)
    # In the rows a cut is a truncation.
    is_cut = rows.mask & rows.truncated
    assert is_cut.sum() == (~is_whole).sum()
    assert (rows.episode_length[is_cut] == 3).all()


def test_padded_episodes_hold_every_row_and_are_cut_at_max_length():
    collector, carry = fixed_lengths()

    @jax.jit
    def play(carry):
        carry, episodes = collector.collect_episodes(
            carry, None, 10, max_episode_steps=4, return_trajectory=True
        )
        rows = episodes.trajectory
        return carry, rows, episodes, rollout.summarize(rows).num_episodes

    for call in range(2):
        carry, padded, episodes, num_episodes = jax.device_get(play(carry))
        # Lanes of 2, 3, 4 and 4 (of 5) steps; lane 0 takes 4 after step 2 and lane 1
        # takes 5 after 3; after 4 lanes 0, 2 and 3 take 6, 7 and 8; lane 0 takes 9.
        lane = np.array([0, 1, 2, 3, 0, 1, 0, 2, 3, 0])
        length, is_cut = np.array([2, 3, 4, 4])[lane], lane == 3
        step = np.arange(1, 5)[:, None]
        mask, is_last = step <= length, step == length
        np.testing.assert_array_equal(episodes.lane, lane)
        np.testing.assert_array_equal(episodes.episode_length, length)
        np.testing.assert_array_equal(episodes.finished, ~is_cut)
        np.testing.assert_array_equal(padded.mask, mask)
        np.testing.assert_array_equal(padded.obs[..., 0], np.where(mask, step - 1, 0))
        counts = padded.reward, padded.next_obs[..., 0], padded.extras["count"]
        for counted in (*counts, padded.episode_length):
            np.testing.assert_array_equal(counted, np.where(mask, step, 0))
        np.testing.assert_array_equal(padded.terminated, is_last & ~is_cut)
        np.testing.assert_array_equal(padded.truncated, is_last & is_cut)
        want = np.where(mask, -1 - 10 * call - np.arange(10)[None], 0)
        np.testing.assert_array_equal(padded.episode_id, want)
        assert num_episodes == 10


def play_alone(env, root, num_episodes):
    """Episodes of the queue, one by one: length, return, both flags, policy's key."""
    step, reset, fold_in = jax.jit(env.step), jax.jit(env.reset), jax.random.fold_in
    for k in range(num_episodes):
        episode_key = fold_in(fold_in(root, 2), k)  # 2: the stream of the queue
        state, _ = reset(fold_in(episode_key, 0))
        total, length, done = 0.0, 0, False
        while not done:
            length += 1
            result = step(fold_in(episode_key, length), state, jnp.int32(0))
            state, total = result.state, total + float(result.reward)
            done = bool(result.terminated | result.truncated)
        word = last_word(fold_in(episode_key, np.uint32(2**32 - 1)))
        yield length, total, bool(result.terminated), bool(result.truncated), int(word)


KEYED = PlainPolicy(
    lambda num_envs: rollout.types.EpisodeKey(),
    lambda params, obs, state, key: rollout.types.PolicyStep(
        action=jnp.zeros(obs.shape[0], jnp.int32),
        state=state,
        extras=jax.vmap(last_word)(state.value),
    ),
)
LAST_WORD = rollout.Accumulator(
    lambda num_envs: jnp.zeros(num_envs, jnp.int32), lambda _, t: t.extras
)


@pytest.mark.usefixtures("key_reuse")
@pytest.mark.parametrize(
    ("name", "num_envs", "impl"),
    [
        ("count", 4, "threefry2x32"),
        ("count", 16, "threefry2x32"),
        pytest.param("count", 1, "philox2x32", marks=slow),
        pytest.param("CartPole-v1", 3, "threefry2x32", marks=slow),
    ],
)
def test_episodes_are_those_of_a_plain_loop_that_plays_them_one_by_one(
    name, num_envs, impl
):
    """Whichever lanes serve them, in any number of calls, after any steps."""
    root = jax.random.key(11, impl=impl)
    want = list(play_alone(make_env(name), root, 12))
    collector = make_collector(name, num_envs).replace(
        policy=KEYED, accumulators={"word": LAST_WORD}
    )
    carry, _ = collector.collect_steps(collector.init(root), None, 3)
    # Three episodes have so many steps; what starts after them does not count.
    enough, got = sum(length for length, *_ in want[5:8]), []
    for num_episodes, options in ((5, {}), (9, {"min_steps": enough}), (4, {})):
        carry, episodes = collector.collect_episodes(
            carry, None, num_episodes, max_episode_steps=ENDLESS, **options
        )
        fields = "episode_length", "episode_return", "terminated", "truncated"
        table = [getattr(episodes, field).tolist() for field in fields]
        table.append(episodes.accumulated["word"].tolist())
        rows = zip(episodes.mask.tolist(), *table, strict=True)
        got += [row for counts, *row in rows if counts]
        assert episodes.num_steps == sum(table[0])
    assert [tuple(row) for row in got] == want
    assert carry.next_episode == 12


@slow
@pytest.mark.usefixtures("key_reuse")
def test_population_is_evaluated_under_vmap():
    resets = []

    @struct.dataclass
    class Counted(CountEnv):
        def reset(self, key):
            jax.debug.callback(lambda _: resets.append(1), key)
            return super().reset(key)

    def evaluate(limit):
        env = envs.vectorize(Counted(limit=limit, min_length=20, max_length=20), 2)
        collector = make_collector("count", 2).replace(env=env)
        return rollout.evaluate(collector, None, jax.random.key(0), 2)

    # From 1 to 16 steps, so that most members wait for the last ones.
    limits = 1 + jnp.arange(16)
    together = jax.block_until_ready(jax.jit(jax.vmap(evaluate))(limits))
    jax.effects_barrier()
    np.testing.assert_array_equal(together.num_steps, 2 * limits)
    # `init` resets the two lanes that all members share. Then every member's are reset
    # at the start and at the end, and never while it waits for others.
    assert len(resets) == 2 + 2 * 2 * limits.size
    alone = jax.jit(lambda limits: jax.lax.map(evaluate, limits))(limits)
    chex.assert_trees_all_equal(together, alone)
