"""Environments in this process: results, faults and saved states.

Tests with `all_adapters` also run worker processes.
"""

import functools
import pickle

import gymnasium
import host_envs
import numpy as np
import pytest
from host_envs import FAULT_STEP, Count, Described, seed_of

from rollout import envs
from rollout.envs.host.local_envs import LocalEnvs
from rollout.envs.host.types import EnvFault

ALL = np.ones(3, bool)
ACTION = np.int32([1, 2, 3])
MASK, SEED = np.ones(1, bool), np.uint32([0])
ADAPTERS = {
    "local": LocalEnvs,
    "workers": lambda fns, **x: envs.make_worker_envs(fns, 2, **x),
}
all_adapters = pytest.mark.parametrize("adapter", ADAPTERS)


@pytest.fixture
def make_env():
    """Returns a function that makes environments and closes them after the test."""
    envs_to_close = []

    def make_env(adapter="local", make_fn=Count, **options):
        envs_to_close.append(ADAPTERS[adapter]([make_fn] * 3, **options))
        return envs_to_close[-1]

    yield make_env
    for env in envs_to_close:
        env.close()


def start(env, faults=("fine",) * 3, mask=ALL):
    seeds = np.uint32([seed_of(fault) for fault in faults])
    return env.reset(seeds, mask)


def make_single(make_fn, **options):
    """Returns a single environment after a reset."""
    env = LocalEnvs([make_fn], **options)
    env.reset(SEED, MASK)
    return env


def test_fault_can_be_pickled():
    fault = EnvFault({1: ValueError("no")}, "; details")
    got = pickle.loads(pickle.dumps(fault))
    assert str(got) == str(fault)
    assert str(got.causes[1]) == "no"


# The type and message of each fault. An `OddError` cannot be pickled by a worker.
CAUSES = {
    "raise": (ZeroDivisionError, "at step 3"),
    "shape": (ValueError, r"obs must have shape \(2,\), got \(1,\)"),
    "dtype": (TypeError, "obs must have dtype float32, got complex128"),
    "reward": (TypeError, "reward must have dtype float32, got <U3"),
    "flag": (TypeError, "terminated must have dtype bool, got float64"),
    "values": (ValueError, r"not enough values to unpack \(expected 5, got 4\)"),
    "odd": (RuntimeError, "odd error"),
}


@all_adapters
@pytest.mark.parametrize("fault", CAUSES)
def test_fault_stays_until_rebuild_and_reset(make_env, adapter, fault):
    env = make_env(adapter)
    start(env, ("fine", fault, "fine"))
    pids = getattr(env, "pids", None)
    mask = np.bool_([False, True, False])
    for number in range(1, FAULT_STEP + 2):  # one step after the fault
        step = env.step(ACTION)
        np.testing.assert_array_equal(step.faulty, mask & (number >= FAULT_STEP))
        np.testing.assert_array_equal(step.obs[~mask, 0], [number] * 2)
        assert list(step.causes) == [1] * (number >= FAULT_STEP)
    error_type, message = CAUSES[fault]
    if adapter == "workers":
        assert step.causes[1].__notes__[0].startswith("Traceback")
    elif fault == "odd":
        error_type = host_envs.OddError
    with pytest.raises(error_type, match=message):
        raise step.causes[1]
    with pytest.raises(EnvFault, match="environment 1 failed"):
        start(env, mask=mask)
    env.rebuild(mask)
    obs = start(env, mask=mask)
    np.testing.assert_array_equal(obs[:, 0], [FAULT_STEP + 1, 0, FAULT_STEP + 1])
    step = env.step(ACTION)
    assert not step.faulty.any()
    np.testing.assert_array_equal(step.obs[:, 0], [FAULT_STEP + 2, 1, FAULT_STEP + 2])
    assert getattr(env, "pids", None) == pids


@all_adapters
def test_fault_at_reset_affects_one_environment(make_env, adapter):
    env = make_env(adapter)
    start(env)
    env.step(ACTION)
    with pytest.raises(EnvFault, match="1 failed: RuntimeError: no start") as info:
        start(env, ("fine", "reset", "fine"))
    assert list(info.value.causes) == [1]
    step = env.step(ACTION)
    np.testing.assert_array_equal(step.obs[[0, 2], 0], [1, 1])
    np.testing.assert_array_equal(step.faulty, [False, True, False])


def test_system_exit_is_raised(make_env):
    env = make_env()
    start(env, ("exit", "fine", "fine"))
    for _ in range(FAULT_STEP - 1):
        env.step(ACTION)
    with pytest.raises(SystemExit):
        env.step(ACTION)


def test_missing_observed_info_is_a_fault(make_env):
    env = make_env(observe_info={"seed": np.int32(0)})
    start(env)
    step = env.step(ACTION)
    assert step.faulty.all()
    with pytest.raises(KeyError, match=r"obs\['info'\] without 'seed'"):
        raise step.causes[0]


def test_missing_recorded_info_is_zero():
    env = make_single(Count, record_info={"third": np.float32(0)})
    rows = [env.step(ACTION[:1]).info["third"].copy() for _ in range(4)]
    np.testing.assert_array_equal(rows, np.float32([[0], [0], [3], [0]]))


@all_adapters
def test_loaded_environments_continue_from_saved_state(make_env, adapter):
    env, target = make_env(adapter, Described), make_env(adapter, Described)
    start(env), start(target, ("fine", "raise", "fine"))
    obs = np.copy(env.step(ACTION).obs)
    for _ in range(FAULT_STEP):
        step = target.step(ACTION)
    assert step.faulty.any()
    assert target.save() is None
    states = env.save()
    assert [type(state) for state in states] == [bytes] * 3
    target.load(states, obs)
    for _ in range(2):
        step, target_step = env.step(ACTION), target.step(ACTION)
        np.testing.assert_array_equal(step.obs, target_step.obs)
        np.testing.assert_array_equal(step.truncated, target_step.truncated)
        assert not target_step.faulty.any()


@all_adapters
def test_save_requires_save_state(make_env, adapter):
    assert make_env(adapter).save() is None


def test_failed_rebuild_is_a_fault():
    created = []

    def make_count():
        created.append(Count(fails=len(created) == 1))
        return created[-1]

    env = LocalEnvs([make_count])
    with pytest.raises(EnvFault, match="environment 0 failed: ValueError: no such"):
        env.rebuild(MASK)
    assert created[0].closed
    assert isinstance(env.causes[0], ValueError)


def test_close_is_idempotent():
    created = [Count(), Count()]
    env = LocalEnvs([lambda: created[0], lambda: created[1]])
    env.close()
    env.close()
    assert created[0].closed
    assert created[1].closed


class LargeIntegers(Count):
    """Counts from a first number with 64 bits, in observations and infos."""

    observation_space = gymnasium.spaces.Box(-(2**62), 2**62, (2,), np.int64)

    def __init__(self, first):
        super().__init__()
        self.first = first

    def _obs(self):
        return np.full(2, self.first + self.count, np.int64)

    def _info(self):
        return {"count": np.int64(self.first + self.count)}


class LargeIntegersInFloats(LargeIntegers):
    """Returns 64-bit integers in a space of floats."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)


@pytest.mark.parametrize(
    ("env_class", "first", "message"),
    [
        (LargeIntegers, 2**31 - 2, "32 bits, got 2147483648"),
        (LargeIntegers, -(2**31) - 1, "32 bits, got -2147483649"),
        (LargeIntegersInFloats, 2**24 - 1, "got 16777217"),
        (LargeIntegersInFloats, -(2**24) - 1, "16777217"),
    ],
)
def test_integers_beyond_32_bits_are_faults(env_class, first, message):
    env = LocalEnvs([functools.partial(env_class, first)], record_info={"count": 0})
    if first < 0:
        with pytest.raises(EnvFault, match=message):
            env.reset(SEED, MASK)
        return
    assert env.reset(SEED, MASK).tolist() == [[first] * 2]
    assert not env.step(np.int32([1])).faulty.any()
    assert message in str(env.step(np.int32([1])).causes[0])


def limited(make, limit):
    return lambda: gymnasium.wrappers.TimeLimit(make(), limit)


@pytest.mark.parametrize(
    "make",
    [
        limited(host_envs.Resumable, 5),
        limited(limited(host_envs.Resumable, 9), 5),
        lambda: gymnasium.make(
            gymnasium.envs.registration.EnvSpec("Resumable-v0", host_envs.Resumable),
            max_episode_steps=5,
        ),
    ],
)
def test_time_limits_continue_from_saved_state(make):
    envs = [LocalEnvs([make]) for _ in range(2)]
    for env in envs:
        env.reset(np.zeros(1, np.int64), MASK[:1])
    for _ in range(3):
        step = envs[0].step(ACTION[:1])
    envs[1].load(envs[0].save(), np.copy(step.obs))
    for count in (4, 5):
        for env in envs:
            step = env.step(ACTION[:1])
            assert step.obs == count
            assert step.truncated == (count == 5)


@all_adapters
def test_all_adapters_save_time_limits(make_env, adapter):
    env, target = (make_env(adapter, host_envs.make_limited) for _ in range(2))
    for x in (env, target):
        x.reset(np.zeros(3, np.int64), np.ones(3, bool))
    for _ in range(4):
        step = env.step(ACTION)
    target.load(env.save(), np.copy(step.obs))
    assert target.step(ACTION).truncated.all()


def test_loading_requires_the_same_time_limits():
    envs = [
        LocalEnvs([x]) for x in (host_envs.Resumable, limited(host_envs.Resumable, 5))
    ]
    for env in envs:
        env.reset(np.zeros(1, np.int64), MASK[:1])
    obs = np.zeros((1, 1), np.float32)
    with pytest.raises(ValueError, match=r"must have 0 time limits, .* got 1"):
        envs[1].load(envs[0].save(), obs)


class StatefulWrapper(gymnasium.Wrapper):
    """A wrapper whose state would be lost."""


def test_unknown_wrappers_must_define_save_state():
    env = LocalEnvs([lambda: StatefulWrapper(host_envs.Resumable())])
    env.reset(np.zeros(1, np.int64), MASK[:1])
    assert env.save() is None
