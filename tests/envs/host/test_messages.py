"""What environments on the host refuse, and with which words."""

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

from rollout import envs
from rollout.envs.host.local_envs import LocalEnvs

EVERY, ACTION, SEEDS = np.ones(3, bool), np.int32([1, 2, 3]), np.zeros(3, np.uint32)
ONE = np.bool_([True, False, False])
FAILS = functools.partial(Count, fails=True)


def local(*fns, **options):
    env = LocalEnvs(fns or [Count] * 3, **options)
    env.reset(SEEDS[: env.num_envs], EVERY[: env.num_envs])
    return env


def vector(mode="DISABLED", **options):
    """A vector environment, adapted and reset."""
    mode = AutoresetMode[mode] if mode else None
    env = SyncVectorEnv([Count] * 3, autoreset_mode=mode or AutoresetMode.DISABLED)
    env.metadata = {"autoreset_mode": mode}
    env = envs.from_gymnasium(env, **options)
    env.reset(SEEDS, EVERY)
    return env


@functools.cache
def idle():
    env = envs.make_worker_envs([Count] * 3, 2)
    env.reset(SEEDS, EVERY)
    return env


@pytest.fixture(autouse=True, scope="module")
def _closed():
    yield
    idle().close()


def workers(fns=(Count,) * 3, num_workers=1, **options):
    return envs.make_worker_envs(fns, num_workers, **options)


def ended(make):
    env = make()
    env.close()
    env.close()
    return env


def pool(**options):
    """An EnvPool that was reset, and has 3 environments."""
    pytest.importorskip("envpool")
    env = envs.from_envpool("CartPole-v1", 3, **options)
    env.reset(SEEDS, EVERY)
    return env


FUNCTIONS = "`make_fns` must be functions, one for each environment, for example"
OTHER_SPACES = "with the same action space, got Discrete(3, start=1) and, for"
CLOSED = "`env` must be open, got a closed environment"
CALLS = [
    # `from_gymnasium`
    (lambda: envs.from_gymnasium("CartPole-v1"), "must be given, except for a vec"),
    (
        lambda: envs.from_gymnasium(lambda: vector(), num_workers=2),
        "`num_envs` must be given, except for a",
    ),
    (lambda: envs.from_gymnasium(3, 2), "`env` must be an id, a function that"),
    (
        lambda: vector(num_envs=3),
        "`num_envs`, `num_workers` and options must be omitted",
    ),
    (lambda: vector("SAME_STEP"), "DISABLED or NEXT_STEP, got SAME_STEP. Pass"),
    (lambda: vector(None), "the autoreset mode DISABLED or NEXT_STEP, got None"),
    (lambda: vector(observe_info={"third": 0}), "`observe_info` must have keys"),
    (
        lambda: vector(record_info={"even": np.zeros(3)}).step(ACTION),
        "`info['even']` must have shape (3, 3), got shape (3,)",
    ),
    # `LocalEnvs`
    (lambda: local(Count, host_envs.OtherCount), OTHER_SPACES),
    (lambda: local(record_info={"third": "text"}), "must map keys of `info` to exam"),
    (
        lambda: local().load(local(host_envs.Described).save() * 3, None),
        "`env` must have `load_state`, like the saved environment, got Count",
    ),
    (lambda: local(OldGym), "`reset(seed=, options=)` calls the old `seed`"),
    # `make_worker_envs`
    (lambda: workers(Count), FUNCTIONS),
    (lambda: workers(num_workers=5), "`num_workers` must be at most 3, got 5"),
    (lambda: workers(timeout=0), "`timeout` must be a finite number of seconds"),
    (lambda: workers([Count, host_envs.OtherCount], 2), OTHER_SPACES),
    (
        lambda: workers([Count, functools.partial(Count, threading.Lock())]),
        "`make_fns` must be picklable, got [<class",
    ),
    (lambda: idle().step(ACTION[:2]), "`action` must have shape (3,), got shape"),
    (lambda: idle().receive(2), "`num_ready` must be at most 0, got 2"),
    # After `close`
    *((lambda make=x: ended(make).step(ACTION), CLOSED) for x in (workers, vector)),
    *((lambda make=x: ended(make).reset(SEEDS, EVERY), CLOSED) for x in (local,)),
    # `from_envpool`
    (lambda: pool(batch_size=4), "`batch_size` must be at most 3, got 4"),
    (lambda: pool(batch_size=2).step(ACTION), "`batch_size` must be `num_envs`"),
    (lambda: pool(batch_size=2).reset(SEEDS, ONE), "`mask` must be True"),
]
FAULTS = [
    (lambda: envs.from_gymnasium("NoSuch-v0", 2), "environment 0 failed: NameNotFound"),
    (lambda: workers([Count, Count, FAILS]), "2 failed: ValueError: no such game"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_call_is_refused_with_its_reason(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(("call", "message"), FAULTS)
def test_environment_that_cannot_be_made_is_a_fault(call, message):
    with pytest.raises(envs.EnvFault, match=re.escape(message)):
        call()


def test_state_that_cannot_be_said_is_an_error():
    with pytest.raises(RuntimeError, match="no state"):
        workers([host_envs.Undescribed]).save()


@pytest.mark.parametrize("name", ["gymnasium", "envpool"])
def test_command_that_installs_a_package_is_in_the_message(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    make = getattr(envs, f"from_{name}")
    with pytest.raises(ImportError, match=rf'pip install "\.\[{name}\]"'):
        make("CartPole-v1", 2)
