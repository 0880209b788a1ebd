"""Reports of a stream: statistics, progress, callbacks, values that are not finite."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, make_collector, raw
from flax import struct
from streams import (
    EPISODES,
    B,
    host,
    join,
    make_learner,
    make_stream,
    new_stream,
)

import rollout
from rollout import EpisodeWindow, envs, stats

slow = pytest.mark.slow


def test_statistics_add_up_over_batches():
    stream = make_stream(total_steps=64)
    trajectory = join(stream)
    done = trajectory.done
    returns = trajectory.episode_return[done]
    stats = stream.stats
    assert (stats.batches, stats.steps, stats.faulty_episodes) == (8, 64, 0)
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
    assert stream.steps == 64  # the run itself goes on


def test_statistics_print_as_a_line():
    fresh = make_stream()
    full = np.full(100, 195.5, np.float32)
    window = fresh.stats.window.replace(
        episode_return=full, episode_length=full.astype(np.int32)
    )
    stats = fresh.stats._replace(window=window, steps=30_720, seconds=0.25)
    line = "return 195.5, last 100 episodes, 30,720 steps, 122,880 per second"
    assert str(stats) == line
    assert str(stats._replace(faulty_episodes=1)) == f"{line}, 1 episode dropped"
    assert str(fresh.stats) == "no episode counts yet, 0 steps"
    next(fresh)
    assert str(fresh.stats).startswith("no episode counts yet, 8 steps, ")


def test_log_stats_is_a_flat_dict_of_floats():
    stream = make_stream()
    batch = next(stream)
    tree = {"batch": batch.stats, "run": stream.stats, "loss": np.float32(0.5)}
    flat = rollout.log_stats(tree, prefix="a")
    assert all(type(value) is float for value in flat.values())
    assert (flat["a/run/steps"], flat["a/batch/num_steps"]) == (8.0, 8.0)
    assert flat["a/run/collected/num_steps"] == 8.0
    assert flat["a/run/window/num_episodes"] == 0.0
    assert flat["a/loss"] == 0.5
    # Means over no episode are left out.
    assert len(flat) == 6 + (4 + 6 + 1) + 1
    assert rollout.log_stats(batch.stats)["num_steps"] == 8.0


@pytest.mark.parametrize("total", [None, pytest.param(80, marks=slow)])
def test_bar_shows_steps_their_speed_and_the_mean_return_of_the_window(total, capsys):
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


@struct.dataclass(kw_only=True)
class FaultyEnv(CountEnv):
    """Counts; in an episode of 5 steps the third has a reward that is not finite."""

    def step(self, key, state, action):
        result = super().step(key, state, action)
        is_faulty = (state["length"] == 5) & (result.state["n"] == 3)
        reward = jnp.where(is_faulty, jnp.nan, result.reward)
        return result.replace(reward=reward.astype(jnp.float32))


@functools.cache
def make_faulty():
    env = envs.vectorize(FaultyEnv(), B)
    return rollout.Collector(env=env, policy=rollout.random_policy(env.action_space))


def test_first_fault_is_named():
    learner = make_learner().replace(env=make_faulty().env)
    options = {"key": jax.random.key(7), "params": {"odds": np.float32(0.5)}}
    checked = rollout.Stream(learner, steps_per_batch=8, check_finite=True, **options)
    plain = make_stream()  # has the same episodes, without faults
    batches = [host(next(plain)) for _ in range(16)]
    rows = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    ids = rows.episode_id[rows.done & (rows.episode_length == 5)]
    is_faulty = np.isin(rows.episode_id, ids) & (rows.episode_length == 3)
    row, lane = np.argwhere(is_faulty)[0]
    for want in batches[: row // 2]:
        chex.assert_trees_all_equal(host(next(checked)), want)
    place = f"first at step 3 of an episode in lane {lane}, in a batch with"
    message = f"`reward` must be finite .* {place} `params_version` 0"
    before = checked.steps
    assert before > 0
    for _ in range(2):  # the stream stands where it stood
        with pytest.raises(FloatingPointError, match=message):
            next(checked)
    assert checked.steps == before


@slow
@pytest.mark.usefixtures("quick_compile")
def test_first_fault_in_whole_episodes_is_named():
    # The reward of a faulty episode is not finite at its third step, so the first
    # faults are those of the first such episodes.
    options = {"episodes_per_batch": 6, "max_episode_steps": 6}
    options["key"] = jax.random.key(7)
    plain = rollout.Stream(make_faulty(), **options)
    options["postprocess"] = lambda trajectory: trajectory.reward.sum()
    checked = rollout.Stream(make_faulty(), check_finite=True, **options)
    while np.isfinite((batch := next(plain)).episodes.episode_return).all():
        chex.assert_trees_all_equal(next(checked).episodes, batch.episodes)
    episode = np.isnan(batch.episodes.episode_return).argmax()
    message = f"`reward` must be finite .* first at step 3 of episode {episode}, "
    with pytest.raises(FloatingPointError, match=message):
        next(checked)


def test_parameters_that_are_not_finite_show_in_the_output_of_the_policy():
    def act(params, obs, key):
        value = obs[:, 0] * params
        extras = {"value": value, "logits": value[:, None] - jnp.inf}
        return jnp.zeros(B, jnp.int32), extras

    collector = make_collector("count", B).replace(policy=rollout.stateless_policy(act))
    options = {"key": jax.random.key(7), "params": jnp.float32(1), "steps_per_batch": 8}
    stream = rollout.Stream(collector, check_finite=True, **options)
    last = jax.device_get(jax.tree.map(lambda x: x[-1, 0], next(stream).trajectory))
    step = 1 if last.done else last.episode_length + 1
    stream.set_params(jnp.float32(jnp.nan))
    message = f"`extras.value` must be .* at step {step} of .* lane 0, .*version` 1"
    with pytest.raises(FloatingPointError, match=message):
        next(stream)
    stream.set_params(jnp.float32(2))
    assert next(stream).params_version == 2


@pytest.mark.usefixtures("quick_compile")
def test_faulty_episode_is_dropped_and_the_lane_goes_on():
    options = {"key": jax.random.key(7), "steps_per_batch": 400}
    stream = rollout.Stream(
        make_faulty(), check_finite=True, on_fault="drop", **options
    )
    batch = next(stream)
    trajectory = jax.device_get(raw(batch.trajectory))
    for leaf in jax.tree.leaves(trajectory):
        assert np.isfinite(leaf).all()
        assert not leaf[~trajectory.mask].any()
    # The same episodes without faults: one of 5 steps breaks off at its third.
    collector = make_collector("count", B)
    collect = jax.jit(
        lambda key: collector.collect_steps(collector.init(key), None, 400)
    )
    rows = jax.device_get(collect(jax.random.key(7))[1])
    ended = rows.episode_id[rows.done]
    lengths = dict(zip(ended.tolist(), rows.episode_length[rows.done], strict=True))
    num_faulty = num_dropped = 0
    for lane in range(B):
        t, number = 0, lane
        while t < 100:
            taken = min(lengths[number], 100 - t)
            is_faulty = lengths[number] == 5 and taken >= 3
            taken = 3 if is_faulty else taken
            row = np.s_[t : t + taken, lane]
            assert (trajectory.mask[row] == (not is_faulty)).all()
            assert (trajectory.episode_id[row] == number * (not is_faulty)).all()
            num_faulty += is_faulty
            num_dropped += 3 * is_faulty
            t, number = t + taken, number + B
    assert num_faulty > 10
    assert stream.stats.faulty_episodes == num_faulty
    assert trajectory.mask.sum() == 400 - num_dropped
    assert batch.steps == 400
    assert int(batch.stats.num_steps) == trajectory.mask.sum()
    assert not (trajectory.done & (trajectory.episode_length == 5)).any()


FIELDS = ["obs.a", "next_obs.a", "reward", "extras.value", "extras.logits"]
FIELDS += ["final_value", "accumulated.least"]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("field", FIELDS)
def test_everything_that_is_checked_is_found_in_its_row(field, value):
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
    found = stats.nonfinite(transition)
    bad = {key: np.flatnonzero(rows).tolist() for key, rows in found.items()}
    may_be = (name, value) == ("extras", -math.inf)
    may_be |= key == "least" and math.isinf(value)
    assert {key: rows for key, rows in bad.items() if rows} == (
        {} if may_be else {field: [2]}
    )
    is_counted = name in ("reward", "extras") and not may_be
    assert stats.count_nonfinite(transition) == is_counted


@pytest.mark.parametrize("options", [{}, pytest.param(EPISODES, marks=slow)])
def test_window_has_the_last_100_episodes_of_all_batches(options):
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
