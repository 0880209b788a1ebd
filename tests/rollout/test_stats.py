"""Statistics of a trajectory, against NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import collect, of_episodes, raw

import rollout
from rollout.moments import merge

summarize = jax.jit(rollout.summarize)


# Small integers, and returns with all their digits.
@pytest.mark.parametrize("scale", [1.0, np.pi])
def test_statistics_are_those_of_the_episodes_that_ended(scale):
    _, trajectory = collect("count")
    returns = np.float32(scale) * np.asarray(trajectory.episode_return)
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


def test_window_without_an_ending_says_so():
    _, trajectory = collect("count")
    none = np.zeros(trajectory.terminated.shape, bool)
    stats = summarize(trajectory.replace(terminated=none, truncated=none))
    assert stats.num_episodes == 0
    assert stats.num_steps == trajectory.reward.size
    for stat in ("mean", "std", "min", "max"):
        assert np.isnan(getattr(stats.returns, stat))
        assert np.isnan(getattr(stats.lengths, stat))


def test_idle_rows_do_not_count():
    _, trajectory = collect("count")
    trajectory = jax.tree.map(np.asarray, raw(trajectory))
    lanes = np.arange(16)[None, :]
    masked = trajectory.replace(mask=trajectory.mask & (lanes < 5))
    first = jax.tree.map(lambda x: x[:, :5], trajectory)
    got, want = summarize(masked), summarize(first)
    assert (got.num_steps, got.num_episodes) == (want.num_steps, want.num_episodes)
    assert got.returns.mean == want.returns.mean
    assert got.lengths.max == want.lengths.max
    none = summarize(jax.tree.map(lambda x: x[:0], trajectory))
    assert int(none.num_steps) == int(none.num_episodes) == 0
    assert np.isnan(none.returns.mean)


@pytest.mark.parametrize("field", ["reward", "extras"])
def test_rows_that_are_not_finite_are_counted(field):
    _, trajectory = collect("count")
    bad = np.array(trajectory.reward)
    bad[3, 4], bad[5, 6] = np.nan, np.inf
    value = bad if field == "reward" else {"value": bad[..., None]}
    assert summarize(trajectory.replace(**{field: value})).num_nonfinite == 2


def test_statistics_are_printed_in_one_line():
    stats = summarize(of_episodes([190.0, 200.0, 210.0]))
    # 200 +- 4.302653 * 10 / sqrt(3), by Student's t with 2 degrees of freedom
    assert str(stats) == "return 200 (95 %: 175.159 to 224.841), 3 episodes"
    assert str(summarize(of_episodes([0.5]))) == "return 0.5, 1 episode"
    nothing = summarize(of_episodes([], num_steps=np.int32(1280)))
    assert str(nothing) == "no episode ended in 1,280 steps"
    cut = of_episodes([np.inf, 1.0], finished=np.array([True, False]))
    assert str(summarize(cut)).endswith(
        ", 2 episodes, 1 cut by `max_steps`, 1 with NaN or infinity"
    )


def test_statistics_of_several_runs_or_traced_ones_are_printed_as_they_are():
    stats = summarize(of_episodes([190.0, 200.0]))
    many = jax.tree.map(lambda x: jnp.stack([x, x]), stats)
    assert str(many) == repr(many)
    traced = []
    jax.jit(lambda x: traced.append(str(x)))(stats)
    assert traced[0].startswith("CollectStats(")


@pytest.mark.parametrize("size", [1, 3, 50, 5000])
def test_window_has_the_last_episodes_of_all_trajectories(size):
    _, trajectory = collect("count")
    done = np.asarray(trajectory.done)
    window, add = rollout.EpisodeWindow.create(size), jax.jit(lambda w, t: w.add(t))
    assert str(window) == "no episode has ended"
    returns, lengths, cuts = [], [], (0, 1, 20, 21, 40, len(done))
    for i, j in itertools.pairwise(cuts):
        part = jax.tree.map(lambda x, i=i, j=j: x[i:j], trajectory)
        window = add(window, part)
        returns += np.asarray(part.episode_return)[done[i:j]].tolist()
        lengths += np.asarray(part.episode_length)[done[i:j]].tolist()
        assert window.num_episodes == min(size, len(returns))
        if returns:
            np.testing.assert_allclose(window.return_mean, np.mean(returns[-size:]))
            np.testing.assert_allclose(window.length_mean, np.mean(lengths[-size:]))
        else:
            assert np.isnan(window.return_mean)
            assert np.isnan(window.length_mean)
    last = min(size, len(returns))
    np.testing.assert_array_equal(window.returns[-last:], returns[-size:])
    np.testing.assert_array_equal(window.lengths[-last:], lengths[-size:])
    assert str(window).startswith(f"return {window.return_mean:.6g}, last {last} epis")


def test_window_lives_in_a_scan_and_under_vmap():
    window = rollout.EpisodeWindow.create(4)

    def step(window, returns):
        window = window.add(of_episodes([0, 0], episode_return=returns))
        return window, window.return_mean

    runs = jnp.arange(12.0).reshape(2, 3, 2)  # two runs of three batches
    scan = lambda run: jax.lax.scan(step, window, run)  # noqa: E731
    last, means = jax.jit(jax.vmap(scan))(runs)
    np.testing.assert_array_equal(means, [[0.5, 1.5, 3.5], [6.5, 7.5, 9.5]])
    np.testing.assert_array_equal(last.return_mean, [3.5, 9.5])
    np.testing.assert_array_equal(last.num_episodes, [4, 4])
    assert str(last) == repr(last)


def test_window_counts_episodes_that_are_there():
    """A host may lose some, and other lanes may be idle."""
    window = rollout.EpisodeWindow.create(3)
    mask = np.array([True, False, True])
    window = window.add(of_episodes([1.0, 2.0, 4.0], mask=mask))
    np.testing.assert_array_equal(window.returns, [0, 1, 4])
    assert rollout.log_stats(window, prefix="train") == {
        "train/num_episodes": 2.0,
        "train/return_mean": 2.5,
        "train/length_mean": 5.0,
    }


def test_merged_statistics_of_parts_are_those_of_the_whole():
    _, trajectory = collect("count")
    cuts = (0, 1, 20, trajectory.reward.shape[0])
    parts = [
        summarize(jax.tree.map(lambda x, i=i, j=j: x[i:j], trajectory))
        for i, j in itertools.pairwise(cuts)
    ]
    assert parts[0].num_episodes == 0  # which must not count
    merged, whole = merge(parts), summarize(trajectory)
    for name in ("num_steps", "num_episodes", "num_terminated", "num_truncated"):
        assert getattr(merged, name) == getattr(whole, name)
    for got, want in ((merged.returns, whole.returns), (merged.lengths, whole.lengths)):
        assert got.count == want.count > 0
        assert (got.min, got.max) == (want.min, want.max)
        # The sums of the parts are in float32, those over them in float64.
        np.testing.assert_allclose(got.mean, want.mean, rtol=1e-6)
        np.testing.assert_allclose(got.std, want.std, rtol=1e-5)


def test_merged_counts_do_not_overflow():
    stats = summarize(collect("count")[1]).replace(num_steps=np.int32(2**31 - 1))
    assert merge([stats, stats]).num_steps == 2**32 - 2


def test_statistics_do_not_promote_silently():
    _, trajectory = collect("count")
    with jax.numpy_dtype_promotion("strict"):
        stats = rollout.summarize(trajectory)
        values = jax.jit(lambda x: (x.returns.std, x.returns.ci_low))(stats)
    want = rollout.summarize(trajectory)
    assert jax.tree.map(float, values) == (want.returns.std, want.returns.ci_low)
