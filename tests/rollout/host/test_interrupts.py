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
def signal_handlers():
    """Installs Python's handler of Ctrl-C, and a time limit for a test that hangs.

    After 120 s the test fails. After 300 s the process ends.
    """
    timer = threading.Timer(120, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(300, exit=True)
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGALRM: press_ctrl_c,
        signal.SIGUSR1: fail_test,
    }
    old_handlers = {x: signal.signal(x, handler) for x, handler in handlers.items()}
    # JAX and hypothesis have callbacks of the garbage collector. Python drops errors of
    # callbacks.
    gc.disable()
    yield
    timer.cancel()
    gc.enable()
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in old_handlers.items():
        signal.signal(number, handler)
    faulthandler.cancel_dump_traceback_later()


def press_ctrl_c(*_):
    os.kill(os.getpid(), signal.SIGINT)


def fail_test(*_):
    faulthandler.dump_traceback()
    pytest.fail("The test hangs; stderr has the stacks of all threads.")


def check_rows(rows):
    """Checks that the rows of each lane are complete and consecutive."""
    rows = jax.device_get(rows)
    lane_index = lane_indices(rows)
    for lane in range(NUM_ENVS):
        mask = rows.mask & (lane_index == lane)
        lane_rows = jax.tree.map(lambda x, m=mask: x[m], rows)
        length = lane_rows.episode_length
        np.testing.assert_array_equal(lane_rows.obs[:, 0], length - 1)
        np.testing.assert_array_equal(lane_rows.next_obs[:, 0], length)
        np.testing.assert_array_equal(lane_rows.extras["count"], length - 1)
        is_first = np.diff(lane_rows.episode_id) != 0
        np.testing.assert_array_equal(
            np.diff(length), np.where(is_first, 1 - length[:-1], 1)
        )
        assert (length >= 1).all()


def check_start(carry, rows):
    """Checks that the first row of each lane follows the carry."""
    rows, episode_id, length = jax.device_get(
        (rows, carry.episode.episode_id, carry.episode.episode_length)
    )
    lane_index = lane_indices(rows)
    for lane in range(NUM_ENVS):
        mask = rows.mask & (lane_index == lane)
        if mask.any():
            index = tuple(np.argwhere(mask)[0])
            assert rows.episode_id[index] == episode_id[lane]
            assert rows.episode_length[index] == length[lane] + 1


def lane_indices(rows):
    """Returns the lane of each row and column, `[T, B]`."""
    if isinstance(rows.info, rollout.host.AsyncInfo):
        return np.asarray(rows.info.env_id)
    return np.broadcast_to(np.arange(rows.mask.shape[1]), rows.mask.shape)


def is_same_episode(carry, other_carry):
    leaves = [jax.tree.leaves(x.episode) for x in (carry, other_carry)]
    return all(np.array_equal(x, y) for x, y in zip(*leaves, strict=True))


def interrupt_calls(call, num_rounds):
    """Presses Ctrl-C at a random time of each of `num_rounds` calls.

    Yields the result of each call, or None if Ctrl-C interrupted the call. The caller
    recovers. More than a quarter of the calls must be interrupted.
    """
    start, rng, num_interrupts = time.perf_counter(), np.random.default_rng(0), 0
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
            num_interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        yield result
    assert num_interrupts > num_rounds / 4


# `recover` slices the rows on the device, which compiles a program per leaf and length.
@pytest.mark.compiles(50)
@pytest.mark.parametrize(
    ("num_workers", "num_ready", "num_rounds"),
    [
        pytest.param(None, None, 100, id="local"),
        pytest.param(2, 2, 100, id="num_ready"),
        slow(2, None, 300, id="workers"),
    ],
)
def test_ctrl_c_loses_no_row(num_workers, num_ready, num_rounds):
    collector = make_collector(num_workers, num_ready)
    carry, num_lost = collector.init(KEY), 0

    def call():
        nonlocal carry
        carry, rows = collector.collect_steps(carry, None, NUM_STEPS)
        return rows

    call()
    old_carry = carry
    for rows in interrupt_calls(call, num_rounds):
        if rows is None:
            carry, rows = collector.recover()
        if rows is not None:
            check_rows(rows)
            check_start(old_carry, rows)
        elif not is_same_episode(old_carry, carry):
            # The call had returned, and Ctrl-C came before the assignment of its rows.
            num_lost += 1
        old_carry = carry
    collector.close()
    assert num_lost < num_rounds / 10


INIT = {"init": lambda x, carry: (x.init(KEY),)}
SLOW_CALLS = ("init", "values", "rows of each lane", "folded steps", "folded episodes")


@pytest.mark.compiles(40)
@pytest.mark.parametrize(
    ("name", "num_ready"),
    [
        ("fewer episodes than lanes", None),
        *(slow(x, None) for x in SLOW_CALLS),
        slow("more episodes than lanes", 2),
    ],
)
def test_collector_continues_after_an_interrupted_call(name, num_ready):
    collector = make_collector(num_ready, num_ready)
    fn = (CALLS | INIT)[name]
    carry, *_ = fn(collector, collector.init(KEY))

    def call():
        nonlocal carry
        carry, *results = fn(collector, carry)
        return carry, *results

    for result in interrupt_calls(call, 50):
        if result is None:
            carry, rows = collector.recover()
            if rows is not None:
                check_rows(rows)
        carry, rows = collector.collect_steps(carry, None, 6)
        assert rows.mask.all()
        check_rows(rows)


def raise_error(acc, row):
    raise ZeroDivisionError


@pytest.mark.slow
def test_recover_continues_after_an_interrupted_recover():
    collector = make_collector()
    carry = collector.init(KEY)

    def call():
        nonlocal carry
        with pytest.raises(ZeroDivisionError):
            collector.fold_steps(carry, None, raise_error, 0, num_steps=5)
        carry, rows = collector.recover()
        return rows

    call()
    for rows in interrupt_calls(call, 100):
        if rows is None:
            carry, rows = collector.recover()
        if rows is not None:
            check_rows(rows)


@pytest.mark.compiles(40)
def test_interrupted_reset_of_lanes_that_another_collector_has_stepped():
    collector = make_collector(2, 2)
    new_collector, env = collector.replace(), collector.env
    receive, reset = env.receive, env.reset

    def interrupt_reset(seeds, mask):
        env.reset = reset
        raise KeyboardInterrupt

    def press_and_receive(num_ready):
        env.receive = receive
        press_ctrl_c()
        return receive(num_ready)

    carry, first = collector.collect_steps(collector.init(KEY), None, NUM_STEPS)
    env.receive = press_and_receive
    with pytest.raises(KeyboardInterrupt):  # with two steps in flight
        collector.collect_steps(carry, None, NUM_STEPS)
    new_carry = new_collector.init(KEY)
    check_rows(new_collector.collect_steps(new_carry, None, NUM_STEPS)[1])
    env.reset = interrupt_reset
    with pytest.raises(KeyboardInterrupt):
        collector.recover()
    new_carry, second = collector.recover()
    assert second.mask.shape == (1, 2)
    check_start(carry, second)
    assert not new_carry.episode.episode_length.any()
    _, third = collector.collect_steps(new_carry, None, 50)
    check_start(new_carry, third)
    check_rows(third)
    assert set(np.ravel(third.info.env_id)) == set(range(NUM_ENVS))
    old_ids = np.concatenate([np.ravel(x.episode_id) for x in (first, second)])
    assert not np.isin(third.episode_id, old_ids).any()
    collector.close()


@pytest.mark.parametrize(
    ("num_workers", "num_ready"),
    [
        pytest.param(None, None, id="local"),
        pytest.param(2, 2, id="num_ready"),
        slow(2, None, id="workers"),
    ],
)
def test_second_ctrl_c_interrupts_a_hanging_step(num_workers, num_ready, tmp_path):
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


def test_custom_signal_handler_runs_between_two_rows():
    calls = []
    old_handler = signal.signal(signal.SIGINT, lambda *_: calls.append("handler"))

    def choose_action():
        calls.append("policy")
        return np.ones(NUM_ENVS, np.int32)

    def act(params, obs, key):
        action = jax.ShapeDtypeStruct((NUM_ENVS,), jnp.int32)
        return jax.experimental.io_callback(choose_action, action)

    env = envs.from_gymnasium(Faultless, NUM_ENVS)
    collector = rollout.HostCollector(env=env, policy=rollout.stateless_policy(act))
    carry = collector.init(KEY)
    env.step, step = lambda action: (press_ctrl_c(), step(action))[1], env.step
    collector.collect_steps(carry, None, 2)
    signal.signal(signal.SIGINT, old_handler)
    assert calls == ["policy", "handler", "policy", "handler"]


def test_ctrl_c_during_restore_raises_after_the_restore():
    collector = make_collector(make_env=Arrays)
    start, _ = collector.collect_steps(collector.init(KEY), None, 3)
    states = collector.save(start)
    collector.collect_steps(start, None, 2)
    load = collector.env.load
    collector.env.load = lambda *args: (press_ctrl_c(), load(*args))[1]
    with pytest.raises(KeyboardInterrupt):
        collector.restore(start, states)
    carry, rows = collector.recover()
    assert rows is None
    assert is_same_episode(start, carry)
    check_start(start, collector.collect_steps(carry, None, 6)[1])


def test_second_ctrl_c_raises_in_nested_blocks():
    def call():
        with ctrl_c.delay_ctrl_c(), ctrl_c.delay_ctrl_c():
            press_ctrl_c()
            presses.append(1)
            press_ctrl_c()
            presses.append(2)

    presses = []
    with pytest.raises(KeyboardInterrupt):
        call()
    assert presses == [1]


def test_signal_handler_set_by_a_handler_remains():
    def replace_handler(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    def call():
        with ctrl_c.delay_ctrl_c() as raise_pending:
            press_ctrl_c()
            raise_pending()

    signal.signal(signal.SIGINT, replace_handler)
    with pytest.raises(KeyboardInterrupt):
        call()
    press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_stream_continues_after_ctrl_c():
    options = {"key": KEY, "params": None, "steps_per_batch": 4 * 5}
    stream = rollout.Stream(make_collector(), **options)
    check_rows(next(stream).trajectory)
    for batch in interrupt_calls(lambda: next(stream), 50):
        check_rows((batch or next(stream)).trajectory)
    stream.close()


HANGING_BATCH = """
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
    next(stream)  # the next batch hangs at its first row
    for name in sys.argv[1:]:
        threading.Timer(0.5, press).start()
        try:
            next(stream)
        except KeyboardInterrupt:
            print(name)
"""


@pytest.mark.parametrize(
    "presses", [slow([], id="exit"), pytest.param(["first", "second"], id="ctrl_c")]
)
def test_process_exits_while_a_batch_hangs(presses, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(HANGING_BATCH)
    run = subprocess.run(
        [sys.executable, str(script), *presses],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.stdout.split(), run.returncode) == (presses, 0), run.stderr
