"""Tests of exactly N episodes: schedule, lanes, padding and bias."""

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
    """Counts the steps of the episode and records the count."""
    return jnp.zeros(obs.shape[0], jnp.int32), count + 1, {"count": count + 1}


COUNTING = rollout.recurrent_policy(act_and_count, lambda n: jnp.zeros(n, int))


@functools.cache
def make_collector(name="count", num_envs=4, auto_reset="compact"):
    env = TwoLengthEnv() if name == "two lengths" else make_env(name)
    vector_env = envs.vectorize(env, num_envs, auto_reset=auto_reset)
    return rollout.Collector(env=vector_env, policy=COUNTING)


@functools.cache
def fixed_lengths():
    """Creates lanes with episodes of 2, 3, 4 and 5 steps, and their first carry."""
    length = np.arange(2, 6)
    env = CountEnv(min_length=length, max_length=length, limit=np.full(4, 100))
    vector_env = envs.vectorize_each(env, auto_reset="select")  # compiles faster
    collector = rollout.Collector(env=vector_env, policy=COUNTING)
    return collector, collector.init(jax.random.key(0))


# The lane of episode k, and its first and last step, counted from 1. The lanes start
# episodes 0 to 3. Lane 0 is free after step 2 and starts episode 4; lane 1 is free
# after step 3 and starts episode 5. After step 4, lanes 0 and 2 start episodes 6 and 7:
# lower lanes are first. After step 5, lane 3 starts episode 8. After step 6, lanes 0
# and 1 start episodes 9 and 10. After step 8, lane 0 starts episode 11.
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
    """Returns the next carry, the rows of the fold, their number and the episodes."""

    def store_transition(acc, transition):
        rows, step = acc
        return jax.tree.map(lambda x, y: x.at[step].set(y), rows, transition), step + 1

    row = jax.eval_shape(collector.step, carry, None)[1]
    zero_rows = jax.tree.map(lambda x: jnp.zeros((MAX_ROWS, *x.shape), x.dtype), row)
    next_carry, (rows, num_rows), episodes = collector.fold_episodes(
        carry,
        None,
        store_transition,
        (zero_rows, 0),
        num_episodes=num_episodes,
        max_episode_steps=max_episode_steps,
    )
    return next_carry, rows, num_rows, episodes


@functools.cache
def fold_fixed_lengths(num_episodes, max_episode_steps=ENDLESS):
    """Returns the next carry, rows and episodes of a fold over `fixed_lengths`."""
    next_carry, rows, num_rows, episodes = fold(
        *fixed_lengths(), num_episodes=num_episodes, max_episode_steps=max_episode_steps
    )
    return next_carry, jax.tree.map(lambda x: np.asarray(x)[:num_rows], rows), episodes


# 1 is less than the number of lanes, 4 is equal to it. With 12, lanes play repeatedly.
@pytest.mark.parametrize(
    "num_episodes",
    [pytest.param(1, marks=slow), pytest.param(4, marks=slow), 12],
)
def test_free_lanes_take_the_next_episodes(num_episodes):
    _, carry = fixed_lengths()
    schedule = SCHEDULE[:num_episodes]
    num_iterations = max(last for _, _, last in schedule)
    next_carry, rows, episodes = fold_fixed_lengths(num_episodes)
    mask = np.zeros((num_iterations, 4), bool)
    for lane, first, last in schedule:
        mask[first - 1 : last, lane] = True
    lengths = np.array([last - first + 1 for _, first, last in schedule])
    np.testing.assert_array_equal(rows.mask, mask)
    np.testing.assert_array_equal(episodes.lane, [lane for lane, _, _ in schedule])
    np.testing.assert_array_equal(episodes.episode_length, lengths)
    np.testing.assert_array_equal(episodes.episode_return, lengths * (lengths + 1) / 2)
    assert np.all(episodes.finished)
    assert np.all(episodes.terminated)
    assert not np.any(episodes.truncated)
    assert episodes.num_steps == mask.sum()
    assert next_carry.step == carry.step + num_iterations


NUM_REPEATS = 300


def mean_length(collector, play, num_steps=0):
    """Computes the mean length over repeats, each after `num_steps` steps."""

    @jax.jit
    def run(collector, keys):
        def play_key(key):
            carry = collector.init(key)
            if num_steps:
                carry, _ = collector.collect_steps(carry, None, num_steps)
            episodes = play(collector, carry, None, max_episode_steps=ENDLESS)[1]
            return episodes.episode_length

        return jax.lax.map(play_key, keys)

    return np.mean(run(collector, jax.random.split(jax.random.key(5), NUM_REPEATS)))


@slow
def test_mean_length_is_unbiased():
    play = functools.partial(rollout.Collector.collect_episodes, num_episodes=6)
    got = mean_length(make_collector("two lengths"), play, num_steps=7)
    # Lengths are independent with mean 11 and standard deviation 9. With N = 6, the
    # episodes that end first have mean 8.2. Episodes in progress after 7 steps have
    # mean 18.4. Both means differ by more than 4 standard errors.
    assert abs(got - 11) < 4 * 9 / np.sqrt(NUM_REPEATS * 6)


def test_split_calls_play_the_same_episodes():
    collector, start = fixed_lengths()
    options = {"max_episode_steps": 6, "per_env": True, "return_trajectory": True}
    _, single = collector.collect_episodes(start, None, 6, **options)
    carry, first = collector.collect_episodes(start, None, 3, **options)
    _, second = collector.collect_episodes(carry, None, 3, **options)
    single, first, second = (x.trajectory for x in (single, first, second))
    np.testing.assert_array_equal(single.episode_id[0], np.arange(24))
    halves = np.concatenate([first.episode_id[0], second.episode_id[0]])
    np.testing.assert_array_equal(halves, single.episode_id[0])
    got = jnp.concatenate([first.obs, second.obs], axis=1)
    np.testing.assert_array_equal(got, single.obs)


@slow
def test_mean_length_is_unbiased_for_different_lanes():
    # Episodes have 2 or 20 steps in lanes 0 and 2, and 4 steps in lanes 1 and 3. The
    # mean is (11 + 4) / 2.
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
    # Half of the 3600 episodes have standard deviation 9, and half have 0.
    assert abs(got - 7.5) < 4 * 9 * np.sqrt(1800) / 3600


def test_per_env_plays_num_episodes_in_each_lane():
    collector, carry = fixed_lengths()
    for _ in range(2):
        carry, _ = collector.collect_steps(carry, None, 3)
    next_carry, episodes = collector.collect_episodes(
        carry, None, 3, max_episode_steps=6, per_env=True, return_trajectory=True
    )
    rows = episodes.trajectory
    np.testing.assert_array_equal(episodes.lane, list(range(4)) * 3)
    np.testing.assert_array_equal(episodes.episode_length, [2, 3, 4, 5] * 3)
    assert episodes.finished.all()
    assert episodes.num_steps == 3 * (2 + 3 + 4 + 5)
    np.testing.assert_array_equal(np.sum(rows.mask, axis=0), episodes.episode_length)
    # After 6 steps, the lanes are in episodes 3, 2, 1 and 1, counted from 0. Lanes 0
    # and 1 have not stepped in their episodes, so these are the first. Lanes 2 and 3
    # abandon theirs and begin with the next ones.
    first_id = np.array([3, 2, 2, 2]) * 4 + np.arange(4)
    ids = [first_id, first_id + 4, first_id + 8]
    np.testing.assert_array_equal(rows.episode_id[0], np.concatenate(ids))
    assert next_carry.step == carry.step + 15  # the longest lane
    np.testing.assert_array_equal(next_carry.episode.episode_id // 4, [6, 5, 5, 5])


@slow
def test_compact_reset_has_the_bits_of_select():
    results = []
    for auto_reset in ("compact", "select"):
        collector = make_collector("count", 4, auto_reset)
        start = collector.init(jax.random.key(2))
        results.append(
            raw(collector.collect_episodes(start, None, 9, max_episode_steps=15))
        )
    chex.assert_trees_all_equal(*results)


@pytest.mark.parametrize("per_env", [False, True])
def test_episode_ids_are_unique_across_calls(per_env):
    collector, carry = fixed_lengths()
    id_blocks, num_queued = [], 0
    for _ in range(2):
        start = carry
        carry, trajectory = collector.collect_steps(carry, None, 3)
        assert np.all(trajectory.first[0])
        id_blocks.append(np.unique(trajectory.episode_id))
        carry, _ = collector.collect_episodes(
            carry, None, 3, max_episode_steps=ENDLESS, per_env=per_env
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(raw(start), raw(carry))
        carry, rows, _, _ = fold(
            collector, carry, num_episodes=12, max_episode_steps=ENDLESS
        )
        id_blocks.append(np.unique(rows.episode_id[np.asarray(rows.mask)]))
        num_queued += 12 + (0 if per_env else 3)
    ids = np.concatenate(id_blocks)
    assert len(np.unique(ids)) == len(ids)
    assert carry.next_episode == num_queued


def test_policy_state_resets_at_episode_boundaries():
    for max_episode_steps in (ENDLESS, 3):
        _, rows, _ = fold_fixed_lengths(12, max_episode_steps)
        count = rows.extras["count"]
        np.testing.assert_array_equal(count, rows.episode_length)
        assert (count[~rows.mask] == 1).any()  # idle lanes also reset


def test_max_episode_steps_truncates():
    _, rows, episodes = fold_fixed_lengths(12, max_episode_steps=3)
    # Episodes have 2, 3, 3 (of 4) and 3 (of 5) steps. Lane 0 starts episode 4 after
    # step 2. Lanes 1, 2 and 3 start episodes 5, 6 and 7 after step 3, and lane 0 starts
    # episode 8 after step 4. After step 6, lanes 0 to 2 start episodes 9 to 11.
    lane = np.array([0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 1, 2])
    length, is_finished = np.array([2, 3, 3, 3])[lane], lane < 2
    np.testing.assert_array_equal(episodes.lane, lane)
    np.testing.assert_array_equal(episodes.episode_length, length)
    np.testing.assert_array_equal(episodes.finished, is_finished)
    np.testing.assert_array_equal(episodes.terminated, is_finished)
    assert not np.any(episodes.truncated)  # by the environment
    np.testing.assert_array_equal(episodes.episode_return, length * (length + 1) / 2)
    # The rows mark the limit as a truncation.
    is_clipped = rows.mask & rows.truncated
    assert is_clipped.sum() == (~is_finished).sum()
    assert (rows.episode_length[is_clipped] == 3).all()


def test_padded_trajectory_contains_all_rows():
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
        # Episodes have 2, 3, 4 and 4 (of 5) steps. Lane 0 starts episode 4 after step 2
        # and lane 1 starts episode 5 after step 3. After step 4, lanes 0, 2 and 3 start
        # episodes 6, 7 and 8. Lane 0 starts episode 9.
        lane = np.array([0, 1, 2, 3, 0, 1, 0, 2, 3, 0])
        length, is_clipped = np.array([2, 3, 4, 4])[lane], lane == 3
        step = np.arange(1, 5)[:, None]
        mask, is_last = step <= length, step == length
        np.testing.assert_array_equal(episodes.lane, lane)
        np.testing.assert_array_equal(episodes.episode_length, length)
        np.testing.assert_array_equal(episodes.finished, ~is_clipped)
        np.testing.assert_array_equal(padded.mask, mask)
        np.testing.assert_array_equal(padded.obs[..., 0], np.where(mask, step - 1, 0))
        counts = padded.reward, padded.next_obs[..., 0], padded.extras["count"]
        for values in (*counts, padded.episode_length):
            np.testing.assert_array_equal(values, np.where(mask, step, 0))
        np.testing.assert_array_equal(padded.terminated, is_last & ~is_clipped)
        np.testing.assert_array_equal(padded.truncated, is_last & is_clipped)
        episode_id = np.where(mask, -1 - 10 * call - np.arange(10)[None], 0)
        np.testing.assert_array_equal(padded.episode_id, episode_id)
        assert num_episodes == 10


def play_queue(env, root, num_episodes):
    """Yields length, return, flags and policy key of the episodes of the queue."""
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
        ("count", 6, "threefry2x32"),
        pytest.param("count", 16, "threefry2x32", marks=slow),
        pytest.param("count", 1, "philox2x32", marks=slow),
        pytest.param("CartPole-v1", 3, "threefry2x32", marks=slow),
    ],
)
def test_episodes_equal_a_plain_loop(name, num_envs, impl):
    """Lanes, split calls and earlier steps do not change the episodes."""
    root = jax.random.key(11, impl=impl)
    want = list(play_queue(make_env(name), root, 12))
    collector = make_collector(name, num_envs).replace(
        policy=KEYED, accumulators={"word": LAST_WORD}
    )
    carry, _ = collector.collect_steps(collector.init(root), None, 3)
    # Three episodes have `min_steps` steps. The mask excludes the episodes after them.
    min_steps, got = sum(length for length, *_ in want[5:8]), []
    for num_episodes, options in ((5, {}), (9, {"min_steps": min_steps}), (4, {})):
        carry, episodes = collector.collect_episodes(
            carry, None, num_episodes, max_episode_steps=ENDLESS, **options
        )
        fields = "episode_length", "episode_return", "terminated", "truncated"
        table = [getattr(episodes, field).tolist() for field in fields]
        table.append(episodes.accumulated["word"].tolist())
        rows = zip(episodes.mask.tolist(), *table, strict=True)
        got += [row for is_valid, *row in rows if is_valid]
        assert episodes.num_steps == sum(table[0])
    assert [tuple(row) for row in got] == want
    assert carry.next_episode == 12


@slow
@pytest.mark.usefixtures("key_reuse")
def test_evaluate_works_under_vmap():
    resets = []

    @struct.dataclass
    class ResetCountEnv(CountEnv):
        def reset(self, key):
            jax.debug.callback(lambda _: resets.append(1), key)
            return super().reset(key)

    def evaluate(limit):
        env = ResetCountEnv(limit=limit, min_length=20, max_length=20)
        env = envs.vectorize(env, 2)
        collector = make_collector("count", 2).replace(env=env)
        return rollout.evaluate(collector, None, jax.random.key(0), 2)

    # Episodes have 1 to 16 steps, so most members wait for the longest episode.
    limits = 1 + jnp.arange(16)
    batched = jax.block_until_ready(jax.jit(jax.vmap(evaluate))(limits))
    jax.effects_barrier()
    np.testing.assert_array_equal(batched.num_steps, 2 * limits)
    # `init` resets two lanes that all members share. Each member resets its two lanes
    # at the start and at the end, but not while it waits for longer episodes.
    assert len(resets) == 2 + 2 * 2 * limits.size
    mapped = jax.jit(lambda limits: jax.lax.map(evaluate, limits))(limits)
    chex.assert_trees_all_equal(batched, mapped)
