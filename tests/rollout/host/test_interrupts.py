"""Ctrl-C at random times: no row is lost, and nothing hangs."""

import faulthandler
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_count import CALLS
from host_envs import Arrays, Faultless, Hangs

import rollout
from rollout import envs
from rollout.host import ctrl_c

KEY, NUM_ENVS, NUM_STEPS = jax.random.key(6), 4, 9
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
POLICY = rollout.recurrent_policy(
    lambda params, obs, count, key: (
        jnp.ones(len(obs), jnp.int32),
        count + 1,
        {"count": count},
    ),
    lambda num_envs: jnp.zeros(num_envs, int),
    value_fn=lambda params, obs, count: count.astype(jnp.float32),
)


def make_collector(num_workers=None, num_ready=None, make_env=Faultless):
    env = envs.from_gymnasium(make_env, NUM_ENVS, num_workers=num_workers)
    return rollout.HostCollector(env=env, policy=POLICY, num_ready=num_ready)


@pytest.fixture(autouse=True)
def signals():
    """Makes Ctrl-C real. A test that hangs fails after 120 s, or ends the process."""
    guard = threading.Timer(120, os.kill, (os.getpid(), signal.SIGUSR1))
    guard.daemon = True
    guard.start()
    faulthandler.dump_traceback_later(300, exit=True)
    ours = (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGALRM, press),
        (signal.SIGUSR1, fail),
    )
    before = [(number, signal.signal(number, handler)) for number, handler in ours]
    gc.disable()  # Python drops what is raised in a callback, as jax's and hypothesis'
    yield
    guard.cancel()
    gc.enable()
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before:
        signal.signal(number, handler)
    faulthandler.cancel_dump_traceback_later()


def press(*_):
    os.kill(os.getpid(), signal.SIGINT)


def fail(*_):
    faulthandler.dump_traceback()
    pytest.fail("The test hangs; stderr has the stacks of all threads.")


def check_rows(rows):
    """Every row is whole, and goes on where the lane's last one stopped."""
    rows = jax.device_get(rows)
    lanes = lanes_of(rows)
    for lane in range(NUM_ENVS):
        here = rows.mask & (lanes == lane)
        row = jax.tree.map(lambda x, here=here: x[here], rows)
        np.testing.assert_array_equal(row.obs[:, 0], row.episode_length - 1)
        np.testing.assert_array_equal(row.next_obs[:, 0], row.episode_length)
        np.testing.assert_array_equal(row.extras["count"], row.episode_length - 1)
        new = np.diff(row.episode_id) != 0
        np.testing.assert_array_equal(
            np.diff(row.episode_length), np.where(new, 1 - row.episode_length[:-1], 1)
        )
        assert (row.episode_length >= 1).all()


def check_start(carry, rows):
    """The first row of each lane follows the carry."""
    rows, episode_id, length = jax.device_get(
        (rows, carry.episode.episode_id, carry.episode.episode_length)
    )
    lanes = lanes_of(rows)
    for lane in range(NUM_ENVS):
        here = rows.mask & (lanes == lane)
        if here.any():
            at = tuple(np.argwhere(here)[0])
            assert rows.episode_id[at] == episode_id[lane]
            assert rows.episode_length[at] == length[lane] + 1


def lanes_of(rows):
    if isinstance(rows.info, rollout.host.AsyncInfo):
        return np.asarray(rows.info.env_id)
    return np.broadcast_to(np.arange(rows.mask.shape[1]), rows.mask.shape)


def same_place(first, second):
    episodes = zip(*map(jax.tree.leaves, (first.episode, second.episode)), strict=True)
    return all(np.array_equal(x, y) for x, y in episodes)


def interrupted(call, num_rounds):
    """Presses Ctrl-C at random times of `num_rounds` calls; yields each result or None.

    The caller does any repair. At least a quarter of the presses must come in a call.
    """
    start, rng, num = time.perf_counter(), np.random.default_rng(0), 0
    result = call()
    duration = time.perf_counter() - start
    yield result
    for _ in range(num_rounds):
        result, start = None, time.perf_counter()
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, duration))
            result = call()
            signal.setitimer(signal.ITIMER_REAL, 0)
            duration = min(duration, time.perf_counter() - start)
        except KeyboardInterrupt:
            num += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        yield result
    assert num > num_rounds / 4


# `recover` cuts its rows on the device: a program per leaf and length, at random.
@pytest.mark.compiles(50)
@pytest.mark.parametrize(
    ("num_workers", "num_ready", "num_rounds"),
    [
        (None, None, 100),
        (2, 2, 100),
        slow(2, None, 300),
    ],
)
def test_no_row_is_lost(num_workers, num_ready, num_rounds):
    collector = make_collector(num_workers, num_ready)
    carry, num_lost = collector.init(KEY), 0

    def call():
        nonlocal carry
        carry, rows = collector.collect_steps(carry, None, NUM_STEPS)
        return rows

    call()
    before = carry
    for rows in interrupted(call, num_rounds):
        if rows is None:
            carry, rows = collector.recover()
        if rows is not None:
            check_rows(rows)
            check_start(before, rows)
        elif not same_place(before, carry):  # its rows were on their way to us
            num_lost += 1
        before = carry
    collector.close()
    assert num_lost < num_rounds / 10


INIT = {"init": lambda x, carry: (x.init(KEY),)}
OTHERS = ("init", "values", "rows of each lane", "folded steps", "folded episodes")


@pytest.mark.compiles(40)
@pytest.mark.parametrize(
    ("name", "num_ready"),
    [
        ("fewer episodes than lanes", None),
        *(slow(x, None) for x in OTHERS),
        slow("more episodes than lanes", 2),
    ],
)
def test_collector_goes_on_after_any_call(name, num_ready):
    collector = make_collector(num_ready, num_ready)
    fn = (CALLS | INIT)[name]
    carry, *_ = fn(collector, collector.init(KEY))

    def call():
        nonlocal carry
        carry, *rest = fn(collector, carry)
        return carry, *rest

    for result in interrupted(call, 50):
        if result is None:
            carry, rows = collector.recover()
            if rows is not None:
                check_rows(rows)
        carry, rows = collector.collect_steps(carry, None, 6)
        assert rows.mask.all()
        check_rows(rows)


def divide(acc, row):
    raise ZeroDivisionError


@pytest.mark.slow
def test_recovery_may_be_interrupted():
    collector = make_collector()
    carry = collector.init(KEY)

    def call():
        nonlocal carry
        with pytest.raises(ZeroDivisionError):
            collector.fold_steps(carry, None, divide, 0, num_steps=5)
        carry, rows = collector.recover()
        return rows

    call()
    for rows in interrupted(call, 100):
        if rows is None:
            carry, rows = collector.recover()
        if rows is not None:
            check_rows(rows)


@pytest.mark.parametrize(
    ("num_workers", "num_ready"), [(None, None), (2, None), (2, 2)]
)
def test_second_press_ends_what_hangs(num_workers, num_ready, tmp_path):
    path = tmp_path / "hangs"
    path.touch()
    collector = make_collector(num_workers, num_ready, functools.partial(Hangs, path))
    start, _ = collector.collect_steps(collector.init(KEY), None, 3)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 0.2)
    with pytest.raises(KeyboardInterrupt):
        collector.collect_steps(start, None, 9)
    signal.setitimer(signal.ITIMER_REAL, 0)
    path.unlink()
    carry, rows = collector.recover()
    check_start(start, rows)
    check_rows(rows)
    assert not carry.episode.episode_length.any()
    carry, rows = collector.collect_steps(carry, None, NUM_STEPS)
    assert rows.mask.all()
    check_rows(rows)
    collector.close()


def test_handler_of_the_caller_is_called_between_two_rows():
    calls = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append("pressed"))

    def choose():
        calls.append("row")
        return np.ones(NUM_ENVS, np.int32)

    def act(params, obs, key):
        action = jax.ShapeDtypeStruct((NUM_ENVS,), jnp.int32)
        return jax.experimental.io_callback(choose, action)

    env = envs.from_gymnasium(Faultless, NUM_ENVS)
    collector = rollout.HostCollector(env=env, policy=rollout.stateless_policy(act))
    carry = collector.init(KEY)
    env.step, step = lambda action: (press(), step(action))[1], env.step
    collector.collect_steps(carry, None, 2)
    signal.signal(signal.SIGINT, before)
    assert calls == ["row", "pressed", "row", "pressed"]


def test_press_while_environments_load_leaves_after_the_collector_has_followed():
    collector = make_collector(make_env=Arrays)
    start, _ = collector.collect_steps(collector.init(KEY), None, 3)
    saved = collector.save(start)
    collector.collect_steps(start, None, 2)
    load = collector.env.load
    collector.env.load = lambda *args: (press(), load(*args))[1]
    with pytest.raises(KeyboardInterrupt):
        collector.restore(start, saved)
    carry, rows = collector.recover()
    assert rows is None
    assert same_place(start, carry)
    check_start(start, collector.collect_steps(carry, None, 6)[1])


def test_handler_that_another_one_sets_stays():
    def once(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    def call():
        with ctrl_c.held_back() as check:
            press()
            check()

    signal.signal(signal.SIGINT, once)
    with pytest.raises(KeyboardInterrupt):
        call()
    press()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_stream_goes_on():
    options = {"key": KEY, "params": None, "steps_per_batch": 4 * 5}
    stream = rollout.Stream(make_collector(), **options)
    check_rows(next(stream).trajectory)
    for batch in interrupted(lambda: next(stream), 50):
        check_rows((batch or next(stream)).trajectory)
    stream.close()


IN_FLIGHT = """
import functools, os, signal, sys, threading
from pathlib import Path
import jax, numpy as np
from host_envs import Hangs
import rollout
from rollout import envs

if __name__ == "__main__":
    path = Path("hangs")
    path.touch()
    env = envs.make_worker_envs([functools.partial(Hangs, path)] * 2, 2, timeout=None)
    policy = rollout.stateless_policy(lambda params, obs, key: np.ones(2, np.int32))
    collector = rollout.HostCollector(env=env, policy=policy)
    options = {"key": jax.random.key(0), "params": None, "prefetch": 1}
    stream = rollout.Stream(collector, steps_per_batch=10, **options)
    press = lambda: os.kill(os.getpid(), signal.SIGINT)
    next(stream)  # the batch after it hangs at its first row
    for name in sys.argv[1:]:
        threading.Timer(0.5, press).start()
        try:
            next(stream)
        except KeyboardInterrupt:
            print(name)
"""


@pytest.mark.parametrize("presses", [slow([]), ["first", "second"]])
def test_exit_gives_up_a_batch_in_flight_that_hangs(presses, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(IN_FLIGHT)
    run = subprocess.run(
        [sys.executable, str(script), *presses],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.stdout.split(), run.returncode) == (presses, 0), run.stderr
