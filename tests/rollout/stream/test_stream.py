"""Streams of steps: exact counts, with every option."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, make_collector
from streams import B, by_lane, host, join, make_stream, new_stream, straight

import rollout
from rollout import envs
from rollout.stream.batch import make_batch
from rollout.stream.types import Options

each_env = pytest.mark.parametrize(
    "name", ["count", pytest.param("CartPole-v1", marks=pytest.mark.slow)]
)
slow = pytest.mark.slow


def assert_void_rows_are_zero(trajectory):
    for leaf in jax.tree.leaves(trajectory.replace(mask=())):
        assert not np.asarray(leaf)[~trajectory.mask].any()


@each_env
def test_batches_are_the_rows_of_collect_steps(name):
    # 48 steps of 4 lanes are 12 rows; batches of 8 steps are 2 rows each.
    batches = [next(stream) for stream in [make_stream(name)] * 6]
    assert [batch.steps for batch in batches] == [8] * 6
    chex.assert_trees_all_equal(join(batches), straight(name))


@pytest.mark.parametrize(
    ("name", "per_batch", "total", "steps"),
    [
        ("count", 8, 28, [8, 8, 8, 4]),  # the last batch has a row less
        ("count", 7, 27, [7, 7, 7, 6]),  # never a multiple of 4
        ("count", 5, 3, [3]),  # less than a batch, less than a row
        *[
            pytest.param(name, *counts, marks=slow)
            for name in ("count", "CartPole-v1")
            for counts in [
                (8, 27, [8, 8, 8, 3]),
                (5, 25, [5] * 5),
                (6, 6, [6]),
                (8, 1, [1]),
            ]
        ],
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
    # 7 steps a batch: 12 of each lane are in seven batches, the last of 6 steps, since
    # lanes take turns.
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
    # The counting environment ignores the action, so it draws the same whenever a lane
    # takes its n-th step.
    trajectory = join(make_stream(steps_per_batch=7, total_steps=48))
    want = straight()
    for lane in range(B):
        got = by_lane(trajectory, lane)
        for field in ("obs", "reward", "terminated", "truncated", "episode_id"):
            np.testing.assert_array_equal(
                getattr(got, field), getattr(want, field)[:, lane]
            )
        np.testing.assert_array_equal(got.info["noise"], want.info["noise"][:, lane])


@slow
def test_statistics_that_lanes_share_go_on_where_lanes_stand_still():
    # Four lanes and four numbers in an observation: the statistics look like lanes.
    env = envs.NormalizeObs(envs.make_vec("CartPole-v1", B))
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    stream = rollout.Stream(
        collector, key=jax.random.key(7), steps_per_batch=5, total_steps=5
    )
    next(stream)
    state = stream.state()["carry"].env_state.statistics
    # The reset, and two rows; the second has one step.
    assert state.count == pytest.approx(3 * B, abs=1e-3)
    assert state.mean.shape == (4,)


def test_stream_without_a_total_is_endless_and_has_no_length():
    stream = make_stream()
    assert [next(stream).steps for _ in range(3)] == [8] * 3
    with pytest.raises(TypeError, match="`total_steps`"):
        len(stream)


def lowest(params, obs, key):
    """Action 0, and an extra."""
    lowest.traces += 1
    action = jnp.zeros(obs.shape[0], jnp.int32)
    return action, {"log_prob": jnp.full(obs.shape[0], -0.5)}


lowest.traces = 0
LOWEST = rollout.stateless_policy(lowest)


def only_one(obs):
    """Allows one of two actions, by the position."""
    return jnp.stack((obs[:, 0] < 0, obs[:, 0] >= 0), axis=-1)


def test_warmup_takes_only_actions_that_are_allowed():
    env = envs.make_vec("CartPole-v1", B)
    policy = rollout.stateless_policy(lambda params, obs, key: jnp.zeros(B, jnp.int32))
    collector = rollout.Collector(env=env, policy=policy)
    options = {"steps_per_batch": 10 * B, "warmup_steps": 5 * B + 1}
    stream = rollout.Stream(
        collector, key=jax.random.key(0), mask_fn=only_one, **options
    )
    trajectory = host(next(stream))
    is_right = trajectory.obs[..., 0] >= 0
    assert 0 < is_right[:5].mean() < 1
    np.testing.assert_array_equal(trajectory.action[:5], is_right[:5])
    assert trajectory.action[5, 0] == is_right[5, 0]
    assert not trajectory.action[5, 1:].any()  # the policy's own, allowed or not
    assert not trajectory.action[6:].any()
    stream.close()


@pytest.mark.parametrize(
    ("name", "warmup"),
    [
        ("count", 11),
        *[pytest.param("count", warmup, marks=slow) for warmup in (1, 4, 26)],
        pytest.param("CartPole-v1", 11, marks=slow),
    ],
)
def test_warmup_takes_exactly_so_many_random_steps(name, warmup):
    collector = make_collector(name, B).replace(policy=LOWEST)
    stream = rollout.Stream(
        collector,
        key=jax.random.key(7),
        steps_per_batch=6,
        total_steps=26,
        warmup_steps=warmup,
    )
    plan = [6, 6, 6, 6, 2]
    random, done = [], 0
    for steps in plan:
        random.append(min(max(warmup - done, 0), steps))
        done += steps
    batches = [next(stream)]
    traces = lowest.traces
    batches += list(stream)
    assert lowest.traces == traces  # one program serves every batch
    assert [batch.warmup_steps for batch in batches] == random
    first_lane = 0
    for batch, num_random in zip(batches, random, strict=True):
        trajectory = host(batch)
        order = (np.arange(B) - first_lane) % B
        index = np.arange(2)[:, None] * B + order
        np.testing.assert_array_equal(trajectory.mask, index < batch.steps)
        assert not trajectory.action[index >= num_random].any()
        first_lane = (first_lane + batch.steps) % B
        mask = trajectory.mask
        np.testing.assert_array_equal(trajectory.extras["log_prob"], -0.5 * mask)


@slow
@pytest.mark.parametrize(("name", "num_actions"), [("count", 3), ("CartPole-v1", 2)])
def test_random_steps_of_the_warmup_take_all_actions_evenly(name, num_actions):
    collector = make_collector(name, B).replace(policy=LOWEST)
    options = {"steps_per_batch": 6, "total_steps": 1200, "warmup_steps": 1200}
    trajectory = join(rollout.Stream(collector, key=jax.random.key(7), **options))
    counts = np.bincount(trajectory.action[trajectory.mask])
    # 1200 draws of three: mean 400, standard deviation 16.3; five of them. Of two: mean
    # 600, standard deviation 17.3.
    np.testing.assert_allclose(counts, [1200 / num_actions] * num_actions, atol=82)


@each_env
def test_episodes_are_truncated_across_batches(name):
    # Batches of 2 rows, a limit of 3: the first episode of a lane that the
    # environment does not end before has its third step in the second batch.
    trajectory = join(make_stream(name, total_steps=48, max_episode_steps=3))
    at_limit = trajectory.episode_length == 3
    assert trajectory.episode_length.max() == 3
    assert trajectory.truncated[at_limit].all()
    assert trajectory.truncated[~at_limit].sum() == 0
    # Every row after a limit is the first of a new episode.
    assert trajectory.first[1:][trajectory.done[:-1]].all()
    if name == "CartPole-v1":  # no pole falls in three steps
        lengths = [[1, 1], [2, 2], [3, 3], [1, 1]]
        np.testing.assert_array_equal(trajectory.episode_length[:4, :2], lengths)
        assert not trajectory.terminated.any()
    else:  # lengths are 2 to 9: one that is 3 ends both ways
        assert (trajectory.terminated & at_limit).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "per_batch"),
    [
        ("count", 7),
        pytest.param("count", 8, marks=slow),
        pytest.param("CartPole-v1", 7, marks=slow),
    ],
)
def test_cut_at_the_end_of_a_batch_is_a_truncation(name, per_batch):
    options = {"steps_per_batch": per_batch, "total_steps": 28}
    seen = set()
    for batch in make_stream(name, at_batch_end="truncate", **options):
        trajectory = host(batch)
        ids = set(trajectory.episode_id[trajectory.mask].tolist())
        assert not ids & seen  # nothing goes on from the batch before
        seen |= ids
        for lane in range(B):
            steps = by_lane(trajectory, lane)
            if steps.mask.any():
                assert steps.done[-1]
                assert steps.first[0]
                # The true successor is one more than the observation.
                if name == "count":
                    np.testing.assert_array_equal(steps.next_obs, steps.obs + 1)


@pytest.mark.slow
@each_env
def test_reset_at_the_end_of_a_batch_starts_new_episodes_and_marks_nothing(name):
    trajectory = join(make_stream(name, total_steps=48, at_batch_end="reset"))
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


def total(trajectory):
    total.traces += 1
    return {"reward": trajectory.reward.sum(), "mask": trajectory.mask}


total.traces = 0


@pytest.mark.slow
@each_env
def test_postprocess_runs_in_the_same_program(name):
    options = {"steps_per_batch": 7, "total_steps": 21}
    stream = make_stream(name, postprocess=total, **options)
    stream.compile()
    traces = total.traces
    for got, want in zip(stream, make_stream(name, **options), strict=True):
        assert got.trajectory["reward"] == want.trajectory.reward.sum()
        np.testing.assert_array_equal(got.trajectory["mask"], want.trajectory.mask)
        chex.assert_trees_all_equal(got.stats, want.stats)
    assert total.traces == traces


@slow
def test_field_that_a_postprocess_does_not_read_has_no_array():
    env = envs.TransformObs(CountEnv(), lambda obs: jnp.broadcast_to(obs, (5,)))
    env = envs.vectorize(env, B)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    carry = collector.init(jax.random.key(7))
    defaults = dict.fromkeys(Options._fields) | {"window_episodes": 0}
    defaults |= {"steps_per_batch": 13 * B, "placement": "device", "on_fault": "raise"}
    spec = jax.ShapeDtypeStruct((3,), jnp.int32)

    def text(**options):
        program = jax.jit(make_batch, static_argnums=0)
        options = Options(**{**defaults, **options})
        return program.lower(options, collector, carry, None, spec, ()).compile()

    stored = f"[13,{B},5]"  # 13 rows of observations
    assert stored in text().as_text()
    assert stored not in text(postprocess=lambda t: t.reward).as_text()


@pytest.mark.slow
def test_stream_of_a_greedy_policy_takes_the_mode():
    policy = rollout.stateless_policy(
        lambda params, obs, key: jnp.zeros(B, jnp.int32),
        mode_fn=lambda params, obs, key: jnp.ones(B, jnp.int32),
    )
    collector = make_collector("count", B).replace(policy=policy)
    options = {"key": jax.random.key(7), "steps_per_batch": 8}
    drawn = next(rollout.Stream(collector, **options))
    assert not host(drawn).action.any()
    greedy = collector.replace(policy=rollout.greedy(policy))
    assert (host(next(rollout.Stream(greedy, **options))).action == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per_batch": 0}, "`steps_per_batch` must be an int of at least 1"),
        ({"steps_per_batch": 2**31}, "`steps_per_batch` must be at most 2147483647"),
        ({"total_steps": 0}, "`total_steps` must be an int of at least 1, got 0"),
        ({"max_episode_steps": -1}, "`max_episode_steps` must be an int"),
        ({"warmup_steps": -1}, "`warmup_steps` must be an int of at least 0, got -1"),
        ({"warmup_steps": 1.5}, "`warmup_steps` must be an int of at least 0"),
        ({"mask_fn": only_one}, "`mask_fn` needs `warmup_steps` of at least 1"),
        ({"mask_fn": 3, "warmup_steps": 8}, "`mask_fn` must be a function, got int"),
        ({"prefetch": 2}, "`prefetch` must be 0 or 1, got 2"),
        ({"prefetch": True}, "`prefetch` must be 0 or 1, got True"),
        ({"on_fault": "skip"}, '`on_fault` must be "raise" or "drop", got'),
        ({"on_fault": "drop"}, "needs `check_finite=True`"),
        ({"at_batch_end": "stop"}, '`at_batch_end` must be "continue" or "reset" or'),
        ({"placement": "disk"}, "`placement` must be"),
        ({"placement": "host", "recycle": True}, "`recycle=True` needs `placement"),
    ],
)
def test_wrong_option_is_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        new_stream(**options)
