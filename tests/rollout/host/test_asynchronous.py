"""`num_ready`: nothing lost, nothing twice, and no episode favoured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_count import POLICY, DelayedCount, assert_same

import rollout
from rollout import envs
from rollout.envs.host.types import EnvFault

KEY = jax.random.key(11)
regroup_by_env = jax.jit(rollout.host.regroup_by_env)


def exponential(rng, env):
    return rng.exponential(1.0 + env)  # some are slower than others


def make(num_envs=5, num_ready=2, kind=DelayedCount, **options):
    given = {x: options.pop(x) for x in ("latency_fn", "fault_fn") if x in options}
    env = kind(num_envs, **{"latency_fn": exponential, **given})
    options = {"policy": POLICY, "num_ready": num_ready, **options}
    return rollout.HostCollector(env=env, **options)


def collect(collector, *sizes):
    """The rows of some calls one after the other, NumPy."""
    carry, parts = collector.init(KEY), []
    for size in sizes:
        carry, rows = collector.collect_steps(carry, None, size)
        parts.append(jax.device_get(rows))
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def columns(rows):
    """The rows of each environment, in the order of time."""
    rows = jax.device_get(regroup_by_env(rows))
    for env in range(rows.mask.shape[1]):
        mask = rows.mask[:, env]
        yield jax.tree.map(lambda x, m=mask, e=env: x[: m.sum(), e], rows), mask


def test_values_of_truncated_rows_are_of_the_environment_and_its_memory():
    rows = collect(make(num_ready=3), 40, 20)
    cut = rows.truncated & ~rows.terminated
    assert cut.any(axis=0).all()  # in every column
    assert len(set(rows.info.env_id[cut])) == 5
    want = 10.0 * rows.next_obs[..., 0] + rows.episode_length
    np.testing.assert_array_equal(rows.final_value, np.where(cut, want, 0.0))


def test_each_environment_has_every_row_once_and_in_order():
    rows = collect(make(), 60, 1, 39)
    assert rows.mask.all()
    assert all(len(set(ids)) == 2 for ids in rows.info.env_id)  # none twice in a row
    counts = []
    for row, mask in columns(rows):
        counts.append(mask.sum())
        assert mask[: mask.sum()].all()
        # Every row goes on where the one before it stopped, or begins an episode.
        first = np.concatenate([[True], row.done[:-1]])
        np.testing.assert_array_equal(row.first, first)
        np.testing.assert_array_equal(row.obs[first], 0.0)
        np.testing.assert_array_equal(
            row.obs[1:][~first[1:]], row.next_obs[:-1][~first[1:]]
        )
        np.testing.assert_array_equal(row.extras["count"], row.episode_length - 1)
        np.testing.assert_array_equal(row.reward, row.episode_length)
        ids = row.episode_id[first]
        np.testing.assert_array_equal(np.diff(ids), 5)
    assert min(counts) > 0
    assert counts[0] > counts[4]  # the fast ones more often
    assert sum(counts) == 200


def test_every_action_has_its_random_numbers_in_a_call_that_starts_all_lanes():
    # The first row needs three calls of the policy: lanes 0 and 1, 2 and 3, 4.
    rows = collect(make(latency_fn=lambda rng, env: 0.0), 3)
    assert len(np.unique(rows.extras["noise"])) == 6


def test_calls_do_not_matter():
    """Actions in flight at the end of a call are answered in the next one."""
    assert_same(collect(make(), 7, 1, 22), collect(make(), 30))


def test_with_all_ready_it_is_the_synchronous_collector():
    rows = collect(make(num_ready=5, latency_fn=lambda rng, env: 0.0), 20)
    expected = collect(make(num_ready=None), 20)
    assert_same(rows.replace(info=()), expected.replace(info=()))


@pytest.mark.parametrize("num_episodes", [3, 12])
def test_first_episodes_that_start_are_played(num_episodes):
    collector = make(num_envs=4, num_ready=2)
    # Their episodes begin while steps are in flight.
    carry, _ = collector.collect_steps(collector.init(KEY), None, 7)
    for _ in range(2):
        carry, episodes = collector.collect_episodes(
            carry, None, num_episodes, max_episode_steps=100
        )
        assert episodes.mask.all()
        assert episodes.finished.all()
        length = np.asarray(episodes.episode_length)
        np.testing.assert_array_equal(
            episodes.episode_return, length * (length + 1) / 2
        )
    carry, episodes = collector.collect_episodes(
        carry, None, 5, max_episode_steps=9, return_trajectory=True
    )
    rows = episodes.trajectory
    lengths = np.asarray(rows.mask).sum(axis=0)
    assert (lengths >= 2).all()
    np.testing.assert_array_equal(rows.done.sum(axis=0), 1)
    _, rows = collector.collect_steps(carry, None, 10)
    assert rows.mask.all()


def test_environments_without_an_episode_get_no_action():
    collector = make(num_envs=4, num_ready=2)
    carry, num_sent = collector.init(KEY), collector.env.num_sent
    _, episodes = collector.collect_episodes(carry, None, 1, max_episode_steps=9)
    assert collector.env.num_sent - num_sent == episodes.num_steps


def test_episodes_are_those_of_their_seeds_however_slow_a_lane_is():
    """Episode k has the length that it has where all step at once."""
    host = make(num_envs=4, num_ready=None)
    _, expected = host.collect_episodes(host.init(KEY), None, 12, max_episode_steps=100)
    collector = make(num_envs=4, num_ready=3)
    _, got = collector.collect_episodes(
        collector.init(KEY), None, 12, max_episode_steps=100
    )
    np.testing.assert_array_equal(got.episode_length, expected.episode_length)


def test_observations_are_normalised_as_they_are_served():
    collector = make(
        kind=lambda *args, **options: envs.NormalizeHostEnv(
            DelayedCount(*args, **options)
        )
    )
    rows = collect(collector, 30, 1, 19)
    for row, mask in columns(rows):
        assert mask[: mask.sum()].all()
        inside = ~row.first[1:]
        np.testing.assert_array_equal(row.obs[1:][inside], row.next_obs[:-1][inside])
    # The raw observation is the number of the step; first observations are 0.
    n = np.asarray(rows.episode_length, np.float64)
    np.testing.assert_array_equal(rows.episode_return, n * (n + 1) / 2)
    of_obs = collector.env.shared.statistics.value[0]
    num_seen = n.size + 5 + rows.done.sum()
    np.testing.assert_allclose(of_obs.count, num_seen, rtol=1e-5)
    np.testing.assert_allclose(of_obs.mean[0], n.sum() / num_seen, rtol=1e-4)


def test_faults_are_masked_where_they_were_served():
    def fault_fn(number, env):
        return {3: RuntimeError("no"), 9: "nan"}.get(number) if env == 3 else None

    collector = make(fault_fn=fault_fn, on_fault="restart", accumulators={
        "sum": rollout.Accumulator(jnp.zeros, lambda x, t: x + t.reward)
    })  # fmt: skip
    rows = collect(collector, 40)
    stats = collector.fault_stats
    assert (stats.faulty_episodes, stats.restarts) == (2, 2)
    assert (~rows.mask).sum() == stats.lost_steps >= 2
    assert np.isfinite(rows.next_obs).all()
    np.testing.assert_array_equal(rows.accumulated["sum"], rows.episode_return)
    for row, mask in columns(rows):
        assert mask[: mask.sum()].all()
        np.testing.assert_array_equal(row.reward, row.episode_length)


def bad_action(number, obs, key):
    return jnp.where(obs[:, 0] >= number, 3, 0).astype(jnp.int32)


BAD_ACTION = {"policy": rollout.stateless_policy(bad_action)}
FAULT = {"fault_fn": lambda number, env: OSError() if (env, number) == (4, 3) else None}


@pytest.mark.parametrize(
    ("options", "message"),
    [(FAULT, "environment 4"), (BAD_ACTION, r"in lane 3 `action` must be in \[0, 2\]")],
)
def test_call_that_raises_keeps_the_rows_and_names_the_environment(options, message):
    collector = make(latency_fn=lambda rng, env: 9.0 - 2 * env, **options)
    with pytest.raises((EnvFault, ValueError), match=message):
        collector.collect_steps(collector.init(KEY), np.float32(2), 20)
    carry, rows = collector.recover()
    assert rows.mask.any()
    assert rows.mask.all() == (options is BAD_ACTION)
    _, rows = collector.collect_steps(carry, np.float32(99), 20)
    assert rows.mask.all()


class Fixed(DelayedCount):
    """One that returns two at a time, neither more nor fewer."""

    batch_size = 2

    def receive(self, num_ready, timeout=None):
        assert num_ready == self.batch_size
        return super().receive(num_ready, timeout)


def test_where_the_number_is_fixed_idle_environments_play_on():
    collector = make(kind=Fixed)
    carry = collector.init(KEY)
    for num_episodes in (1, 7):
        carry, episodes = collector.collect_episodes(
            carry, None, num_episodes, max_episode_steps=100
        )
        assert episodes.finished.all()
