"""`Stream` and checkpoints with a `HostCollector`."""

import functools
import threading
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_count import KEY, OPTIONS, POLICY, HostCount, assert_same, in_jax, on_host
from host_envs import Arrays, FailsAtLoad, Faultless

import rollout
from rollout import envs
from rollout.envs.host.local_envs import LocalEnvs
from rollout.envs.host.types import EnvFault
from rollout.host import HostCollector


def make_stream(collector, **options):
    options = {"steps_per_batch": 40, "total_steps": 120, **options}
    return rollout.Stream(collector, key=KEY, params=np.float32(0), **options)


TRUNCATE = {"prefetch": 1, "max_episode_steps": 4, "at_batch_end": "truncate"}
RESET = {"at_batch_end": "reset", "postprocess": lambda t: (t.reward, t.mask)}
EPISODES = {
    "steps_per_batch": None,
    "episodes_per_batch": 5,
    "total_steps": None,
    "max_episode_steps": 6,
    "device": "host",
}


@pytest.mark.compiles(50)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(TRUNCATE, id="truncate"),
        pytest.param(EPISODES, id="episodes"),
        pytest.param(RESET, id="reset", marks=pytest.mark.slow),
    ],
)
def test_batches_equal_batches_of_jax_environments(options):
    streams = [make_stream(collector, **options) for collector in (on_host(), in_jax())]
    for _ in range(2):
        batches = [next(stream) for stream in streams]
        assert_same(batches[0].trajectory, batches[1].trajectory)
        assert_same(batches[0].stats, batches[1].stats)
        assert batches[0].steps == batches[1].steps
    stats = [stream.stats._replace(seconds=0.0) for stream in streams]
    chex.assert_trees_all_close(*stats, rtol=1e-6)
    for stream in streams:
        stream.close()


def test_stop_during_a_batch_starts_no_other_batch():
    collector, num_steps = on_host(), 0
    stream = make_stream(collector, prefetch=1)
    step = collector.env.step

    def step_and_stop(action):
        nonlocal num_steps
        num_steps += 1
        stream.stop()
        return step(action)

    collector.env.step = step_and_stop
    batch = next(stream)
    stream.close()  # waits for a started batch
    assert num_steps == batch.steps // collector.env.num_envs


def make_local_stream(make_fn, wrap=lambda env: env, **options):
    env = wrap(LocalEnvs([make_fn] * 4))
    policy = rollout.random_policy(env.action_space)
    return make_stream(HostCollector(env=env, policy=policy), **options)


@pytest.mark.parametrize(
    ("wrap", "options"),
    [(lambda env: env, {}), (envs.NormalizeHostEnv, EPISODES)],
    ids=["steps", "normalized_episodes"],
)
def test_restored_stream_returns_the_same_rows(wrap, options, tmp_path):
    make_env = functools.partial(Arrays, 7)
    stream, new_stream = (
        make_local_stream(make_env, wrap, **options) for _ in range(2)
    )
    next(stream), next(stream)
    rollout.checkpoint.save(tmp_path, stream.state())
    expected = next(stream)
    state = rollout.checkpoint.restore(tmp_path, new_stream.state())
    new_stream.restore(state)
    assert_same(next(new_stream).trajectory, expected.trajectory)
    stream.close(), new_stream.close()


@pytest.mark.parametrize("make_env", [envs.make_worker_envs, LocalEnvs])
def test_episodes_restart_if_one_environment_has_no_save_state(make_env):
    env = make_env([functools.partial(env_type, 7) for env_type in (Faultless, Arrays)])
    stream = make_stream(HostCollector(env, rollout.random_policy(env.action_space)))
    next(stream)
    with pytest.warns(UserWarning, match="2 unfinished episodes"):
        stream.restore(stream.state())
    assert next(stream).trajectory.first[0].all()
    stream.close(), env.close()


def test_restored_stream_continues_accumulated_values():
    total = rollout.Accumulator(jnp.zeros, lambda x, t: x + t.reward)
    env = LocalEnvs([functools.partial(Arrays, 7)] * 4)
    policy = rollout.random_policy(env.action_space)
    stream = make_stream(HostCollector(env, policy, accumulators={"total": total}))
    next(stream)
    stream.restore(stream.state())
    rows = next(stream).trajectory
    assert not rows.first[0].any()
    np.testing.assert_array_equal(rows.accumulated["total"], rows.episode_return)
    stream.close()


def test_save_of_a_stale_carry_is_empty():
    env = LocalEnvs([functools.partial(Arrays, 7)] * 2)
    collector = HostCollector(env, rollout.random_policy(env.action_space))
    carry = collector.init(KEY)
    assert all(collector.save(carry))
    collector.collect_steps(carry, None, 1)
    assert collector.save(carry) == [b"", b""]


def test_stream_starts_new_episodes_after_a_failed_restore():
    stream = make_local_stream(FailsAtLoad)
    next(stream)
    with pytest.raises(KeyError, match="no such state"):
        stream.restore(stream.state())
    trajectory = next(stream).trajectory
    assert trajectory.first[0].all()
    np.testing.assert_array_equal(trajectory.obs[0], 0)
    stream.close()


def test_restore_keeps_the_settings_of_the_environments():
    stream, new_stream = (
        make_local_stream(functools.partial(Arrays, x)) for x in (5, 2)
    )
    next(stream)
    new_stream.restore(stream.state())
    next(new_stream)
    assert np.asarray(next(new_stream).trajectory.episode_length).max() == 2
    stream.close(), new_stream.close()


class SlowCount(HostCount):
    """A `HostCount` whose steps take 10 ms."""

    is_stepping = threading.Event()

    def step(self, action):
        self.is_stepping.set()
        time.sleep(0.01)
        return super().step(action)


def test_restore_waits_for_the_pending_batch():
    stream = make_stream(HostCollector(env=SlowCount(4), **OPTIONS), prefetch=1)
    next(stream)
    with pytest.warns(UserWarning, match="unfinished episodes"):
        stream.restore(stream.state())
    trajectory = next(stream).trajectory
    np.testing.assert_array_equal(trajectory.obs[..., 0], trajectory.episode_length - 1)
    stream.close()


def test_close_waits_for_the_pending_batch():
    collector = HostCollector(env=SlowCount(4), **OPTIONS)
    stream = make_stream(collector, prefetch=1)
    next(stream)
    stream.close()
    assert collector.init(KEY).step == 0  # raises while a batch is running


def test_collector_raises_while_a_batch_is_pending():
    collector = HostCollector(env=SlowCount(4), **OPTIONS)
    stream = make_stream(collector, prefetch=1)
    expected_stream = make_stream(HostCollector(env=SlowCount(4), **OPTIONS))
    next(expected_stream), next(stream)
    SlowCount.is_stepping.clear()
    assert SlowCount.is_stepping.wait(10)
    with pytest.raises(RuntimeError, match="batch of a `Stream`"):
        rollout.evaluate(collector, None, KEY, 3, max_episode_steps=9)
    batch, expected = next(stream), next(expected_stream)
    chex.assert_trees_all_equal(batch.trajectory, expected.trajectory)
    stream.close(), expected_stream.close()


def test_episodes_restart_if_no_state_was_saved(tmp_path):
    stream, new_stream = make_stream(on_host()), make_stream(on_host())
    batch = next(stream)
    rollout.checkpoint.save(tmp_path, stream.state())
    state = rollout.checkpoint.restore(tmp_path, new_stream.state())
    with pytest.warns(UserWarning, match="unfinished episodes"):
        new_stream.restore(state)
    new_rows = jax.device_get(next(new_stream).trajectory)
    old_rows = jax.device_get(batch.trajectory)
    is_unfinished = ~old_rows.done[-1]
    assert is_unfinished.any()
    np.testing.assert_array_equal(
        new_rows.episode_id[0], old_rows.episode_id[-1] + np.where(is_unfinished, 0, 4)
    )
    assert new_rows.first[0].all()
    assert not new_rows.extras["count"][0].any()  # the policy also restarts
    # Episodes restart with their original seeds, so the rewards are equal.
    for lane in np.flatnonzero(is_unfinished):
        mask = old_rows.episode_id[:, lane] == old_rows.episode_id[-1, lane]
        rewards = new_rows.reward[: mask.sum(), lane]
        np.testing.assert_array_equal(rewards, old_rows.reward[mask, lane])
    stream.close(), new_stream.close()


def fault_fn(number, env):
    return RuntimeError("no") if (number, env) == (6, 2) else None


def test_batch_of_episodes_restarts_after_a_fault():
    options = {"steps_per_batch": None, "episodes_per_batch": 5, "total_steps": None}
    collector = on_host(fault_fn=fault_fn, max_length=2)
    stream = make_stream(collector, max_episode_steps=6, **options)
    with pytest.raises(EnvFault, match="environment 2"):
        next(stream)
    for _ in range(2):
        episodes = next(stream).episodes
        assert episodes.mask.all()
        assert (episodes.episode_length == 2).all()
    stream.close()


def test_batch_keeps_its_rows_after_two_faults():
    """Rows before a fault remain in the batch."""

    def fault_fn(number, env):
        return RuntimeError("no") if env == 2 and number in (6, 12) else None

    stream = make_stream(on_host(fault_fn=fault_fn, max_length=2))
    for _ in range(2):
        with pytest.raises(EnvFault, match="environment 2"):
            next(stream)
    batch = next(stream)
    assert batch.steps == 40
    # Calls 1 to 3 and 7 to 9 are episodes; calls 4 to 6 and 10 to 12 are lost.
    mask = np.asarray(batch.trajectory.mask)
    assert mask[:, 2].tolist() == [True, True, False, False] * 2 + [True, True]
    assert mask.sum() == 40 - 4
    stream.close()


def test_batch_resets_its_episodes_once_if_a_fault_interrupts_it():
    collector = on_host(fault_fn=fault_fn, min_length=9, max_length=9, limit=9)
    stream = make_stream(collector, at_batch_end="reset")
    with pytest.raises(EnvFault, match="environment 2 failed"):
        next(stream)
    lengths = np.asarray(next(stream).trajectory.episode_length)
    assert lengths[:, 0].tolist() == [*range(1, 10), 1]
    stream.close()


def test_batch_keeps_its_params_after_a_fault():
    def act(params, obs, key):
        return jnp.zeros(4, jnp.int32), {"params": jnp.broadcast_to(params, 4)}

    collector = on_host(fault_fn=fault_fn).replace(policy=rollout.stateless_policy(act))
    stream = make_stream(collector)
    with pytest.raises(EnvFault, match="environment 2"):
        next(stream)
    stream.set_params(np.float32(1))
    for version in (0, 1):  # the interrupted batch keeps version 0
        batch = next(stream)
        assert batch.params_version == version
        values = np.asarray(batch.trajectory.extras["params"])
        assert (values[np.asarray(batch.trajectory.mask)] == version).all()
    stream.close()


def test_fault_stats_count_the_masked_rows_of_a_stream():
    def fault_fn(number, env):
        return RuntimeError("no") if number % 7 == 3 else None

    collector = HostCollector(
        env=HostCount(4, fault_fn=fault_fn), policy=POLICY, on_fault="restart"
    )
    stream = make_stream(collector)
    masks = [batch.trajectory.mask for batch in stream]
    num_lost = sum(int((~mask).sum()) for mask in masks)
    assert num_lost == collector.fault_stats.lost_steps
    assert collector.fault_stats.faulty_episodes > 4
    assert stream.steps == 120  # including masked-out rows
    stream.close()
