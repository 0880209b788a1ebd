"""Statistics of a stream, its progress bar, and nonfinite values."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_collector
from streams import (
    EPISODES,
    B,
    host,
    join,
    make_stream,
    new_stream,
)

import rollout
from rollout import EpisodeWindow, stats

slow = pytest.mark.slow


def test_statistics_add_up_over_batches():
    stream = make_stream(total_steps=64)
    trajectory = join(stream)
    done = trajectory.done
    returns = trajectory.episode_return[done]
    stats = stream.stats
    assert (stats.batches, stats.steps) == (8, 64)
    assert stats.seconds > 0
    collected = stats.collected
    assert collected.num_episodes == done.sum() > 0
    assert collected.num_steps == 64
    # Means of a batch are float32.
    assert collected.returns.mean == pytest.approx(returns.mean(), rel=1e-6)
    assert collected.returns.max == returns.max()
    stream.reset_stats()
    stats = stream.stats
    assert stats.batches == stats.steps == stats.seconds == 0
    assert stats.collected.num_episodes == 0
    assert math.isnan(stats.collected.returns.mean)
    assert stream.steps == 64  # not reset


def test_stats_print_as_a_line():
    fresh = make_stream()
    full = np.full(100, 195.5, np.float32)
    window = fresh.stats.window.replace(
        episode_return=full, episode_length=full.astype(np.int32)
    )
    stats = fresh.stats._replace(window=window, steps=30_720, seconds=0.25)
    line = "return 195.5, last 100 episodes, 30,720 steps, 122,880 per second"
    assert str(stats) == line
    assert str(fresh.stats) == "no episode counts yet, 0 steps"
    next(fresh)
    assert str(fresh.stats).startswith("no episode counts yet, 8 steps, ")


def test_log_stats_returns_a_flat_dict_of_floats():
    stream = make_stream()
    batch = next(stream)
    tree = {"batch": batch.stats, "run": stream.stats, "loss": np.float32(0.5)}
    flat = rollout.log_stats(tree, prefix="a")
    assert all(type(value) is float for value in flat.values())
    assert (flat["a/run/steps"], flat["a/batch/num_steps"]) == (8.0, 8.0)
    assert flat["a/run/collected/num_steps"] == 8.0
    assert flat["a/run/window/num_episodes"] == 0.0
    assert flat["a/loss"] == 0.5
    # Means over no episodes are omitted.
    assert len(flat) == 6 + (3 + 6 + 1) + 1
    assert rollout.log_stats(batch.stats)["num_steps"] == 8.0


@pytest.mark.parametrize("total", [None, pytest.param(80, marks=slow)])
def test_progress_bar_shows_steps_speed_and_mean_return(total, capsys):
    with new_stream(total_steps=total, progress=True) as stream:
        for _ in stream:
            if stream.steps >= 80:
                break
    shown = capsys.readouterr().err
    window = stream.stats.window
    assert window.num_episodes > 0
    assert f"return {window.returns.mean:.6g}, last {window.num_episodes} epi" in shown
    assert "step/s" in shown
    assert ("100%" in shown) == (total is not None)  # and the time left
    assert shown.endswith("\n")


@pytest.mark.usefixtures("key_reuse")
def test_nonfinite_extras_are_counted_in_the_batch():
    def act(params, obs, key):
        return jnp.zeros(B, jnp.int32), {"value": obs[:, 0] * params}

    collector = make_collector("count", B).replace(policy=rollout.stateless_policy(act))
    options = {"key": jax.random.key(7), "params": jnp.float32(1), "steps_per_batch": 8}
    stream = rollout.Stream(collector, **options)
    assert next(stream).stats.num_nonfinite == 0
    stream.set_params(jnp.float32(jnp.nan))
    assert next(stream).stats.num_nonfinite == 8
    assert stream.stats.collected.num_nonfinite == 8


def test_nonfinite_extras_are_counted_in_a_batch_of_episodes():
    stream = make_stream(**EPISODES)
    stream.set_params({"odds": jnp.float32(jnp.nan)})
    batch = next(stream)
    assert batch.stats.num_nonfinite == batch.steps > 0


def test_stats_of_many_batches_equal_the_merged_statistics_of_each_batch():
    stream = make_stream()
    parts = [next(stream).stats for _ in range(20)]  # more than one merge
    collected, expected = stream.stats.collected, stats.merge(parts)
    chex.assert_trees_all_close(collected, expected, rtol=1e-12)
    assert collected.num_steps == 20 * 8


FIELDS = ["obs.a", "next_obs.a", "reward", "extras.value", "extras.logits"]
FIELDS += ["final_value", "accumulated.least"]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("field", FIELDS)
def test_nonfinite_names_the_field_and_the_row(field, value):
    transition = jax.tree.map(lambda x: x[0], host(next(make_stream())))
    obs = {"a": np.zeros((B, 3, 2), np.float32), "b": np.zeros(B, np.int32)}
    extras = {name: np.zeros(B, np.float32) for name in ("log_prob", "value")}
    extras["logits"] = np.full((B, 2), -np.inf, np.float32)  # of those not allowed
    transition = transition.replace(
        obs=obs,
        next_obs=jax.tree.map(np.copy, obs),
        extras=extras,
        final_value=np.zeros(B, np.float32),
        accumulated={"least": np.full(B, np.inf, np.float32)},  # before the first value
    )
    assert not np.any(stats.is_nonfinite(transition))
    name, _, key = field.partition(".")
    leaf = getattr(transition, name)
    leaf = leaf[key] if key else leaf
    leaf[(2, *[1] * (leaf.ndim - 1))] = value
    flags = stats.nonfinite(transition)
    bad = {key: np.flatnonzero(rows).tolist() for key, rows in flags.items()}
    may_be = (name, value) == ("extras", -math.inf)
    may_be |= key == "least" and math.isinf(value)
    assert {key: rows for key, rows in bad.items() if rows} == (
        {} if may_be else {field: [2]}
    )
    is_counted = name in ("reward", "extras") and not may_be
    assert stats.count_nonfinite(transition) == is_counted


@pytest.mark.parametrize("options", [{}, pytest.param(EPISODES, marks=slow)])
def test_window_holds_the_last_100_episodes_of_all_batches(options):
    options = {"steps_per_batch": 80, **options}
    stream, window = new_stream(**options), EpisodeWindow.init(100)
    add = jax.jit(EpisodeWindow.add)
    for number in range(30):
        if number == 4:
            state, stream = stream.state(), new_stream(**options)
            stream.restore(state)
        batch = next(stream)
        window = add(window, batch.episodes or batch.trajectory)
        chex.assert_trees_all_equal(stream.stats.window, window)
    assert window.num_episodes == 100
    stream.reset_stats()
    chex.assert_trees_all_equal(stream.stats.window, window)
