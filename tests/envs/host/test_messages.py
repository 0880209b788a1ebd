"""Bad input to host environments: each error message, and a call that raises it."""

import functools
import re
import sys
import threading

import host_envs
import numpy as np
import pytest
from files_of_others import OldGym
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from host_envs import Count

import rollout
from rollout import envs
from rollout.envs.host.local_envs import LocalEnvs

ALL, ACTION, SEEDS = np.ones(3, bool), np.int32([1, 2, 3]), np.zeros(3, np.uint32)
FIRST_MASK = np.bool_([True, False, False])
FAILING_COUNT = functools.partial(Count, fails=True)


def make_local(*fns, **options):
    env = LocalEnvs(fns or [Count] * 3, **options)
    env.reset(SEEDS[: env.num_envs], ALL[: env.num_envs])
    return env


def make_vector(mode="DISABLED", **options):
    """Returns an adapted vector environment after a reset."""
    mode = AutoresetMode[mode] if mode else None
    env = SyncVectorEnv([Count] * 3, autoreset_mode=mode or AutoresetMode.DISABLED)
    env.metadata = {"autoreset_mode": mode}
    env = envs.from_gymnasium(env, **options)
    env.reset(SEEDS, ALL)
    return env


@functools.cache
def shared_workers():
    env = envs.make_worker_envs([Count] * 3, 2)
    env.reset(SEEDS, ALL)
    return env


@pytest.fixture(autouse=True, scope="module")
def close_workers():
    yield
    shared_workers().close()


def make_workers(fns=(Count,) * 3, num_workers=1, **options):
    return envs.make_worker_envs(fns, num_workers, **options)


def make_closed(make):
    env = make()
    env.close()
    env.close()
    return env


def make_pool(**options):
    """Returns an EnvPool of 3 environments after a reset."""
    pytest.importorskip("envpool")
    env = envs.from_envpool("CartPole-v1", 3, **options)
    env.reset(SEEDS, ALL)
    return env


OTHER_SPACES = "same action space, got Discrete(3, start=1)"
CLOSED = "`env` must be open"
WRONG_CALLS = [
    # `from_gymnasium`
    (lambda: rollout.check_env(Count()), "`rollout.envs.from_gymnasium(Count, num_"),
    (lambda: envs.from_gymnasium("CartPole-v1"), "`num_envs` must be given"),
    (
        lambda: envs.from_gymnasium(lambda: make_vector(), num_workers=2),
        "`num_envs` must be given",
    ),
    (lambda: envs.from_gymnasium(3, 2), "`env` must be an id"),
    (
        lambda: make_vector(num_envs=3),
        "`num_envs`, `num_workers` and options must",
    ),
    (lambda: make_vector(None), '`env.metadata["autoreset_mode"]` must be'),
    (lambda: make_vector(observe_info={"third": 0}), "`observe_info` must have keys"),
    (
        lambda: make_vector(record_info={"even": np.zeros(3)}).step(ACTION),
        "`info['even']` must have shape (3, 3), got shape (3,)",
    ),
    # `LocalEnvs`
    (lambda: make_local(Count, host_envs.OtherCount), OTHER_SPACES),
    (lambda: make_local(record_info={"third": "text"}), "`record_info` must map keys"),
    (
        lambda: make_local().load(make_local(host_envs.Described).save() * 3, None),
        "`env` must have `load_state`",
    ),
    (lambda: make_local(OldGym), "old `seed`"),
    # `make_worker_envs`
    (lambda: make_workers(Count), "`make_fns` must be functions"),
    (lambda: make_workers(num_workers=5), "`num_workers` must be at most 3, got 5"),
    (lambda: make_workers(timeout=0), "`timeout` must be above 0, got 0"),
    (lambda: make_workers([Count, host_envs.OtherCount], 2), OTHER_SPACES),
    (
        lambda: make_workers([Count, functools.partial(Count, threading.Lock())]),
        "`make_fns` must be picklable, got [<class",
    ),
    (
        lambda: shared_workers().step(ACTION[:2]),
        "`action` must have shape (3,), got shape",
    ),
    (lambda: shared_workers().receive(2), "`num_ready` must be at most 0, got 2"),
    # After `close`
    *(
        (lambda make=x: make_closed(make).step(ACTION), CLOSED)
        for x in (make_workers, make_vector)
    ),
    *(
        (lambda make=x: make_closed(make).reset(SEEDS, ALL), CLOSED)
        for x in (make_local,)
    ),
    # `from_envpool`
    (lambda: make_pool(batch_size=4), "`batch_size` must be at most 3, got 4"),
    (lambda: make_pool(batch_size=2).step(ACTION), "`batch_size` must be `num_envs`"),
    (lambda: make_pool(batch_size=2).reset(SEEDS, FIRST_MASK), "`mask` must be True"),
]
FAULTS = [
    (lambda: envs.from_gymnasium("NoSuch-v0", 2), "environment 0 failed: NameNotFound"),
    (
        lambda: make_workers([Count, Count, FAILING_COUNT]),
        "2 failed: ValueError: no such game",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG_CALLS)
def test_error_names_the_argument(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(("call", "message"), FAULTS)
def test_failed_creation_is_a_fault(call, message):
    with pytest.raises(envs.EnvFault, match=re.escape(message)):
        call()


def test_failing_save_state_raises():
    with pytest.raises(RuntimeError, match="no state"):
        make_workers([host_envs.Undescribed]).save()


@pytest.mark.parametrize("name", ["gymnasium", "envpool"])
def test_missing_package_names_install_command(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    make = getattr(envs, f"from_{name}")
    with pytest.raises(ImportError, match=rf'pip install "\.\[{name}\]"'):
        make("CartPole-v1", 2)
