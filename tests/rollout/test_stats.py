"""Tests of statistics, windows and logs of episodes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import collect, make_episodes, raw
from scipy import stats as scipy_stats

import rollout
from rollout.stats import merge

summarize = jax.jit(rollout.summarize)
add = jax.jit(lambda window, batch: window.add(batch))


def test_statistics_equal_numpy():
    _, trajectory = collect("count")
    returns = np.float32(np.pi) * np.asarray(trajectory.episode_return)
    trajectory = trajectory.replace(episode_return=returns)
    stats = summarize(trajectory)
    done = np.asarray(trajectory.done)
    terminated = np.asarray(trajectory.terminated)
    assert stats.num_steps == trajectory.reward.size
    assert stats.num_episodes == done.sum() > 0
    assert stats.num_terminated == terminated.sum()
    assert stats.num_truncated == (done & ~terminated).sum()
    assert stats.num_nonfinite == 0
    for moments, values in (
        (stats.returns, trajectory.episode_return),
        (stats.lengths, trajectory.episode_length),
    ):
        values = np.asarray(values)[done].astype(np.float64)
        for stat in ("mean", "std", "min", "max"):
            got, want = getattr(moments, stat), getattr(values, stat)()
            # Sums of at most some hundred float32 values.
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
            assert got.dtype == jnp.float32
    for leaf in (stats.num_steps, stats.num_episodes, stats.num_terminated):
        assert leaf.dtype == jnp.int32


def test_masked_rows_are_ignored():
    _, trajectory = collect("count")
    trajectory = jax.tree.map(np.asarray, raw(trajectory))
    lanes = np.arange(16)[None, :]
    masked = trajectory.replace(mask=trajectory.mask & (lanes < 5))
    first = jax.tree.map(lambda x: x[:, :5], trajectory)
    got, want = summarize(masked), summarize(first)
    assert (got.num_steps, got.num_episodes) == (want.num_steps, want.num_episodes)
    assert got.returns.mean == want.returns.mean
    assert got.lengths.max == want.lengths.max
    empty = summarize(jax.tree.map(lambda x: x[:0], trajectory))
    assert int(empty.num_steps) == int(empty.num_episodes) == 0
    assert np.isnan(empty.returns.mean)


@pytest.mark.parametrize("field", ["reward", "extras"])
def test_nonfinite_rows_are_counted(field):
    _, trajectory = collect("count")
    bad = np.array(trajectory.reward)
    bad[3, 4], bad[5, 6] = np.nan, np.inf
    value = bad if field == "reward" else {"value": bad[..., None]}
    assert summarize(trajectory.replace(**{field: value})).num_nonfinite == 2


def test_statistics_have_a_short_string():
    three = summarize(make_episodes([190.0, 200.0, 210.0]))
    # 200 +- 4.302653 * 10 / sqrt(3): Student's t with 2 degrees of freedom
    assert str(three) == "return 200 (95 %: 175.159 to 224.841), 3 episodes"
    empty = summarize(make_episodes([], num_steps=np.int32(1280)))
    assert str(empty) == "no episode ended in 1,280 steps"
    truncated = summarize(
        make_episodes([np.inf, 1.0], finished=np.array([True, False]))
    )
    assert str(truncated).endswith(
        ", 2 episodes, 1 truncated by `max_episode_steps`, 1 with NaN or infinity"
    )


def make_lengths_trajectory(lengths, num_steps):
    """Creates a trajectory with these lengths of episodes, equal to their returns."""
    row = collect("count")[1]
    count = np.zeros((num_steps, len(lengths)), np.int32)
    done = np.zeros(count.shape, bool)
    for lane, lane_lengths in enumerate(lengths):
        steps = np.concatenate([np.arange(n) + 1 for n in lane_lengths])
        count[:, lane] = steps[:num_steps]
        done[:, lane] = (steps == np.repeat(lane_lengths, lane_lengths))[:num_steps]
    return raw(row).replace(
        **{"episode_length": count, "episode_return": count.astype(np.float32)},
        **{"terminated": done, "truncated": done & False, "mask": done | True},
        **{"accumulated": {"twice": 2 * count}},
    )


def time_slice(trajectory, i, j):
    fields = "mask", "terminated", "truncated", "episode_return", "episode_length"
    fields_slice = {name: getattr(trajectory, name)[i:j] for name in fields}
    accumulated = jax.tree.map(lambda x: x[i:j], trajectory.accumulated)
    return trajectory.replace(**fields_slice, accumulated=accumulated)


def plain_window(trajectory, size):
    """Yields the lengths in the window after each row.

    An episode counts after all episodes that started before it have ended.
    """
    starts, lengths, ends = [], [], []
    count, done = trajectory.episode_length, trajectory.done
    for t, lane in np.argwhere(count == 1):
        end = t + int(np.argmax(done[t:, lane])) if done[t:, lane].any() else np.inf
        starts, ends = [*starts, t], [*ends, end]
        lengths = [*lengths, 0 if end == np.inf else count[end, lane]]
    for t in range(len(count)):
        running = [s for s, end in zip(starts, ends, strict=True) if s <= t < end]
        oldest = min(running, default=t + 1)
        yield [x for x, s in zip(lengths, starts, strict=True) if s < oldest][-size:]


LENGTHS = np.random.default_rng(0).integers(1, 8, (5, 60))


@pytest.mark.parametrize("num_rows", [1, 7])
def test_window_contains_episodes_in_order_of_their_start(num_rows):
    trajectory, size = make_lengths_trajectory(LENGTHS, 56), 25
    window = rollout.EpisodeWindow.init(size, accumulated=["twice"])
    assert str(window) == "no episode counts yet"
    expected_by_row = list(plain_window(trajectory, size))
    for i in range(0, 56, num_rows):
        window = jax.device_get(add(window, time_slice(trajectory, i, i + num_rows)))
        want = expected_by_row[i + num_rows - 1]
        assert window.num_episodes == len(want)
        np.testing.assert_array_equal(window.episode_length[size - len(want) :], want)
    np.testing.assert_array_equal(window.episode_return, window.episode_length)
    np.testing.assert_array_equal(
        window.episode_accumulated["twice"], 2 * window.episode_length
    )
    np.testing.assert_allclose(window.returns.mean, np.mean(want))
    np.testing.assert_allclose(window.lengths.mean, np.mean(want))
    assert str(window) == f"return {np.mean(want):.6g}, last {size} episodes"
    assert rollout.log_stats(window)["accumulated/twice_mean"] == pytest.approx(
        2 * np.mean(want)
    )


def test_first_window_is_unbiased():
    """Half of the episodes have 2 steps and half have 20, so the mean is 11."""
    firsts = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        trajectory = make_lengths_trajectory(rng.choice((2, 20), (200, 40)), 60)
        window = rollout.EpisodeWindow.init(20)
        for i in range(0, 60, 6):
            window = jax.device_get(add(window, time_slice(trajectory, i, i + 6)))
            if window.num_episodes:
                break
        firsts.append(float(window.lengths.mean))
    error = np.std(firsts) / np.sqrt(len(firsts))
    assert abs(np.mean(firsts) - 11) < 4 * error + 0.01


def test_window_accepts_a_skipped_trajectory():
    trajectory, window = (
        make_lengths_trajectory(np.full((3, 9), 6), 54),
        rollout.EpisodeWindow.init(9),
    )
    window = add(window, time_slice(trajectory, 0, 4))  # lists three episodes
    window = add(window, time_slice(trajectory, 8, 12))  # no listed episode continues
    assert (window.num_episodes, window.listed.num) == (0, 0)
    window = add(window, time_slice(trajectory, 12, 30))
    assert (window.num_episodes, window.lengths.mean) == (9, 6)


def test_window_accepts_fewer_lanes():
    trajectory, window = (
        make_lengths_trajectory(np.full((3, 9), 6), 54),
        rollout.EpisodeWindow.init(9),
    )
    window = add(window, time_slice(trajectory, 0, 4))  # lists three episodes
    window = add(window, time_slice(jax.tree.map(lambda x: x[:, :2], trajectory), 4, 6))
    assert (window.num_episodes, window.listed.num) == (0, 0)


def test_window_lengths_are_exact_integers():
    length = np.array([2**24 + 1], np.int32)
    episodes = make_episodes([1.0], episode_length=length)
    window = jax.device_get(add(rollout.EpisodeWindow.init(1), episodes))
    assert window.episode_length[0] == 2**24 + 1


def test_window_works_in_scan_and_vmap():
    window = rollout.EpisodeWindow.init(4)

    def step(window, returns):
        window = window.add(make_episodes([0, 0], episode_return=returns))
        return window, window.returns.mean

    runs = jnp.arange(12.0).reshape(2, 3, 2)  # two runs of three batches
    scan = lambda run: jax.lax.scan(step, window, run)  # noqa: E731
    last, means = jax.jit(jax.vmap(scan))(runs)
    np.testing.assert_array_equal(means, [[0.5, 1.5, 3.5], [6.5, 7.5, 9.5]])
    np.testing.assert_array_equal(last.returns.mean, [3.5, 9.5])
    np.testing.assert_array_equal(last.num_episodes, [4, 4])
    assert str(last) == repr(last)


def test_window_ignores_masked_episodes():
    """Episodes of faulty or idle lanes are masked."""
    window = rollout.EpisodeWindow.init(3)
    mask = np.array([True, False, True])
    window = add(window, make_episodes([1.0, 2.0, 4.0], mask=mask))
    np.testing.assert_array_equal(window.episode_return, [0, 1, 4])
    assert rollout.log_stats(window, prefix="train") == {
        "train/num_episodes": 2.0,
        "train/return_mean": 2.5,
        "train/length_mean": 5.0,
    }


def test_log_omits_undefined_statistics():
    empty = summarize(make_episodes([]))
    single = summarize(make_episodes([np.nan]))
    window = rollout.EpisodeWindow.init(2)
    logged = rollout.log_stats({"none": empty, "one": single, "last": window})
    assert not any(name.startswith("none/return") for name in logged)
    assert np.isnan(logged["one/return_mean"])  # a NaN of the data stays
    assert "one/return_ci_low" not in logged
    assert logged["last/num_episodes"] == 0
    assert "last/return_mean" not in logged


def test_log_of_seeds_contains_confidence_intervals():
    runs = [summarize(make_episodes(x)) for x in ([1.0, 3.0], [3.0, 5.0], [9.0, 9.0])]
    empty = runs[0].replace(returns=summarize(make_episodes([])).returns)
    stats = jax.tree.map(lambda *x: np.stack(x), *jax.device_get([*runs, empty]))
    logged = rollout.log_stats((stats, {"lr": 0.5}), prefix="a", num_seeds=4)
    assert logged["a/0/return_mean"] == 5  # the means of three seeds are 2, 4 and 9
    # 4.302653 * sqrt(13 / 3) = 8.956686: Student's t with 2 degrees of freedom
    assert logged["a/0/return_mean_ci_low"] == pytest.approx(5 - 8.956686, rel=1e-5)
    assert logged["a/0/return_mean_ci_high"] == pytest.approx(5 + 8.956686, rel=1e-5)
    assert logged["a/1/lr"] == 0.5
    assert not [
        x for x in logged if "ci" in x and not x.endswith(("_ci_low", "_ci_high"))
    ]
    intervals = {x.removesuffix("_ci_low") for x in logged if x.endswith("_ci_low")}
    assert not [x for x in intervals if "_ci_" in x or "num_" in x]
    with pytest.raises(ValueError, match="`num_seeds` must be an int of at least 1"):
        rollout.log_stats(stats, num_seeds=-1)


def test_accumulator_named_return_keeps_the_return():
    accumulated = {"return": jnp.array([7.0, 7.0]), "length": jnp.array([8, 8])}
    logged = rollout.log_stats(
        summarize(make_episodes([1.0, 2.0], accumulated=accumulated))
    )
    assert (logged["return_mean"], logged["length_mean"]) == (1.5, 5)
    assert logged["accumulated/return_mean"] == 7
    assert logged["accumulated/length_mean"] == 8


def test_merged_statistics_equal_the_full_trajectory():
    trajectory = jax.device_get(raw(collect("count")[1]))
    bounds = (0, 1, 20, trajectory.reward.shape[0])
    parts = [
        summarize(jax.tree.map(lambda x, i=i, j=j: x[i:j], trajectory))
        for i, j in itertools.pairwise(bounds)
    ]
    assert parts[0].num_episodes == 0
    merged, expected = merge(parts), summarize(trajectory)
    for name in ("num_steps", "num_episodes", "num_terminated", "num_truncated"):
        assert getattr(merged, name) == getattr(expected, name)
    for got, want in (
        (merged.returns, expected.returns),
        (merged.lengths, expected.lengths),
    ):
        assert got.count == want.count > 0
        assert (got.min, got.max) == (want.min, want.max)
        # Sums within parts are float32, and sums over parts are float64.
        np.testing.assert_allclose(got.mean, want.mean, rtol=1e-6)
        np.testing.assert_allclose(got.std, want.std, rtol=1e-5)


def test_merged_counts_do_not_overflow():
    stats = summarize(collect("count")[1]).replace(num_steps=np.int32(2**31 - 1))
    assert merge([stats, stats]).num_steps == 2**32 - 2


@pytest.mark.parametrize("num_seeds", [2, 8])
def test_mean_interval_equals_students_t(num_seeds):
    x = np.random.default_rng(num_seeds).normal(100.0, 10.0, (num_seeds, 4))
    got = rollout.stats.mean_interval(x)
    scale = scipy_stats.sem(x, axis=0)
    ends = scipy_stats.t.interval(0.95, num_seeds - 1, x.mean(axis=0), scale)
    # The quantile is an expansion of four terms in float32.
    np.testing.assert_allclose(got, [x.mean(axis=0), *ends], rtol=1e-4)


def test_mean_interval_accepts_any_axis():
    x = jnp.arange(24.0).reshape(2, 4, 3) ** 2
    want = jnp.stack(rollout.stats.mean_interval(x[1]))
    for axis in (1, -2):
        run = jax.jit(lambda x, axis=axis: rollout.stats.mean_interval(x, axis=axis))
        for got in (run(x), rollout.stats.mean_interval(x, axis=axis)):
            assert [y.shape for y in got] == [(2, 3)] * 3
            np.testing.assert_allclose(jnp.stack(got)[:, 1], want, rtol=1e-6)


def test_mean_interval_keeps_nan_and_needs_two_values():
    x = np.array([[np.nan, 1.0], [2.0, 3.0]])
    for values in rollout.stats.mean_interval(x):
        assert np.isnan(values).tolist() == [True, False]
    with pytest.raises(ValueError, match="at least 2 values along axis 0"):
        rollout.stats.mean_interval(x[:1])


def test_ended_episodes_lists_finished_episodes():
    trajectory = collect("count")[1]
    episodes = jax.jit(rollout.stats.ended_episodes)(trajectory)
    trajectory, episodes = jax.device_get((raw(trajectory), episodes))
    step, lane = np.nonzero(trajectory.done & trajectory.mask)
    np.testing.assert_array_equal(episodes.lane[episodes.mask], lane)
    for field in ("episode_return", "episode_length"):
        expected = getattr(trajectory, field)[step, lane]
        np.testing.assert_array_equal(getattr(episodes, field)[episodes.mask], expected)
