"""The stream of steps: exact counts, and what its options do to them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_collector, raw

import envs
import rollout

B = 4
each_env = pytest.mark.parametrize("name", ["count", "CartPole-v1"])


def key():
    return jax.random.key(7)


def make_stream(name="count", **options):
    return rollout.Stream(make_collector(name, B), key=key(), **options)


@functools.cache
def straight(name):
    """The 12 rows that `collect_steps` gives from the same key."""
    collector = make_collector(name, B)
    _, trajectory = collector.collect_steps(collector.init(key()), None, 12)
    return jax.device_get(raw(trajectory))


def join(batches):
    """The trajectories one behind the other, `[T, B, ...]`."""
    parts = [jax.device_get(raw(batch.trajectory)) for batch in batches]
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def by_lane(trajectory, lane):
    """The steps of one lane, without the rows that are void."""
    kept = trajectory.mask[:, lane]
    return jax.tree.map(lambda x: x[kept, lane], trajectory)


def assert_void_rows_are_zero(trajectory):
    for leaf in jax.tree.leaves(trajectory.replace(mask=())):
        assert not np.asarray(leaf)[~trajectory.mask].any()


@each_env
def test_batches_are_the_rows_of_collect_steps(name):
    # 48 steps of 4 lanes are 12 rows; batches of 8 steps are 2 rows each.
    batches = list(make_stream(name, steps_per_batch=8, total_steps=48))
    assert [batch.steps for batch in batches] == [8] * 6
    chex.assert_trees_all_equal(join(batches), straight(name))


@each_env
@pytest.mark.parametrize(
    ("per_batch", "total", "steps"),
    [
        (8, 27, [8, 8, 8, 3]),  # 3 x 8 + 3
        (7, 27, [7, 7, 7, 6]),  # 3 x 7 + 6: never a multiple of 4
        (5, 25, [5] * 5),
        (6, 6, [6]),
        (5, 3, [3]),  # less than a batch, less than a row
        (8, 1, [1]),
    ],
)
def test_every_batch_has_exactly_its_steps(name, per_batch, total, steps):
    stream = make_stream(name, steps_per_batch=per_batch, total_steps=total)
    assert len(stream) == len(steps)
    batches = list(stream)
    assert [batch.steps for batch in batches] == steps
    assert [int(batch.trajectory.mask.sum()) for batch in batches] == steps
    assert [int(batch.stats.num_steps) for batch in batches] == steps
    assert not any(batch.warmup_steps for batch in batches)
    # ceil(per_batch / 4) rows, all of them two.
    assert {batch.trajectory.mask.shape for batch in batches} == {(2, B)}
    assert stream.stats.collect_steps == total
    assert_void_rows_are_zero(join(batches))


@each_env
def test_no_step_is_lost_or_collected_twice_where_lanes_stand_still(name):
    # 6 batches of 7 steps and one of 6: 48 steps, 12 of each lane since lanes take
    # turns; the actions differ from `collect_steps` because the policy is asked anew.
    batches = list(make_stream(name, steps_per_batch=7, total_steps=48))
    trajectory = join(batches)
    np.testing.assert_array_equal(trajectory.mask.sum(axis=0), [12] * B)
    for lane in range(B):
        steps = by_lane(trajectory, lane)
        within = ~steps.done[:-1]
        np.testing.assert_array_equal(
            steps.next_obs[:-1][within], steps.obs[1:][within]
        )
        np.testing.assert_array_equal(
            steps.episode_length[1:], np.where(within, steps.episode_length[:-1] + 1, 1)
        )
        ids = np.concatenate([[lane], steps.episode_id[:-1] + B * ~within])
        np.testing.assert_array_equal(steps.episode_id, ids)


def test_lane_that_stands_still_keeps_its_randomness():
    # The counting environment ignores the action, so what it draws is the same
    # whenever a lane takes its n-th step.
    trajectory = join(make_stream(steps_per_batch=7, total_steps=48))
    want = straight("count")
    for lane in range(B):
        got = by_lane(trajectory, lane)
        for field in ("obs", "reward", "terminated", "truncated", "episode_id"):
            np.testing.assert_array_equal(
                getattr(got, field), getattr(want, field)[:, lane]
            )
        np.testing.assert_array_equal(got.info["noise"], want.info["noise"][:, lane])


def test_statistics_that_lanes_share_go_on_where_lanes_stand_still():
    # Four lanes and four numbers in an observation: the statistics look like lanes.
    env = envs.NormalizeObs(envs.make_vec("CartPole-v1", B))
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    stream = rollout.Stream(collector, key=key(), steps_per_batch=5, total_steps=5)
    next(stream)
    state = stream.state()["carry"].env_state.statistics
    # The reset, and the two rows of which the second has one step.
    assert state.count == pytest.approx(3 * B, abs=1e-3)
    assert state.mean.shape == (4,)


def test_stream_without_a_total_is_endless_and_has_no_length():
    stream = make_stream(steps_per_batch=8)
    assert [next(stream).steps for _ in range(3)] == [8] * 3
    with pytest.raises(TypeError, match="`total_steps`"):
        len(stream)


def test_one_program_serves_every_batch():
    traces = []

    def act(params, obs, key):
        traces.append(1)
        return jnp.zeros(obs.shape[0], jnp.int32)

    env = make_collector("count", B).env
    collector = rollout.Collector(env=env, policy=rollout.stateless_policy(act))
    stream = rollout.Stream(
        collector, key=key(), steps_per_batch=7, total_steps=24, warmup_steps=9
    )
    next(stream)
    count = len(traces)
    assert [batch.steps for batch in stream] == [7, 7, 3]
    assert len(traces) == count


def lowest(params, obs, key):
    """Action 0, and the key's own number as an extra."""
    action = jnp.zeros(obs.shape[0], jnp.int32)
    return action, {"log_prob": jnp.full(obs.shape[0], -0.5)}


LOWEST = rollout.stateless_policy(lowest)


@pytest.mark.parametrize(
    ("name", "warmup"),
    [*(("count", warmup) for warmup in (1, 4, 11, 26)), ("CartPole-v1", 11)],
)
def test_warmup_takes_exactly_so_many_random_steps(name, warmup):
    collector = make_collector(name, B).replace(policy=LOWEST)
    stream = rollout.Stream(
        collector, key=key(), steps_per_batch=6, total_steps=26, warmup_steps=warmup
    )
    plan = [6, 6, 6, 6, 2]
    random, done = [], 0
    for steps in plan:
        random.append(min(max(warmup - done, 0), steps))
        done += steps
    batches = list(stream)
    assert [batch.warmup_steps for batch in batches] == random
    first_lane = 0
    for batch, num_random in zip(batches, random, strict=True):
        trajectory = batch.trajectory
        order = (np.arange(B) - first_lane) % B
        index = np.arange(2)[:, None] * B + order
        np.testing.assert_array_equal(trajectory.mask, index < batch.steps)
        chosen = np.asarray(trajectory.action)[index >= num_random]
        assert not chosen.any()
        first_lane = (first_lane + batch.steps) % B
        mask = np.asarray(trajectory.mask)
        np.testing.assert_array_equal(trajectory.extras["log_prob"], -0.5 * mask)


@pytest.mark.parametrize(("name", "num_actions"), [("count", 3), ("CartPole-v1", 2)])
def test_random_steps_of_the_warmup_take_all_actions_evenly(name, num_actions):
    collector = make_collector(name, B).replace(policy=LOWEST)
    stream = rollout.Stream(
        collector, key=key(), steps_per_batch=6, total_steps=1200, warmup_steps=1200
    )
    trajectory = join(stream)
    counts = np.bincount(trajectory.action[trajectory.mask])
    # 1200 draws of three: mean 400, standard deviation 16.3; five of them. Of two: mean
    # 600, standard deviation 17.3.
    np.testing.assert_allclose(counts, [1200 / num_actions] * num_actions, atol=82)


@each_env
def test_episodes_are_truncated_across_batches(name):
    # Batches of 2 rows, a limit of 3: the first episode of a lane that the
    # environment does not end before has its third step in the second batch.
    batches = list(
        make_stream(name, steps_per_batch=8, total_steps=48, max_episode_steps=3)
    )
    trajectory = join(batches)
    at_limit = trajectory.episode_length == 3
    assert trajectory.episode_length.max() == 3
    assert trajectory.truncated[at_limit].all()
    assert trajectory.truncated[~at_limit].sum() == 0
    # Every row behind a limit is the first of a new episode.
    assert trajectory.first[1:][trajectory.done[:-1]].all()
    if name == "CartPole-v1":  # no pole falls in three steps
        lengths = [[1, 1], [2, 2], [3, 3], [1, 1]]
        np.testing.assert_array_equal(trajectory.episode_length[:4, :2], lengths)
        assert not trajectory.terminated.any()
    else:  # lengths are 2 to 9: one that is 3 ends both ways
        assert (trajectory.terminated & at_limit).any()


@pytest.mark.parametrize(
    ("name", "per_batch"), [("count", 8), ("count", 7), ("CartPole-v1", 7)]
)
def test_cut_at_the_end_of_a_batch_is_a_truncation(name, per_batch):
    batches = list(
        make_stream(
            name, steps_per_batch=per_batch, total_steps=28, truncate_at_batch_end=True
        )
    )
    seen = set()
    for batch in batches:
        trajectory = jax.device_get(raw(batch.trajectory))
        ids = set(trajectory.episode_id[trajectory.mask].tolist())
        assert not ids & seen  # nothing goes on from the batch before
        seen |= ids
        for lane in range(B):
            steps = by_lane(trajectory, lane)
            if steps.mask.any():
                assert steps.done[-1]
                assert steps.first[0]
                # The true successor, one more than what was observed.
                if name == "count":
                    np.testing.assert_array_equal(steps.next_obs, steps.obs + 1)


@each_env
def test_reset_of_each_batch_starts_new_episodes_and_marks_nothing(name):
    batches = list(
        make_stream(name, steps_per_batch=8, total_steps=48, reset_each_batch=True)
    )
    trajectory = join(batches)
    assert (trajectory.episode_length[::2] == 1).all()  # the first row of a batch
    # The ends are the environment's own.
    limit = {"count": 7, "CartPole-v1": 20}[name]
    np.testing.assert_array_equal(
        trajectory.truncated, trajectory.episode_length == limit
    )
    ids = trajectory.episode_id
    new = (ids[1:] != ids[:-1]).sum(axis=0)
    # One more for each of the 5 later batches that does not begin after an ending.
    fresh = (trajectory.done[:-1] | (np.arange(1, 12) % 2 == 0)[:, None]).sum(axis=0)
    np.testing.assert_array_equal(new, fresh)
    assert len(np.unique(ids)) == B + new.sum()


@each_env
def test_postprocess_runs_in_the_same_program(name):
    traces = []

    def total(trajectory):
        traces.append(1)
        return {"reward": trajectory.reward.sum(), "mask": trajectory.mask}

    stream = make_stream(name, steps_per_batch=7, total_steps=21, postprocess=total)
    batches = list(stream)
    count = len(traces)
    plain = list(make_stream(name, steps_per_batch=7, total_steps=21))
    for got, want in zip(batches, plain, strict=True):
        assert got.trajectory["reward"] == want.trajectory.reward.sum()
        np.testing.assert_array_equal(got.trajectory["mask"], want.trajectory.mask)
        chex.assert_trees_all_equal(got.stats, want.stats)
    stream = make_stream(name, steps_per_batch=7, total_steps=21, postprocess=total)
    list(stream)
    assert len(traces) == count  # compiled once for streams of a kind


def test_field_that_a_postprocess_does_not_read_has_no_array():
    stream = make_stream(
        "CartPole-v1", steps_per_batch=8, postprocess=lambda trajectory: trajectory.obs
    )
    next(stream)
    kept = [x for x in stream._maker._free_rows.fields if x is not None]
    # obs, and what the statistics read: reward, return and length, and the episode id.
    assert sorted(x.shape for x in kept) == [(2, B)] * 4 + [(2, B, 4)]


def test_deterministic_stream_takes_the_mode():
    policy = rollout.stateless_policy(
        lambda params, obs, key: jnp.zeros(B, jnp.int32),
        mode_fn=lambda params, obs, key: jnp.ones(B, jnp.int32),
    )
    for name in ("count", "CartPole-v1"):
        collector = make_collector(name, B).replace(policy=policy)
        options = {"key": key(), "steps_per_batch": 8, "total_steps": 24}
        taken = list(rollout.Stream(collector, deterministic=True, **options))
        assert len(taken) == 3
        assert (join(taken).action == 1).all()
    drawn = next(rollout.Stream(collector, **options))  # without the option
    assert (drawn.trajectory.action == 0).all()


def test_deterministic_stream_of_a_policy_without_mode_is_refused():
    with pytest.raises(ValueError, match="`deterministic=True` needs a policy with"):
        make_stream(steps_per_batch=4, deterministic=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per_batch": 0}, "`steps_per_batch` must be an int of at least 1"),
        ({"steps_per_batch": 2**31}, "`steps_per_batch` must be at most 2147483647"),
        ({"total_steps": 0}, "`total_steps` must be an int of at least 1, got 0"),
        ({"max_episode_steps": -1}, "`max_episode_steps` must be an int"),
        ({"warmup_steps": -1}, "`warmup_steps` must be an int of at least 0, got -1"),
        ({"warmup_steps": 1.5}, "`warmup_steps` must be an int of at least 0"),
        ({"prefetch": 2}, "`prefetch` must be 0 or 1, got 2"),
        ({"prefetch": True}, "`prefetch` must be 0 or 1, got True"),
        ({"on_fault": "skip"}, "`on_fault` must be"),
        ({"on_fault": "drop"}, "needs `check_finite=True`"),
        ({"placement": "disk"}, "`placement` must be"),
        ({"placement": "host", "recycle": True}, "`recycle=True` needs `placement"),
        (
            {"reset_each_batch": True, "truncate_at_batch_end": True},
            "Only one of `reset_each_batch` and `truncate_at_batch_end`",
        ),
    ],
)
def test_wrong_option_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_stream(**{"steps_per_batch": 4, **options})
