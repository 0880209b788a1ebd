"""Statistics of a trajectory, against NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, collect, raw

import envs
import rollout
from rollout.stats import merge

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
    for field in ("return", "length"):
        values = np.asarray(getattr(trajectory, f"episode_{field}"))[done]
        values = values.astype(np.float64)
        for stat in ("mean", "std", "min", "max"):
            got = getattr(stats, f"{field}_{stat}")
            # Sums of at most some hundred float32 values.
            np.testing.assert_allclose(
                got, getattr(values, stat)(), rtol=1e-5, atol=1e-5
            )
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
        assert np.isnan(getattr(stats, f"return_{stat}"))
        assert np.isnan(getattr(stats, f"length_{stat}"))


def test_idle_rows_do_not_count():
    _, trajectory = collect("count")
    trajectory = jax.tree.map(np.asarray, raw(trajectory))
    lanes = np.arange(16)[None, :]
    masked = trajectory.replace(mask=trajectory.mask & (lanes < 5))
    first = jax.tree.map(lambda x: x[:, :5], trajectory)
    got, want = summarize(masked), summarize(first)
    for field in ("num_steps", "num_episodes", "return_mean", "length_max"):
        assert getattr(got, field) == getattr(want, field)


@pytest.mark.parametrize("field", ["reward", "extras"])
def test_rows_that_are_not_finite_are_counted(field):
    _, trajectory = collect("count")
    bad = np.array(trajectory.reward)
    bad[3, 4], bad[5, 6] = np.nan, np.inf
    value = bad if field == "reward" else {"value": bad[..., None]}
    assert summarize(trajectory.replace(**{field: value})).num_nonfinite == 2


@pytest.mark.slow  # `evaluate` counts them in the fast tests
def test_nan_parameters_show_in_the_statistics():
    def act(params, obs, key):
        logits = jnp.stack([obs[:, 0] * params, obs[:, 0]], axis=1)
        log_prob = jax.nn.log_softmax(logits)[:, 0]
        return jax.random.categorical(key, logits), {"log_prob": log_prob}

    env = envs.vectorize(CountEnv(), 4)
    collector = rollout.Collector(env=env, policy=rollout.stateless_policy(act))
    carry = collector.init(jax.random.key(0))
    _, trajectory = collector.collect_steps(carry, jnp.nan, 6)
    assert summarize(trajectory).num_nonfinite == 24


def test_pieces_of_a_trajectory_are_the_runs_of_one_episode_in_one_lane():
    trajectory = jax.tree.map(np.asarray, collect("count")[1])
    pieces = rollout.split_trajectories(trajectory)
    expected = []  # lane, id and steps of every piece, by a plain loop
    for lane in range(16):
        for t, episode_id in enumerate(trajectory.episode_id[:, lane]):
            if not expected or expected[-1][:2] != (lane, episode_id):
                expected.append((lane, episode_id, []))
            expected[-1][2].append(t)
    np.testing.assert_array_equal(pieces.lane, [lane for lane, _, _ in expected])
    np.testing.assert_array_equal(
        pieces.episode_id, [number for _, number, _ in expected]
    )
    for n, (lane, _, steps) in enumerate(expected):
        assert pieces.mask[:, n].sum() == len(steps)
        for field in ("obs", "action", "reward", "next_obs", "episode_length"):
            got = getattr(pieces.trajectory, field)[:, n]
            want = getattr(trajectory, field)[steps, lane]
            np.testing.assert_array_equal(got[: len(steps)], want)
            assert not got[len(steps) :].any()


def test_statistics_are_logged_by_name_as_floats():
    stats = summarize(collect("count")[1])
    logged = rollout.log_stats({"train": stats, "loss": np.float32(0.5)}, prefix="a/")
    assert logged["a/loss"] == 0.5
    assert logged["a/train/return_mean"] == float(stats.return_mean)
    assert all(type(value) is float for value in logged.values())
    with pytest.raises(ValueError, match="`stats` must have scalar leaves"):
        rollout.log_stats({"x": np.zeros(2)})


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


def test_episodes_without_what_agents_did_are_refused():
    env = envs.vectorize(CountEnv(), 2)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    _, episodes = collector.collect_episodes(
        collector.init(jax.random.key(0)), None, 2, max_steps=3
    )
    with pytest.raises(ValueError, match="`data` must be a trajectory, or `Episodes`"):
        rollout.agents.summarize_agents(episodes)


def test_statistics_do_not_promote_silently():
    _, trajectory = collect("count")
    with jax.numpy_dtype_promotion("strict"):
        stats = rollout.summarize(trajectory)
        values = jax.jit(lambda x: (x.return_std, x.return_ci_low))(stats)
    want = rollout.summarize(trajectory)
    assert jax.tree.map(float, values) == (want.return_std, want.return_ci_low)


def test_no_rows_have_no_episodes():
    trajectory = jax.tree.map(lambda x: x[:0], collect("count")[1])
    stats = rollout.summarize(trajectory)
    assert int(stats.num_steps) == int(stats.num_episodes) == 0
    assert np.isnan(stats.return_mean)
