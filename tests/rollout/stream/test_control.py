"""Streams that run ahead, are stopped, interrupted, recycled, placed and resumed."""

import functools
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_collector, raw

import rollout
from rollout.stream import _jobs

B = 4
each_env = pytest.mark.parametrize("name", ["count", "CartPole-v1"])
each_prefetch = pytest.mark.parametrize("prefetch", [0, 1])


def act(params, obs, key):
    """Two actions: the second with the odds that the parameters give."""
    del obs
    action = jax.random.bernoulli(key, params["odds"], (B,)).astype(jnp.int32)
    return action, {"value": jnp.broadcast_to(params["odds"], (B,))}


POLICY = rollout.stateless_policy(act)


@functools.cache
def make_learner(name):
    return rollout.Collector(env=make_collector(name, B).env, policy=POLICY)


def make_stream(name="count", **options):
    options = {"key": jax.random.key(7), "steps_per_batch": 7, **options}
    return rollout.Stream(
        make_learner(name), params={"odds": jnp.float32(0.5)}, **options
    )


def host(batch):
    return jax.device_get(raw(batch.trajectory))


def learn(batch):
    """Parameters that depend on every row of the batch."""
    share = batch.trajectory.action.sum() + batch.trajectory.episode_return.sum() / 64
    return {"odds": jnp.float32(share / 8 % 1)}


def train(stream, num_batches):
    """Batches of a loop that sets the parameters by what it saw."""
    seen = []
    for _ in range(num_batches):
        batch = next(stream)
        stream.set_params(learn(batch))
        seen.append((host(batch), batch.steps, batch.params_version))
    return seen


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        chex.assert_trees_all_equal(one, other)


@pytest.fixture
def at_part(monkeypatch):
    """Makes parts of one row; `at_part[n] = fn` calls `fn` when n have been filled."""
    fill, calls, count = _jobs.Job._fill_part, {}, iter(range(10**6))

    def fill_and_call(job):
        fill(job)
        call = calls.pop(next(count) + 1, None)
        if call is not None:
            call()
        time.sleep(0.002)

    monkeypatch.setattr(_jobs.Job, "_fill_part", fill_and_call)
    monkeypatch.setattr(_jobs.Pace, "next", lambda pace, num_left: min(1, num_left))
    return calls


@pytest.fixture
def alarm():
    """Sends the process a signal; `alarm.handler` is what the main thread then runs."""
    own = types.SimpleNamespace(
        handler=None, send=lambda: os.kill(os.getpid(), signal.SIGALRM)
    )
    before = signal.signal(signal.SIGALRM, lambda *_: own.handler())
    yield own
    signal.signal(signal.SIGALRM, before)


@each_prefetch
def test_version_says_with_which_parameters_a_batch_was_made(prefetch):
    versions = [version for *_, version in train(make_stream(prefetch=prefetch), 5)]
    # Ahead by one: the second batch was begun before the first was seen.
    assert versions == ([0, 1, 2, 3, 4] if prefetch == 0 else [0, 0, 1, 2, 3])


@each_env
def test_batch_made_ahead_has_the_parameters_of_its_version(name):
    stream = make_stream(name, prefetch=1)
    odds = [np.float32(0.5)]
    for _ in range(5):
        batch = next(stream)
        mask = np.asarray(batch.trajectory.mask)
        value = np.asarray(batch.trajectory.extras["value"])
        assert (value[mask] == odds[batch.params_version]).all()
        odds.append(np.float32(0.1 * len(odds)))
        stream.set_params({"odds": jnp.float32(odds[-1])})


@each_env
def test_running_ahead_gives_the_same_steps_where_parameters_stay(name):
    batches = [
        [host(batch) for batch in make_stream(name, total_steps=30, prefetch=prefetch)]
        for prefetch in (0, 1)
    ]
    assert len(batches[0]) == 5  # 4 x 7 + 2
    assert_same(*batches)


def test_parameters_may_be_donated_while_a_batch_is_made_with_them():
    update = jax.jit(lambda params: {"odds": params["odds"] / 2}, donate_argnums=0)
    stream, params = make_stream(prefetch=1), {"odds": jnp.float32(0.5)}
    stream.set_params(params)
    versions = []
    for _ in range(4):
        versions.append(next(stream).params_version)
        old, params = params, update(params)
        assert old["odds"].is_deleted()
        stream.set_params(params)
    assert versions == [1, 1, 2, 3]


def test_parameters_of_another_kind_are_refused():
    stream = make_stream()
    with pytest.raises(ValueError, match="`params` must keep structure, shapes"):
        stream.set_params({"odds": jnp.zeros(2)})
    with pytest.raises(ValueError, match="`params` must keep structure, shapes"):
        stream.set_params(jnp.float32(1))


@each_env
def test_recycled_batch_raises_and_never_shows_other_data(name):
    for prefetch in (0, 1):
        stream = make_stream(name, recycle=True, prefetch=prefetch)
        plain = make_stream(name, prefetch=prefetch)
        first = next(stream)
        view = np.asarray(first.trajectory.obs)  # shares the memory of the array
        kept = view.copy()
        for _ in range(3):
            last = next(stream)
        for leaf in jax.tree.leaves(first.trajectory):
            with pytest.raises(RuntimeError, match="deleted"):
                np.asarray(leaf)
        np.testing.assert_array_equal(view, kept)
        want = [next(plain) for _ in range(4)][-1]
        chex.assert_trees_all_equal(host(last), host(want))


@each_env
def test_recycled_stream_writes_to_the_memory_of_the_batch_before(name):
    stream = make_stream(name, recycle=True)
    places = set()
    for _ in range(4):
        batch = next(stream)
        places.add(batch.trajectory.next_obs.unsafe_buffer_pointer())
        del batch
    # The first batch was filled in parts, and all others lie where it lay.
    assert len(places) == 1


def test_output_of_a_postprocess_is_recycled_too():
    def keep(trajectory):
        return {"obs": trajectory.obs * 2, "mask": trajectory.mask}

    stream = make_stream(recycle=True, postprocess=keep)
    want = [host(batch) for batch in make_stream(total_steps=28)]
    old = None
    for expected in want:
        batch = next(stream)
        np.testing.assert_array_equal(batch.trajectory["obs"], expected.obs * 2)
        if old is not None:
            with pytest.raises(RuntimeError, match="deleted"):
                np.asarray(old["obs"])
        old = batch.trajectory


def test_memory_is_not_taken_from_under_a_job():
    def keep(trajectory):
        return trajectory.obs * 2

    # Once in about 600 batches the old one was deleted before all of it was donated.
    stream = make_stream(recycle=True, postprocess=keep)
    assert sum(next(stream).steps for _ in range(2000)) == 2000 * 7


def test_last_batch_of_a_run_stays_readable():
    batches = list(make_stream(recycle=True, total_steps=14))
    assert int(batches[-1].trajectory.mask.sum()) == 7


@each_env
def test_batch_lands_in_host_memory(name):
    on_host = list(make_stream(name, total_steps=21, placement="host", prefetch=1))
    want = [host(batch) for batch in make_stream(name, total_steps=21)]
    for batch, expected in zip(on_host, want, strict=True):
        assert isinstance(batch.trajectory.obs, np.ndarray)
        chex.assert_trees_all_equal(raw(batch.trajectory), expected)


# Batches of 7 steps in 4 lanes, so 2 rows; a process of its own can have two devices.
SHARDED = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
sys.path.insert(0, sys.argv[1])
from test_control import host, make_stream

mesh = jax.make_mesh((2,), ("device",))
for spec in [(None, "device"), ("device",), ()]:
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    for name in ("count", "CartPole-v1"):
        placed = make_stream(name, total_steps=21, placement=sharding, prefetch=1)
        for batch, want in zip(placed, make_stream(name, total_steps=21), strict=True):
            for leaf in jax.tree.leaves(batch.trajectory):
                assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            jax.tree.map(np.testing.assert_array_equal, host(batch), host(want))
"""


def test_batch_lands_by_a_sharding():
    folder = pathlib.Path(__file__).parent
    flags = "--xla_force_host_platform_device_count=2"
    root = folder.parents[2]
    paths = os.pathsep.join([str(root), str(root / "tests" / "support")])
    environ = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": paths}
    command = [sys.executable, "-c", SHARDED, str(folder)]
    run = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@each_env
@each_prefetch
def test_stop_from_a_thread_ends_the_batch_early(name, prefetch, at_part):
    # 100 steps are 25 rows, and the stop comes when 9 of them are there.
    options = {"steps_per_batch": 100, "total_steps": 140, "prefetch": prefetch}
    stream = make_stream(name, **options)
    at_part[9] = stream.stop
    batches = list(stream)
    assert [batch.steps for batch in batches] == [9 * B]
    assert int(batches[0].trajectory.mask.sum()) == 9 * B
    assert stream.stats.collect_steps == 9 * B
    # It goes on: 140 - 36 steps are left, and all are those of a run nobody stopped.
    batches += list(stream)
    assert [batch.steps for batch in batches] == [36, 100, 4]
    rows = [host(batch) for batch in batches]
    mask = np.concatenate([row.mask.all(axis=1) for row in rows])
    got = jax.tree.map(lambda *x: np.concatenate(x)[mask], *rows)
    collector = make_learner(name)
    carry = collector.init(jax.random.key(7))
    _, want = collector.collect_steps(carry, {"odds": jnp.float32(0.5)}, 35)
    chex.assert_trees_all_equal(got, jax.device_get(raw(want)))


def test_stop_within_the_loop_ends_the_iteration():
    stream, count = make_stream(), 0
    for _ in stream:
        count += 1
        if count == 3:
            stream.stop()
    assert count == 3
    assert next(stream).steps == 7


def test_cut_that_a_stop_makes_is_a_truncation(at_part):
    stream = make_stream(steps_per_batch=100, truncate_at_batch_end=True)
    at_part[9] = stream.stop
    (batch,) = list(stream)
    trajectory = host(batch)
    assert trajectory.mask.sum() == 9 * B
    assert trajectory.done[8].all()
    assert next(stream).trajectory.first[0].all()


def test_stop_from_a_signal_handler_ends_the_batch_early(at_part, alarm):
    stream = make_stream(steps_per_batch=100)
    alarm.handler, at_part[9] = stream.stop, alarm.send
    (batch,) = list(stream)
    # The main thread hears of the signal a moment later.
    assert 9 * B <= batch.steps < 100


@each_prefetch
@pytest.mark.parametrize("parts", [(5, 11, 20), range(1, 21)])
def test_interrupt_leaves_the_stream_usable_and_loses_nothing(
    prefetch, parts, at_part, alarm
):
    def interrupt():
        raise KeyboardInterrupt

    options = {"steps_per_batch": 100, "total_steps": 240}
    stream = make_stream(prefetch=prefetch, **options)
    alarm.handler = interrupt
    at_part.update(dict.fromkeys(parts, alarm.send))  # all within the first batch
    batches, num_interrupts = [], 0
    while len(batches) < 3:
        try:
            batches.append(host(next(stream)))
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts >= 3
    assert_same(batches, [host(batch) for batch in make_stream(**options)])


def test_interrupted_batch_can_be_had_as_it_is(at_part, alarm):
    def interrupt():
        raise KeyboardInterrupt

    stream = make_stream(steps_per_batch=100)
    alarm.handler, at_part[9] = interrupt, alarm.send
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    stream.stop()
    (batch,) = list(stream)
    assert 9 * B <= batch.steps < 100
    assert int(batch.trajectory.mask.sum()) == batch.steps


def test_error_of_a_batch_is_raised_and_the_stream_goes_on(monkeypatch):
    stream = make_stream(total_steps=21)
    next(stream)
    monkeypatch.setattr(_jobs.Job, "_call", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(stream)
    monkeypatch.undo()
    want = [host(batch) for batch in make_stream(total_steps=21)]
    assert_same([host(batch) for batch in stream], want[1:])


@each_env
@each_prefetch
@pytest.mark.parametrize("warmup_steps", [0, 16])
def test_restored_stream_goes_on_bit_for_bit(name, prefetch, warmup_steps, tmp_path):
    options = {"prefetch": prefetch, "warmup_steps": warmup_steps}
    want = train(make_stream(name, **options), 6)
    stream = make_stream(name, **options)
    got = train(stream, 3)
    rollout.checkpoint.save(tmp_path, {"stream": stream.state()})
    train(stream, 2)  # what comes after is forgotten
    other = rollout.Stream(
        make_learner(name),
        key=jax.random.key(0),
        params={"odds": jnp.float32(0)},
        steps_per_batch=7,
        **options,
    )
    saved = rollout.checkpoint.restore(tmp_path, {"stream": other.state()})
    for resumed in (other, stream):
        resumed.restore(saved["stream"])
        assert_same(got + train(resumed, 3), want)


def test_state_of_another_kind_is_refused():
    state = make_stream("CartPole-v1").state()
    with pytest.raises(ValueError, match="`state` must be one of a stream of the same"):
        make_stream().restore(state)


def test_state_is_that_behind_the_last_batch_also_while_one_is_made(at_part):
    stream = make_stream(prefetch=1, steps_per_batch=100)
    next(stream)
    state = stream.state()  # the second batch is under way
    assert not stream._at.job.is_complete
    assert int(state["counts"][0]) == 100
    np.testing.assert_array_equal(state["carry"].step, 25)
    want = host(next(stream))
    stream.restore(state)
    chex.assert_trees_all_equal(host(next(stream)), want)


def test_restored_statistics_go_on():
    stream = make_stream()
    next(stream)
    state = stream.state()
    before = stream.stats
    next(stream)
    stream.restore(state)
    assert stream.stats == before
    assert before.collect_steps == 7
