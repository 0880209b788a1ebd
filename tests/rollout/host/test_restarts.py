"""Environments that fail: masks and counts of lost steps; the others go on."""

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


def make(fault_fn=lambda number, env: None, num_envs=3, **options):
    """Lanes whose episodes have five steps; calls are counted from the first reset."""
    env = HostCount(num_envs, fault_fn=fault_fn, **LENGTHS)
    policy = rollout.stateless_policy(act)
    return HostCollector(env=env, policy=policy, **options)


def fails_at(*numbers, env=1, what=BROKEN):
    return lambda number, at: what if at == env and number in numbers else None


def collect(collector, num_steps, carry=None):
    carry = collector.init(KEY) if carry is None else carry
    carry, trajectory = collector.collect_steps(carry, None, num_steps)
    return carry, jax.device_get(trajectory)


# The calls of an environment: 1 is a reset, 2 to 6 the steps of the first episode, 7 a
# reset, 8 to 12 the second episode. So call 4 is step 3 of the first one, in row 2.
@pytest.mark.parametrize(
    ("call", "lost", "what"),
    [(2, (0,), "nan"), (4, (0, 1, 2), BROKEN), (10, (5, 6, 7), "nan reward")],
)
def test_episode_is_masked_from_its_first_row(call, lost, what):
    collector = make(fails_at(call, what=what), on_fault="restart")
    _, rows = collect(collector, 20)
    expected = np.ones((20, 3), bool)
    expected[list(lost), 1] = False
    np.testing.assert_array_equal(rows.mask, expected)
    assert collector.fault_stats == (1, len(lost), 1)
    assert all(not np.any(x[~rows.mask]) for x in jax.tree.leaves(rows))
    after = lost[-1] + 1  # a new episode, of the lane's next number
    assert rows.episode_length[after, 1] == 1
    assert rows.episode_id[after, 1] == 1 + 3 * (1 + (call > 6))


def test_neighbours_do_not_notice():
    _, good = collect(make(), 30)
    collector = make(fails_at(3, 4, 9, 15), on_fault="restart")
    _, rows = collect(collector, 30)
    others = [jax.tree.map(lambda x: x[:, [0, 2]], t) for t in (good, rows)]
    assert_same(*others)


def test_episode_that_began_in_an_earlier_call_keeps_the_rows_of_that():
    collector = make(fails_at(5), on_fault="restart")
    carry, first = collect(collector, 2)
    _, second = collect(collector, 4, carry)
    assert first.mask.all()
    assert not second.mask[:2, 1].any()
    assert second.mask[2:].all()
    assert collector.fault_stats.lost_steps == 2


@pytest.mark.parametrize("what", [BROKEN, "nan"])
def test_fault_at_a_reset_takes_the_next_episode(what):
    # The first reset fails, and another one twice in a row.
    collector = make(fails_at(1, 8, 9, what=what), on_fault="restart")
    _, rows = collect(collector, 12)
    assert rows.mask.all()
    assert collector.fault_stats == (3, 0, 3)
    np.testing.assert_array_equal(rows.episode_id[[0, 5], 1], [1 + 3, 1 + 3 * 4])


def test_lost_steps_exclude_the_row_that_only_resets():
    # Call 7 is a reset, call 8 the row that only resets, call 10 step 2.
    env = HostCount(3, fault_fn=fails_at(10), resets_itself=True, **LENGTHS)
    policy = rollout.stateless_policy(act)
    collector = HostCollector(env=env, policy=policy, on_fault="restart")
    collect(collector, 12)
    assert collector.fault_stats == (1, 2, 1)


def test_faults_of_two_environments_in_the_same_step_both_count():
    faults = {0: BROKEN, 2: "nan"}
    fault_fn = lambda number, env: faults.get(env) if number == 4 else None  # noqa: E731
    collector = make(fault_fn, on_fault="restart")
    _, rows = collect(collector, 5)
    expected = np.ones((5, 3), bool)
    expected[:3, [0, 2]] = False
    np.testing.assert_array_equal(rows.mask, expected)
    assert collector.fault_stats == (2, 6, 2)


def test_environment_that_always_fails_is_given_up():
    fault_fn = lambda number, env: BROKEN if env == 1 and number > 2 else None  # noqa: E731
    collector = make(fault_fn, on_fault="restart", max_restarts=4)
    carry = collector.init(KEY)
    with pytest.raises(EnvFault, match=r"environment 1 .*`max_restarts`=4") as error:
        collector.collect_steps(carry, None, 50)
    assert error.value.__cause__ is BROKEN
    assert collector.fault_stats.restarts == 4
    with pytest.raises(ValueError, match="`recover`"):
        collector.collect_steps(carry, None, 50)


def test_collected_rows_are_kept():
    """Two rows are whole when the third step fails: of the others all three are."""
    collector = make(fails_at(4))
    carry = collector.init(KEY)
    with pytest.raises(EnvFault, match=r"1 failed: .* it broke, at step 3 of its"):
        collector.collect_steps(carry, None, 8)
    carry, rows = collector.recover()
    np.testing.assert_array_equal(rows.mask, np.tile([True, False, True], (3, 1)))
    carry, after = collect(collector, 4, carry)
    np.testing.assert_array_equal(after.episode_length[:, 0], [4, 5, 1, 2])
    np.testing.assert_array_equal(after.episode_length[:, 1], [1, 2, 3, 4])
    carry, rows = collector.recover()  # nothing was cut short
    assert rows is None
    np.testing.assert_array_equal(carry.episode.episode_length[0], 2)


def test_lanes_begin_episodes_of_their_own_after_a_call_for_some():
    """Ids of assigned episodes are negative, and nobody waits for those any more."""
    collector = make(fails_at(4))
    carry = collector.init(KEY)
    with pytest.raises(EnvFault):
        collector.collect_episodes(carry, None, 8, max_episode_steps=10)
    carry, _ = collector.recover()
    assert (carry.episode.episode_id >= 0).all()
    np.testing.assert_array_equal(carry.episode.episode_length, 0)
    other = make()
    restored = other.restore(carry, b"")
    _, want = collect(collector, 12, carry)
    assert (want.episode_id >= 0).all()
    assert_same(collect(other, 12, restored)[1], want)


def test_episodes_after_an_interrupted_call_have_new_ids():
    collector = make(fails_at(4))
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
def test_lost_episode_is_among_the_episodes(num_episodes):
    collector = make(fails_at(4), on_fault="restart")
    carry, episodes = collector.collect_episodes(
        collector.init(KEY), None, num_episodes, max_episode_steps=100
    )
    episodes = jax.device_get(episodes)
    # Lane 1 is reset by `init` and by the call, so it fails at step 2 of episode 1.
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


def test_lost_episode_stays_masked_with_min_steps():
    collector = make(fails_at(4), on_fault="restart")
    _, episodes = collector.collect_episodes(
        collector.init(KEY), None, 9, max_episode_steps=100, min_steps=15
    )
    # Episode 1 is lost. Episodes 0, 2 and 3 have 15 steps together.
    np.testing.assert_array_equal(episodes.mask, [1, 0, 1, 1, 0, 0, 0, 0, 0])
    assert int(episodes.num_steps) == 15


def test_fault_stats_and_max_restarts_count_across_calls_of_init():
    collector = make(fails_at(4, 15), on_fault="restart", max_restarts=1)
    collect(collector, 5)
    assert collector.fault_stats == (1, 3, 1)
    carry = collector.init(KEY)
    assert collector.fault_stats == (1, 3, 1)
    with pytest.raises(EnvFault, match="`max_restarts`=1 are used up"):
        collector.collect_steps(carry, None, 20)
