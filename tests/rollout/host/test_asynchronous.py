"""Collectors with `num_ready`: rows of environments that step asynchronously."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiles import count_compiles
from host_count import POLICY, DelayedCount, assert_same

import rollout
from rollout import envs
from rollout.envs.host.types import EnvFault

KEY = jax.random.key(11)
regroup_by_env = jax.jit(rollout.host.regroup_by_env)


def exponential(rng, env):
    """Samples the seconds of a step; the mean increases with the environment."""
    return rng.exponential(1.0 + env)


def no_fault(number, env):
    return None


def make_collector(
    num_envs=5,
    num_ready=2,
    *,
    make_env=DelayedCount,
    latency_fn=exponential,
    fault_fn=no_fault,
    policy=POLICY,
    **options,
):
    env = make_env(num_envs, latency_fn=latency_fn, fault_fn=fault_fn)
    return rollout.HostCollector(env=env, policy=policy, num_ready=num_ready, **options)


def collect(collector, *sizes):
    """Returns the rows of several calls, concatenated, as NumPy arrays."""
    carry, parts = collector.init(KEY), []
    for size in sizes:
        carry, rows = collector.collect_steps(carry, None, size)
        parts.append(jax.device_get(rows))
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def rows_by_env(rows):
    """Yields the valid rows of each environment, in order of time, and its mask."""
    rows = jax.device_get(regroup_by_env(rows))
    for env in range(rows.mask.shape[1]):
        mask = rows.mask[:, env]
        yield jax.tree.map(lambda x, m=mask, e=env: x[: m.sum(), e], rows), mask


def test_final_value_uses_obs_and_policy_state_of_the_environment():
    rows = collect(make_collector(num_ready=3), 40, 20)
    bootstraps = rows.truncated & ~rows.terminated
    assert bootstraps.any(axis=0).all()  # in every column
    assert len(set(rows.info.env_id[bootstraps])) == 5
    value = 10.0 * rows.next_obs[..., 0] + rows.episode_length
    np.testing.assert_array_equal(rows.final_value, np.where(bootstraps, value, 0.0))


def test_rows_of_each_environment_are_complete_and_in_order():
    rows = collect(make_collector(), 60, 1, 39)
    assert rows.mask.all()
    # A row has two different environments.
    assert all(len(set(ids)) == 2 for ids in rows.info.env_id)
    counts = []
    for env_rows, mask in rows_by_env(rows):
        counts.append(mask.sum())
        assert mask[: mask.sum()].all()
        # A row continues from the previous row, or starts an episode.
        first = np.concatenate([[True], env_rows.done[:-1]])
        np.testing.assert_array_equal(env_rows.first, first)
        np.testing.assert_array_equal(env_rows.obs[first], 0.0)
        np.testing.assert_array_equal(
            env_rows.obs[1:][~first[1:]], env_rows.next_obs[:-1][~first[1:]]
        )
        length = env_rows.episode_length
        np.testing.assert_array_equal(env_rows.extras["count"], length - 1)
        np.testing.assert_array_equal(env_rows.reward, length)
        np.testing.assert_array_equal(np.diff(env_rows.episode_id[first]), 5)
    assert min(counts) > 0
    assert counts[0] > counts[4]  # environment 0 is the fastest
    assert sum(counts) == 200


def test_each_policy_call_has_another_key():
    # The first row needs three calls of the policy: lanes 0 and 1, 2 and 3, 4.
    rows = collect(make_collector(latency_fn=lambda rng, env: 0.0), 3)
    assert len(np.unique(rows.extras["noise"])) == 6


def test_short_calls_equal_one_long_call():
    """The next call returns the steps in flight at the end of a call."""
    assert_same(collect(make_collector(), 7, 1, 22), collect(make_collector(), 30))


def test_compile_makes_the_program_of_the_calls():
    def act(params, obs, key):
        return jnp.zeros(len(obs), jnp.int32)

    policy = rollout.stateless_policy(act)
    collector = make_collector(num_envs=4, num_ready=3, policy=policy)
    carry = collector.init(KEY)
    collector.compile(carry, None)
    with count_compiles() as events:
        collector.collect_steps(carry, None, 2)
    assert not events


def test_num_ready_of_all_environments_equals_synchronous_steps():
    rows = collect(make_collector(num_ready=5, latency_fn=lambda rng, env: 0.0), 20)
    expected = collect(make_collector(num_ready=None), 20)
    assert_same(rows.replace(info=()), expected.replace(info=()))


@pytest.mark.parametrize("num_episodes", [3, 12])
def test_collect_episodes_returns_complete_episodes(num_episodes):
    collector = make_collector(num_envs=4, num_ready=2)
    # The episodes start while steps are in flight.
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


def test_idle_environments_receive_no_action():
    collector = make_collector(num_envs=4, num_ready=2)
    carry, num_sent = collector.init(KEY), collector.env.num_sent
    _, episodes = collector.collect_episodes(carry, None, 1, max_episode_steps=9)
    assert collector.env.num_sent - num_sent == episodes.num_steps


def test_episode_lengths_do_not_depend_on_latency():
    lengths = []
    for num_ready in (None, 3):
        collector = make_collector(num_envs=4, num_ready=num_ready)
        _, episodes = collector.collect_episodes(
            collector.init(KEY), None, 12, max_episode_steps=100
        )
        lengths.append(episodes.episode_length)
    np.testing.assert_array_equal(*lengths)


def test_normalization_counts_each_observation_once():
    def make_env(*args, **options):
        return envs.NormalizeHostEnv(DelayedCount(*args, **options))

    collector = make_collector(make_env=make_env)
    rows = collect(collector, 30, 1, 19)
    for env_rows, mask in rows_by_env(rows):
        assert mask[: mask.sum()].all()
        is_later_step = ~env_rows.first[1:]
        np.testing.assert_array_equal(
            env_rows.obs[1:][is_later_step], env_rows.next_obs[:-1][is_later_step]
        )
    # The raw observation is the number of the step. Reset observations are 0.
    length = np.asarray(rows.episode_length, np.float64)
    np.testing.assert_array_equal(rows.episode_return, length * (length + 1) / 2)
    statistics = collector.env.shared.statistics.value[0]
    num_obs = length.size + 5 + rows.done.sum()
    np.testing.assert_allclose(statistics.count, num_obs, rtol=1e-5)
    np.testing.assert_allclose(statistics.mean[0], length.sum() / num_obs, rtol=1e-4)


def test_rows_of_faulty_episodes_are_masked():
    def fault_fn(number, env):
        return {3: RuntimeError("no"), 9: "nan"}.get(number) if env == 3 else None

    accumulator = rollout.Accumulator(jnp.zeros, lambda x, t: x + t.reward)
    collector = make_collector(
        fault_fn=fault_fn, on_fault="restart", accumulators={"sum": accumulator}
    )
    rows = collect(collector, 40)
    stats = collector.fault_stats
    assert (stats.faulty_episodes, stats.restarts) == (2, 2)
    assert (~rows.mask).sum() == stats.lost_steps >= 2
    assert np.isfinite(rows.next_obs).all()
    np.testing.assert_array_equal(rows.accumulated["sum"], rows.episode_return)
    for env_rows, mask in rows_by_env(rows):
        assert mask[: mask.sum()].all()
        np.testing.assert_array_equal(env_rows.reward, env_rows.episode_length)


def invalid_action(number, obs, key):
    """Returns an invalid action after `number` steps of an episode."""
    return jnp.where(obs[:, 0] >= number, 3, 0).astype(jnp.int32)


INVALID_ACTION = {"policy": rollout.stateless_policy(invalid_action)}
FAULT = {"fault_fn": lambda number, env: OSError() if (env, number) == (4, 3) else None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(FAULT, "environment 4", id="fault"),
        pytest.param(INVALID_ACTION, "lane 3 `action` .* got 3", id="invalid_action"),
    ],
)
def test_error_names_the_environment_and_recover_keeps_rows(options, message):
    collector = make_collector(latency_fn=lambda rng, env: 9.0 - 2 * env, **options)
    with pytest.raises((EnvFault, ValueError), match=message):
        collector.collect_steps(collector.init(KEY), np.float32(2), 20)
    carry, rows = collector.recover()
    assert rows.mask.any()
    assert rows.mask.all() == (options is INVALID_ACTION)
    _, rows = collector.collect_steps(carry, np.float32(99), 20)
    assert rows.mask.all()


class FixedBatchSize(DelayedCount):
    """Environments that return exactly two results at a time, as in EnvPool."""

    batch_size = 2

    def receive(self, num_ready, timeout=None):
        assert num_ready == self.batch_size
        return super().receive(num_ready, timeout)


def test_idle_environments_step_with_a_fixed_batch_size():
    collector = make_collector(make_env=FixedBatchSize)
    carry = collector.init(KEY)
    for num_episodes in (1, 7):
        carry, episodes = collector.collect_episodes(
            carry, None, num_episodes, max_episode_steps=100
        )
        assert episodes.finished.all()
