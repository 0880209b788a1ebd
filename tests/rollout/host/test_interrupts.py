"""Ctrl-C on every line of the host collectors: nothing is lost, and nothing hangs."""

import faulthandler

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_envs import Steady
from interrupts import ROOT, interrupted

import rollout
from rollout import envs

KEY, NUM_ENVS = jax.random.key(6), 4
POLICY = rollout.recurrent_policy(
    lambda params, obs, count, key: (
        jnp.ones(len(obs), jnp.int32),
        count + 1,
        {"count": count},
    ),
    lambda num_envs: jnp.zeros(num_envs, int),
)


def in_process():
    env = envs.from_gymnasium(Steady, NUM_ENVS)
    return rollout.HostCollector(env=env, policy=POLICY)


def in_workers():
    env = envs.workers([Steady] * NUM_ENVS, num_workers=2)
    return rollout.HostCollector(env=env, policy=POLICY)


def asynchronous():
    env = envs.from_gymnasium(Steady, NUM_ENVS)
    return rollout.AsyncCollector(env=env, policy=POLICY, num_ready=2)


def asynchronous_workers():
    env = envs.workers([Steady] * NUM_ENVS, num_workers=2)
    return rollout.AsyncCollector(env=env, policy=POLICY, num_ready=2)


@pytest.fixture(autouse=True)
def watchdog():
    """Ends the process with all its stacks where something hangs."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


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


def add(total, row):
    return total + row.mask.sum()


def fold_steps(collector, carry):
    return collector.fold_steps(carry, None, add, jnp.int32(0), num_steps=9)


def fold_episodes(collector, carry):
    options = {"num_episodes": 6, "max_steps": 9}
    return collector.fold_episodes(carry, None, add, jnp.int32(0), **options)


CALLS = {
    "collect_steps": lambda x, carry: x.collect_steps(carry, None, 9),
    "collect_episodes": lambda x, carry: x.collect_episodes(
        carry, None, 6, max_steps=4
    ),
    "step": lambda x, carry: x.step(carry, None),
    "fold_steps": fold_steps,
    "collect_episodes_per_env": lambda x, carry: x.collect_episodes_per_env(
        carry, None, 2, max_steps=9
    ),
    "fold_episodes": fold_episodes,
    "collect_padded_episodes": lambda x, carry: x.collect_padded_episodes(
        carry, None, 6, max_length=9
    ),
    "init": lambda x, carry: (x.init(KEY),),
}
QUICK = [(in_process, "collect_steps")]
# All calls where nothing is in another process; with workers those that differ.
SLOW = [
    (asynchronous, "collect_episodes"),
    *((in_process, name) for name in CALLS if name != "collect_steps"),
    *((in_workers, name) for name in ("collect_steps", "init")),
    *((asynchronous_workers, name) for name in ("collect_steps", "collect_episodes")),
]
CASES = [
    *(pytest.param(*x, id=f"{x[1]}-{x[0].__name__}") for x in QUICK),
    *(
        pytest.param(*x, id=f"{x[1]}-{x[0].__name__}", marks=pytest.mark.slow)
        for x in SLOW
    ),
]


@pytest.mark.parametrize(("make", "name"), CASES)
def test_interrupt_on_any_line_loses_no_row(make, name):
    collector = make()
    carry, num_lines = collector.init(KEY), 0
    carry, *_ = CALLS[name](collector, carry)  # compiles

    def call():
        nonlocal carry
        carry, *_ = CALLS[name](collector, carry)

    for _ in interrupted(call):
        num_lines += 1
        carry = go_on(collector, carry if name in KEEPS_ROWS else None)
    assert num_lines > (30 if name == "init" else 100)
    collector.close()


# `recover` returns all rows of these calls.
KEEPS_ROWS = ("step", "collect_steps")


def go_on(collector, before=None):
    """Collects on after an interrupt, and checks all rows.

    With the carry `before` the call no row of a lane may be missing since then.
    """
    carry, first = collector.recover()
    carry, second = collector.collect_steps(carry, None, 6)
    assert second.mask.all()
    check_rows(second)
    if first is not None:
        check_rows(first)
        second = jax.tree.map(lambda *x: np.concatenate(x), first, second)
    if before is not None:
        check_start(before, second)
    return carry


def check_start(carry, rows):
    """The first row of each lane follows the carry, or begins another episode.

    It begins one where the environment was interrupted within a step: signals wait for
    its end, but an exception raised here does not. It begins the one after that where
    the request for its first reset costs the worker.
    """
    episode = carry.episode
    lanes = lanes_of(rows)
    for lane in range(NUM_ENVS):
        here = np.asarray(rows.mask) & (lanes == lane)
        if here.any():
            at = tuple(np.argwhere(here)[0])
            first = int(rows.episode_id[at]), int(rows.episode_length[at])
            number, length = episode.episode_id[lane], episode.episode_length[lane]
            restarted = [(number + NUM_ENVS * skipped, 1) for skipped in (1, 2)]
            assert first in [(number, length + 1), *restarted]


def lanes_of(rows):
    if isinstance(rows.info, rollout.host.Served):
        return np.asarray(rows.info.env_id)
    return np.broadcast_to(np.arange(rows.mask.shape[1]), rows.mask.shape)


@pytest.mark.slow
@pytest.mark.parametrize("make", [in_workers])
def test_interrupt_of_an_evaluation(make):
    collector = make()

    def call():
        rollout.evaluate(collector, KEY, None, 3, max_steps=9)

    for _ in interrupted(call):
        _, rows = collector.collect_steps(collector.init(KEY), None, 6)
        assert rows.mask.all()
        check_rows(rows)
    collector.close()


@pytest.mark.slow
@pytest.mark.parametrize("make", [in_process, asynchronous_workers])
def test_interrupt_while_it_recovers(make):
    collector = make()
    collector.init(KEY)
    carry = go_on(collector)

    def call():
        nonlocal carry
        with pytest.raises(ZeroDivisionError):
            collector.fold_steps(carry, None, divide, 0, num_steps=5)
        carry, rows = collector.recover()
        assert rows.mask.any()
        check_rows(rows)

    for _ in interrupted(call):
        carry = go_on(collector)
    collector.close()


def divide(acc, row):
    raise ZeroDivisionError


def test_stream_goes_on_after_an_interrupt_on_any_line():
    options = {"key": KEY, "params": None, "steps_per_batch": 20, "prefetch": 0}
    stream, num_lines = rollout.Stream(in_process(), **options), 0
    check_rows(next(stream).trajectory)
    for _ in interrupted(lambda: next(stream), (str(ROOT / "rollout/stream"),)):
        num_lines += 1
        check_rows(next(stream).trajectory)
    stream.close()
    assert num_lines > 20
