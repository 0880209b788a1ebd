"""Collectors over worker processes with random faults, and with killed workers."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_envs import Faultless, Unreliable, wait_until_gone

import rollout
from rollout import envs

KEY = jax.random.key(4)
NUM_ENVS, LENGTH = 6, 5
POLICY = rollout.stateless_policy(lambda params, obs, key: jnp.ones(len(obs), int))


def make_collector(**options):
    env = envs.make_worker_envs([Unreliable] * NUM_ENVS, num_workers=3, timeout=0.5)
    options = {"on_fault": "restart", "max_restarts": 1000, **options}
    return rollout.HostCollector(env=env, policy=POLICY, **options)


@pytest.mark.slow
@pytest.mark.parametrize("num_ready", [None, 2])
def test_rows_of_faulty_episodes_are_masked_out(num_ready):
    collector = make_collector(num_ready=num_ready)
    carry, num_masked, valid_rows = collector.init(KEY), 0, []
    for _ in range(4):
        carry, rows = collector.collect_steps(carry, None, 60)
        rows = jax.device_get(rows)
        num_masked += int((~rows.mask).sum())
        valid_rows.append(jax.tree.map(lambda x, m=rows.mask: x[m], rows))
    rows = jax.tree.map(lambda *x: np.concatenate(x), *valid_rows)
    stats = collector.fault_stats
    assert num_masked == stats.lost_steps
    assert stats.restarts >= stats.faulty_episodes > 5
    assert np.isfinite(rows.obs).all()
    np.testing.assert_array_equal(rows.obs[:, 0], rows.episode_length - 1)
    np.testing.assert_array_equal(rows.truncated, rows.episode_length == LENGTH)
    # Each step of a complete episode has exactly one row.
    for episode_id in rows.episode_id[rows.truncated]:
        lengths = rows.episode_length[rows.episode_id == episode_id]
        np.testing.assert_array_equal(np.sort(lengths), np.arange(1, LENGTH + 1))
    pids = collector.env.pids
    collector.close()
    assert wait_until_gone(pids)


def test_init_replaces_killed_workers():
    env = envs.make_worker_envs([Faultless] * 2, num_workers=2)
    collector = rollout.HostCollector(env=env, policy=POLICY)
    collector.collect_steps(collector.init(KEY), None, 5)
    for pid in env.pids:
        os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(env.pids)
    with pytest.raises(envs.EnvFault, match="exit code -9"):
        collector.init(KEY)
    _, rows = collector.collect_steps(collector.init(KEY), None, 5)
    assert rows.mask.all()
    collector.close()
