"""What environments on the host refuse, and with which words."""

import functools
import re
import sys
import threading

import gymnasium
import host_envs
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from host_count import HostCount
from host_envs import Count

import rollout
from rollout import envs
from rollout.envs.host.gymnasium_actions import split_action
from rollout.envs.host.local_envs import LocalEnvs

EVERY, ACTION, SEEDS = np.ones(3, bool), np.int32([1, 2, 3]), np.zeros(3, np.uint32)
ONE = np.bool_([True, False, False])
FAILS = functools.partial(Count, fails=True)


def local(*fns, **options):
    env = LocalEnvs(fns or [Count] * 3, **options)
    env.reset(SEEDS[: env.num_envs], EVERY[: env.num_envs])
    return env


def loaded(saved, into):
    """Loads an environment into another one."""
    (state,) = local(saved).save(allow_pickle=True)
    local(into).load([state], np.zeros((1, 2)), allow_pickle=True)


def limited(num_steps):
    return gymnasium.wrappers.TimeLimit(Count(), num_steps)


def vector(mode="DISABLED", *, is_reset=True, **options):
    """A vector environment, adapted and reset."""
    mode = AutoresetMode[mode] if mode else None
    env = SyncVectorEnv([Count] * 3, autoreset_mode=mode or AutoresetMode.DISABLED)
    env.metadata = {"autoreset_mode": mode}
    env = envs.from_gymnasium(env, **options)
    if is_reset:
        env.reset(SEEDS, EVERY)
    return env


@functools.cache
def flying():
    """Workers, of which environment 2 is in flight."""
    env = envs.workers([Count] * 3, 2)
    env.reset(SEEDS, EVERY)
    env.send(ACTION[2:], np.int32([2]))
    return env


@functools.cache
def idle():
    env = envs.workers([Count] * 3, 2)
    env.reset(SEEDS, EVERY)
    return env


@pytest.fixture(autouse=True, scope="module")
def _closed():
    yield
    flying().close()
    idle().close()


def workers(fns=(Count,) * 3, num_workers=1, **options):
    return envs.workers(fns, num_workers, **options)


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


OTHER_SPACES = "of one action space, got Discrete(3, start=1), and Discrete(4) of"
NO_EXAMPLE = "must map keys of `info` to examples"
CLOSED = "`env` must be open, got one after `close`"
FIRST = "`mask` must be True everywhere at the first `reset`, got 1 of 3"
MADE = {"local": local, "workers": workers, "vector": vector}

# By the public name they call: the call, its message, and its kind if no `ValueError`.
TABLE = {
    "from_gymnasium": [
        (lambda: envs.from_gymnasium("CartPole-v1"), "must be given, except for a"),
        (lambda: envs.from_gymnasium(Count), "`num_envs` must be given, except for"),
        (lambda: envs.from_gymnasium(3, 2), "`env` must be an id, a function that"),
        (lambda: envs.from_gymnasium(Count, 0), "`num_envs` must be an int of at"),
        (lambda: vector(num_envs=3), "`num_envs` and options must be left out"),
        (lambda: vector("SAME_STEP"), "DISABLED or NEXT_STEP, got SAME_STEP: pass"),
        (lambda: vector(None), "the autoreset mode DISABLED or NEXT_STEP, got None"),
        (lambda: vector(is_reset=False).reset(SEEDS, ONE), FIRST),
        (lambda: vector(observe_info={"third": 0}), "`observe_info` must have keys of"),
        (
            lambda: vector(record_info={"even": np.zeros(3)}).step(ACTION),
            "`info['even']` must have shape (3, 3), got shape (3,)",
        ),
        (
            lambda: envs.from_gymnasium("NoSuch-v0", 2),
            "environment 0 failed: NameNotFound",
            envs.EnvFault,
        ),
    ],
    "LocalEnvs": [
        (lambda: LocalEnvs([]), "`make_fns` must have at least one function, got none"),
        (
            lambda: local(Count, FAILS),
            "environment 1 failed: ValueError",
            envs.EnvFault,
        ),
        (lambda: local(Count, host_envs.OtherCount), OTHER_SPACES),
        (lambda: local(record_info={"third": "text"}), NO_EXAMPLE),
        (lambda: local().reset(SEEDS, ~EVERY), "`mask` must be [3] bool with at least"),
        (lambda: local().reset(SEEDS, EVERY[:2]), "`mask` must be [3] bool with at"),
        (lambda: local().reset(SEEDS, EVERY * 1.0), "`mask` must be [3] bool with at"),
        (lambda: local().reset(SEEDS[:2], EVERY), "`seeds` must have one entry for"),
        (lambda: local().step(ACTION[:2]), "`action` must have one entry for each of"),
        (lambda: local().load([b""], None), "`saved` must have one entry for each of"),
        (
            lambda: loaded(functools.partial(Count, 5), functools.partial(Count, 3)),
            "settings of these, got Count.length 5 there and 3 here",
        ),
        (
            lambda: loaded(lambda: limited(5), lambda: limited(3)),
            "got TimeLimit._max_episode_steps 5 there and 3 here",
        ),
        (lambda: loaded(host_envs.Described, Count), "`env` must have `load_state`,"),
    ],
    "workers": [
        (lambda: workers([]), "`make_fns` must be functions, one for each environment"),
        (lambda: workers([Count, 3]), "`make_fns` must be functions, one for each"),
        (lambda: workers(Count), "`make_fns` must be functions, one for each environ"),
        (lambda: workers("CartPole-v1"), "`[make_one] * 8`, got 'CartPole-v1'"),
        (lambda: workers(num_workers=0), "`num_workers` must be an int of at least 1"),
        (lambda: workers(num_workers=5), "`num_workers` must be at most 3, got 5"),
        (lambda: workers(start_method="fork"), '`start_method` must be "forkserver"'),
        (lambda: workers(timeout=0), "`timeout` must be a finite number of seconds"),
        (lambda: workers(record_info={"third": "text"}), NO_EXAMPLE),
        (lambda: workers([Count, host_envs.OtherCount], 1), OTHER_SPACES),
        (lambda: workers([Count, host_envs.OtherCount], 2), OTHER_SPACES),
        (
            lambda: workers([Count, functools.partial(Count, threading.Lock())]),
            "`make_fns` must be picklable; `functools.partial` of a function at module "
            "level takes options, and `pip install cloudpickle` allows lambdas. Got "
            "function 1",
        ),
        (
            lambda: workers([Count, Count, FAILS]),
            "environment 2 failed: ValueError: no such game",
            envs.EnvFault,
        ),
        (lambda: workers([host_envs.Undescribed]).save(), "no state", RuntimeError),
        (lambda: idle().step(ACTION[:2]), "`action` must have shape (3,), got shape"),
        (
            lambda: idle().send(ACTION[:1], np.int32([0, 1])),
            "`action` must have shape (2,), got shape (1,)",
        ),
        (
            lambda: flying().send(ACTION[2:], np.int32([2])),
            "of these that are not in flight, [0, 1], got array([2]",
        ),
        (
            lambda: flying().send(ACTION[:2], np.int32([0, 0])),
            "[0, 1], got array([0, 0]",
        ),
        (lambda: flying().send(ACTION[:1], np.int32([3])), "[0, 1], got array([3]"),
        (lambda: flying().send(ACTION[:1], np.bool_([1])), "[0, 1], got array([ True]"),
        (lambda: flying().step(ACTION), "`step` must be called with no environment in"),
        (lambda: flying().save(), "`save` must be called with no environment in"),
        (lambda: flying().receive(2), "`num_ready` must be at most 1, got 2"),
    ],
    "actions": [
        (
            lambda: split_action(gymnasium.spaces.Box(-1, 1, (2,)))(np.zeros((4, 1))),
            "`action` must be [B, ...] with the shape (2,)",
        ),
        (
            lambda: split_action(gymnasium.spaces.Discrete(2))(np.int32(0)),
            "`action` must be [B, ...] with the shape ()",
        ),
    ],
    "close": [
        *((lambda make=x: ended(make).step(ACTION), CLOSED) for x in MADE.values()),
        *(
            (lambda make=x: ended(make).reset(SEEDS, EVERY), CLOSED)
            for x in MADE.values()
        ),
    ],
    "from_envpool": [
        (lambda: envs.from_envpool("CartPole-v1", None), "`num_envs` must be an int"),
        (lambda: pool(batch_size=0), "`batch_size` must be an int of at least 1"),
        (lambda: pool(batch_size=4), "`batch_size` must be at most 3, got 4"),
        (lambda: pool(record_info=["lives"]), "`record_info` must be names of"),
        (lambda: pool(batch_size=2).step(ACTION), "`batch_size` must divide"),
        (lambda: pool(batch_size=2).reset(SEEDS, ONE), "`mask` must be True"),
        (lambda: pool(batch_size=2).receive(3), "`batch_size` of EnvPool, 2, with as"),
        (lambda: pool(batch_size=2).receive(2), "in flight, got 2 and 0"),
    ],
    "probe": [
        (
            lambda: rollout.probe(HostCount(2), num_steps=0),
            "`num_steps` must be an int",
        ),
    ],
}
CASES = [(name, *case) for name, cases in TABLE.items() for case in cases]


@pytest.mark.parametrize("case", CASES, ids=[f"{x[0]}: {x[2]}" for x in CASES])
def test_call_is_refused_with_its_reason(case):
    _, call, message, *kind = case
    with pytest.raises(*kind or [ValueError], match=re.escape(message)):
        call()


@pytest.mark.parametrize("name", ["gymnasium", "envpool"])
def test_command_that_installs_a_package_is_in_the_message(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    make = getattr(envs, f"from_{name}")
    with pytest.raises(ImportError, match=rf'pip install "\.\[{name}\]"'):
        make("CartPole-v1", 2)
