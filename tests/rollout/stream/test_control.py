"""Prefetching, stopping, interrupting, placing and resuming a stream."""

import functools
import os
import signal
import threading
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import raw
from jax.sharding import NamedSharding, PartitionSpec
from streams import (
    EPISODES,
    host,
    learn,
    make_learner,
    make_stream,
    new_stream,
    train,
)

import rollout
from rollout import envs

slow = pytest.mark.slow
each_prefetch = pytest.mark.parametrize("prefetch", [0, 1])
TIMEOUT = 60  # s, after which a test hangs


def take(stream, num_batches):
    return [host(next(stream)) for _ in range(num_batches)]


def assert_same(got, want):
    for batch, expected in zip(got, want, strict=True):
        chex.assert_trees_all_equal(batch, expected)


@each_prefetch
def test_batch_uses_the_params_of_its_version(prefetch):
    update = jax.jit(lambda params: {"odds": params["odds"] / 2}, donate_argnums=0)
    stream, params = make_stream(prefetch=prefetch), {"odds": jnp.float32(0.5)}
    stream.set_params(params)
    versions = []
    for number in range(4):
        batch = next(stream)
        version = batch.params_version
        odds = 0.5 ** max(version, 1)  # version 0 has the odds of version 1
        assert (host(batch).extras["value"] == odds).all()
        versions.append(version)
        old, params = params, update(params)
        assert old["odds"].is_deleted()
        assert stream.state()["params"]["odds"] == 0.5 ** (number + 1)
        stream.set_params(params)
    # If `prefetch` is 1, the second batch starts before the first batch is returned.
    assert versions == ([1, 1, 2, 3] if prefetch else [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("prefetch", "options"), [(0, {}), (1, {}), pytest.param(0, EPISODES, marks=slow)]
)
def test_reuse_memory_deletes_earlier_batches(prefetch, options):
    stream = make_stream(reuse_memory=True, prefetch=prefetch, **options)
    batches = []
    for number, expected in enumerate(take(make_stream(**options), 4)):
        batches.append(next(stream))
        # Compare in JAX: a NumPy view of an array would prevent the reuse.
        pairs = map(jax.tree.leaves, (raw(batches[-1].trajectory), expected))
        assert all(jnp.array_equal(x, y) for x, y in zip(*pairs, strict=True))
        for older in batches[: max(0, number - prefetch)]:
            for leaf in jax.tree.leaves(older.trajectory):
                with pytest.raises(RuntimeError, match="deleted"):
                    np.asarray(leaf)


def test_numpy_view_of_a_batch_stays_valid_with_reuse_memory():
    stream, views, copies = make_stream(reuse_memory=True), [], []
    for _ in range(4):
        views.append(np.asarray(next(stream).trajectory.next_obs))
        copies.append(views[-1].copy())
        assert_same(views, copies)


def test_reuse_memory_writes_to_the_memory_of_the_previous_batch():
    stream, addresses = make_stream(reuse_memory=True), set()
    for _ in range(4):
        addresses.add(next(stream).trajectory.next_obs.unsafe_buffer_pointer())
    assert len(addresses) == 1


def test_batch_that_the_user_deletes_is_not_reused():
    stream, want = make_stream(reuse_memory=True, prefetch=1), take(make_stream(), 4)
    for expected in want:
        batch = next(stream)
        chex.assert_trees_all_equal(host(batch), expected)
        batch.trajectory.obs.delete()


def test_last_batch_is_readable_with_reuse_memory():
    batches = list(make_stream(reuse_memory=True, total_steps=16))
    assert int(batches[-1].trajectory.mask.sum()) == 8


def spread(*axes):
    mesh = jax.make_mesh((2,), ("device",), devices=jax.devices()[:2])
    return NamedSharding(mesh, PartitionSpec(*axes))


@pytest.mark.parametrize(
    "device",
    ["host", jax.devices()[1], pytest.param(spread(None, "device"), marks=slow)],
)
def test_device_receives_the_same_batches(device):
    options = {"total_steps": 24 if device == "host" else 36}  # 4 x 8 + 4
    want = [host(batch) for batch in make_stream(**options)]
    options |= {"reuse_memory": device == "host", "prefetch": 1}
    placed = list(make_stream(device=device, **options))
    assert_same(map(host, placed), want)
    for leaf in jax.tree.leaves([batch.trajectory for batch in placed]):
        if device == "host":
            assert isinstance(leaf, np.ndarray)
        elif isinstance(device, jax.Device):
            assert leaf.devices() == {device}
        else:
            assert leaf.sharding.is_equivalent_to(device, leaf.ndim)


@each_prefetch
def test_stop_ends_the_iteration_after_the_current_batch(prefetch):
    stream, steps = make_stream(prefetch=prefetch, total_steps=80), []
    for batch in stream:
        steps.append(batch.steps)
        if len(steps) == 3:
            stream.stop()
    assert steps == [8] * 3
    # A new loop resumes the iteration.
    steps += [batch.steps for batch in stream]
    assert steps == [8] * 10


def slowly(trajectory):
    """Returns the trajectory after a quarter of a second."""
    wait = functools.partial(time.sleep, 0.25)
    jax.experimental.io_callback(wait, None, ordered=True)
    return trajectory


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 1},
        pytest.param({**EPISODES, "reuse_memory": True, "prefetch": 1}, marks=slow),
    ],
)
def test_ctrl_c_loses_no_batch(options):
    """Sends real signals while the stream starts or waits for a batch."""
    stream = new_stream(**options)
    plain = make_stream(**{**options, "reuse_memory": False})
    assert_same(take(stream, 1), take(plain, 1))  # compiles
    start = time.perf_counter()
    assert_same(take(stream, 3), take(plain, 3))
    duration = (time.perf_counter() - start) / 6
    rng, num_interrupts, num_lost = np.random.default_rng(0), 0, 0
    press = lambda *_: signal.raise_signal(signal.SIGINT)  # noqa: E731
    old_handler = signal.signal(signal.SIGALRM, press)
    alarm = threading.Timer(TIMEOUT, os.abort)  # a hang cannot be interrupted
    alarm.start()
    try:
        for number in range(100):
            batch, steps, start = None, stream.steps, time.perf_counter()
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 2 * duration))
                batch = next(stream)
                signal.setitimer(signal.ITIMER_REAL, 0)
                duration = min(duration, time.perf_counter() - start)
            except KeyboardInterrupt:
                num_interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            if batch is None and stream.steps == steps:
                batch = next(stream)
            want = next(plain)
            if batch is None:  # interrupted after the last line of `next`
                num_lost += 1
            else:
                chex.assert_trees_all_equal(host(batch), host(want))
            assert stream.stats.batches == number + 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
        alarm.cancel()
    assert num_interrupts > 10
    assert num_lost < num_interrupts / 2
    stream.close()


def test_stream_continues_after_an_error_in_a_batch():
    fails = []

    def fail(_):
        if fails:
            raise ValueError(fails.pop())

    def look(trajectory):
        jax.debug.callback(fail, trajectory.reward)
        return trajectory

    stream, want = new_stream(postprocess=look), take(make_stream(), 3)
    assert_same(take(stream, 1), want[:1])
    fails.append("the callback has failed")
    with pytest.raises(jax.errors.JaxRuntimeError, match="the callback has failed"):
        next(stream)
    assert_same(take(stream, 2), want[1:])


@pytest.mark.parametrize("prefetch", [1, pytest.param(0, marks=slow)])
def test_restored_stream_returns_the_same_bits(prefetch, tmp_path):
    want = train(make_stream(prefetch=prefetch), 6)
    stream = make_stream(prefetch=prefetch)
    got = train(stream, 3)
    rollout.checkpoint.save(tmp_path, {"stream": stream.state()})
    train(stream, 2)  # `restore` discards these batches
    options = {"key": jax.random.key(0), "params": {"odds": jnp.float32(0)}}
    new = new_stream(prefetch=prefetch, **options)
    saved = rollout.checkpoint.restore(tmp_path, {"stream": new.state()})
    for resumed in (new, stream):
        resumed.restore(saved["stream"])
        assert_same(got + train(resumed, 3), want)


def test_restored_stream_uses_the_initial_params_for_the_pending_batch():
    stream = make_stream(prefetch=1)
    want = take(stream, 2)
    stream = make_stream(prefetch=1)
    next(stream)  # starts the second batch
    stream.set_params({"odds": jnp.float32(0)})
    stream.restore(stream.state())
    batch = next(stream)
    assert batch.params_version == 0
    assert_same([host(batch)], want[1:])


def test_restored_stream_counts_more_than_int32_steps():
    stream = make_stream()
    state = stream.state()
    state["counts"][0] = 2**31
    stream.restore(state)
    next(stream)
    assert stream.steps == stream.state()["counts"][0] == 2**31 + 8


def test_state_excludes_the_pending_batch():
    stream = make_stream(prefetch=1, postprocess=slowly)
    next(stream)
    state = stream.state()  # the second batch is running
    assert int(state["counts"][0]) == 8
    np.testing.assert_array_equal(state["carry"].step, 2)
    want = host(next(stream))
    stream.restore(state)
    chex.assert_trees_all_equal(host(next(stream)), want)


def test_restore_includes_normalization_statistics():
    env = envs.NormalizeReward(envs.NormalizeObs(make_learner().env))
    learner = make_learner().replace(env=env)
    params = {"odds": jnp.float32(0.5)}
    options = {"key": jax.random.key(7), "params": params, "steps_per_batch": 8}
    stream = rollout.Stream(learner, **options)
    next(stream)
    state, carry, stats = stream.state(), stream.carry, stream.stats
    assert stats.steps == 8
    want = take(stream, 1)
    assert not learner.freeze(carry).env.learns
    stream.restore(state)
    chex.assert_trees_all_equal(raw(stream.carry), raw(carry))
    chex.assert_trees_all_equal(stream.stats, stats)
    assert_same(take(stream, 1), want)
    # Rewards of `CountEnv` are the numbers of the steps.
    length = want[0].episode_length
    returns = want[0].episode_return
    np.testing.assert_array_equal(returns, length * (length + 1) // 2)


def test_closed_stream_raises():
    with new_stream() as stream:
        stream.set_params(learn(next(stream)))
    with pytest.raises(RuntimeError, match="The stream is closed"):
        next(stream)
    stream.close()  # once more does nothing
