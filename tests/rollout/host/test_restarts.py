"""Environments that fail: masked rows, counts of lost steps, and recovery."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_count import HostCount, assert_same

import rollout
from rollout.envs.host.types import EnvFault
from rollout.host import HostCollector

KEY = jax.random.key(5)
LENGTHS = {"min_length": 5, "max_length": 5, "limit": 100}
BROKEN = RuntimeError("it broke")


def act(params, obs, key):
    return jnp.zeros(len(obs), jnp.int32)


def make_collector(fault_fn=lambda number, env: None, num_envs=3, **options):
    """Returns a collector whose episodes have five steps."""
    env = HostCount(num_envs, fault_fn=fault_fn, **LENGTHS)
    policy = rollout.stateless_policy(act)
    return HostCollector(env=env, policy=policy, **options)


def make_fault_fn(*calls, fault=BROKEN):
    """Returns a `fault_fn` for which these calls of environment 1 fail."""
    return lambda number, env: fault if env == 1 and number in calls else None


def collect(collector, num_steps, carry=None):
    carry = collector.init(KEY) if carry is None else carry
    carry, trajectory = collector.collect_steps(carry, None, num_steps)
    return carry, jax.device_get(trajectory)


# Call 1 of an environment is a reset, and calls 2 to 6 are the steps of the first
# episode. Call 7 is a reset, and calls 8 to 12 are the steps of the second episode. For
# example, call 4 is step 3 of the first episode, in row 2.
@pytest.mark.parametrize(
    ("call", "lost_rows", "fault"),
    [(2, [0], "nan"), (4, [0, 1, 2], BROKEN), (10, [5, 6, 7], "nan reward")],
    ids=["obs", "exception", "reward"],
)
def test_faulty_episode_is_masked_from_its_first_row(call, lost_rows, fault):
    collector = make_collector(make_fault_fn(call, fault=fault), on_fault="restart")
    _, rows = collect(collector, 20)
    expected = np.ones((20, 3), bool)
    expected[lost_rows, 1] = False
    np.testing.assert_array_equal(rows.mask, expected)
    assert collector.fault_stats == (1, len(lost_rows), 1)
    assert all(not np.any(x[~rows.mask]) for x in jax.tree.leaves(rows))
    # The next row starts the next episode of the lane.
    row = lost_rows[-1] + 1
    assert rows.episode_length[row, 1] == 1
    assert rows.episode_id[row, 1] == 1 + 3 * (1 + (call > 6))


def test_fault_does_not_change_other_lanes():
    _, expected = collect(make_collector(), 30)
    collector = make_collector(make_fault_fn(3, 4, 9, 15), on_fault="restart")
    _, rows = collect(collector, 30)
    assert_same(*[jax.tree.map(lambda x: x[:, [0, 2]], t) for t in (rows, expected)])


def test_fault_masks_rows_of_the_current_call_only():
    collector = make_collector(make_fault_fn(5), on_fault="restart")
    carry, old_rows = collect(collector, 2)
    _, rows = collect(collector, 4, carry)
    assert old_rows.mask.all()
    assert not rows.mask[:2, 1].any()
    assert rows.mask[2:].all()
    assert collector.fault_stats.lost_steps == 2


@pytest.mark.parametrize("fault", [BROKEN, "nan"], ids=["exception", "obs"])
def test_fault_in_a_reset_skips_the_episode(fault):
    # Faults in the first reset, and in two consecutive resets.
    collector = make_collector(make_fault_fn(1, 8, 9, fault=fault), on_fault="restart")
    _, rows = collect(collector, 12)
    assert rows.mask.all()
    assert collector.fault_stats == (3, 0, 3)
    np.testing.assert_array_equal(rows.episode_id[[0, 5], 1], [1 + 3, 1 + 3 * 4])


def test_lost_steps_exclude_the_row_that_only_resets():
    # Call 7 is a reset, call 8 the row that only resets, call 10 step 2.
    env = HostCount(3, fault_fn=make_fault_fn(10), resets_itself=True, **LENGTHS)
    policy = rollout.stateless_policy(act)
    collector = HostCollector(env=env, policy=policy, on_fault="restart")
    collect(collector, 12)
    assert collector.fault_stats == (1, 2, 1)


def test_simultaneous_faults_are_all_counted():
    faults = {0: BROKEN, 2: "nan"}
    fault_fn = lambda number, env: faults.get(env) if number == 4 else None  # noqa: E731
    collector = make_collector(fault_fn, on_fault="restart")
    _, rows = collect(collector, 5)
    expected = np.ones((5, 3), bool)
    expected[:3, [0, 2]] = False
    np.testing.assert_array_equal(rows.mask, expected)
    assert collector.fault_stats == (2, 6, 2)


def test_error_after_max_restarts_names_the_environment():
    fault_fn = make_fault_fn(*range(3, 100))
    collector = make_collector(fault_fn, on_fault="restart", max_restarts=4)
    carry = collector.init(KEY)
    with pytest.raises(EnvFault, match=r"environment 1 .*`max_restarts`=4") as error:
        collector.collect_steps(carry, None, 50)
    assert error.value.__cause__ is BROKEN
    assert collector.fault_stats.restarts == 4
    with pytest.raises(ValueError, match="`recover`"):
        collector.collect_steps(carry, None, 50)


def test_recover_keeps_complete_rows():
    """The third step of lane 1 fails, and three steps of all other lanes succeed."""
    collector = make_collector(make_fault_fn(4))
    carry = collector.init(KEY)
    with pytest.raises(EnvFault, match=r"environment 1 .* it broke.* step 3"):
        collector.collect_steps(carry, None, 8)
    carry, rows = collector.recover()
    np.testing.assert_array_equal(rows.mask, np.tile([True, False, True], (3, 1)))
    carry, rows = collect(collector, 4, carry)
    np.testing.assert_array_equal(rows.episode_length[:, 0], [4, 5, 1, 2])
    np.testing.assert_array_equal(rows.episode_length[:, 1], [1, 2, 3, 4])
    carry, rows = collector.recover()  # after a complete call
    assert rows is None
    np.testing.assert_array_equal(carry.episode.episode_length[0], 2)


def test_recover_after_collect_episodes_begins_per_lane_episodes():
    collector = make_collector(make_fault_fn(4))
    carry = collector.init(KEY)
    with pytest.raises(EnvFault):
        collector.collect_episodes(carry, None, 8, max_episode_steps=10)
    carry, _ = collector.recover()
    # Ids of assigned episodes are negative. Ids of per-lane episodes are not.
    assert (carry.episode.episode_id >= 0).all()
    np.testing.assert_array_equal(carry.episode.episode_length, 0)
    restored_collector = make_collector()
    restored_carry = restored_collector.restore(carry, [b""] * 3)
    _, expected = collect(collector, 12, carry)
    assert (expected.episode_id >= 0).all()
    _, rows = collect(restored_collector, 12, restored_carry)
    assert_same(rows, expected)


def test_episodes_after_an_interrupted_call_have_new_ids():
    collector = make_collector(make_fault_fn(4))
    carry = collector.init(KEY)
    with pytest.raises(EnvFault):
        collector.collect_episodes(carry, None, 8, max_episode_steps=10)
    carry, rows = collector.recover()
    _, episodes = collector.collect_episodes(
        carry, None, 2, max_episode_steps=10, return_trajectory=True
    )
    # Ids of the queue count down from -1.
    assert np.max(episodes.trajectory.episode_id[0]) < np.min(rows.episode_id) < 0


@pytest.mark.parametrize("num_episodes", [1, 7])
def test_lost_episode_is_masked_in_episodes(num_episodes):
    collector = make_collector(make_fault_fn(4), on_fault="restart")
    carry, episodes = collector.collect_episodes(
        collector.init(KEY), None, num_episodes, max_episode_steps=100
    )
    episodes = jax.device_get(episodes)
    # Call 4 of lane 1 is step 2 of episode 1, after resets by `init` and by the call.
    expected = np.arange(num_episodes) != 1
    np.testing.assert_array_equal(episodes.mask, expected)
    np.testing.assert_array_equal(episodes.episode_length, np.where(expected, 5, 0))
    assert int(episodes.num_steps) == 5 * expected.sum()
    assert collector.fault_stats.faulty_episodes == int(num_episodes > 1)
    stats = jax.jit(rollout.summarize)(episodes)
    assert int(stats.num_episodes) == expected.sum()
    _, padded = collector.collect_episodes(
        carry, None, 2, max_episode_steps=9, return_trajectory=True
    )
    rows = padded.trajectory
    assert rows.mask.sum() == 10
    assert padded.mask.all()


@pytest.mark.parametrize("max_length", [None, 9], ids=["episodes", "trajectory"])
def test_episodes_lost_in_their_resets_are_masked(max_length):
    # Call 1 is the reset by `init`, and call 2 the reset of the only assigned episode.
    fault_fn = lambda number, env: BROKEN if (number, env) == (2, 0) else None  # noqa: E731
    collector = make_collector(fault_fn, on_fault="restart")
    carry, episodes = collector.collect_episodes(
        collector.init(KEY),
        None,
        1,
        max_episode_steps=max_length,
        return_trajectory=max_length is not None,
    )
    np.testing.assert_array_equal(episodes.mask, [False])
    np.testing.assert_array_equal(episodes.episode_length, [0])
    if max_length is not None:
        assert episodes.trajectory.mask.shape == (9, 1)
        assert not episodes.trajectory.mask.any()
    _, rows = collect(collector, 3, carry)
    assert rows.mask.all()


def test_lost_episode_stays_masked_with_min_steps():
    collector = make_collector(make_fault_fn(4), on_fault="restart")
    _, episodes = collector.collect_episodes(
        collector.init(KEY), None, 9, max_episode_steps=100, min_steps=15
    )
    # Episode 1 is lost. Episodes 0, 2 and 3 have 15 steps together.
    np.testing.assert_array_equal(episodes.mask, [1, 0, 1, 1, 0, 0, 0, 0, 0])
    assert int(episodes.num_steps) == 15


def test_episodes_that_never_started_are_masked_with_min_steps():
    # Call 7 is the last step of episode 1, so 5 of the first 15 steps are lost.
    collector = make_collector(make_fault_fn(7), on_fault="restart")
    carry, episodes = collector.collect_episodes(
        collector.init(KEY), None, 9, max_episode_steps=100, min_steps=15
    )
    np.testing.assert_array_equal(episodes.mask, [1, 0, 1, 0, 0, 0, 0, 0, 0])
    assert int(episodes.num_steps) == 10
    assert carry.next_episode == 3


def test_fault_stats_and_max_restarts_count_across_calls_of_init():
    collector = make_collector(make_fault_fn(4, 15), on_fault="restart", max_restarts=1)
    collect(collector, 5)
    assert collector.fault_stats == (1, 3, 1)
    carry = collector.init(KEY)
    assert collector.fault_stats == (1, 3, 1)
    with pytest.raises(EnvFault, match="`max_restarts`=1 are used up"):
        collector.collect_steps(carry, None, 20)
