"""Environments in this process: their results, their faults and their states.

Those in workers do the same, where `each_place` says so.
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

EVERY = np.ones(3, bool)
ACTION = np.int32([1, 2, 3])
ONE, START = np.ones(1, bool), np.uint32([0])
PLACES = {
    "local": LocalEnvs,
    "workers": lambda fns, **x: envs.make_worker_envs(fns, 2, **x),
}
each_place = pytest.mark.parametrize("place", PLACES)


@pytest.fixture
def make():
    """Makes environments that are closed after the test."""
    made = []

    def make(place="local", make_fn=Count, **options):
        made.append(PLACES[place]([make_fn] * 3, **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


def start(env, faults=("fine",) * 3, mask=EVERY):
    seeds = np.uint32([seed_of(fault) for fault in faults])
    return env.reset(seeds, mask)


def one(make_fn, **options):
    """A single environment, which was reset."""
    env = LocalEnvs([make_fn], **options)
    env.reset(START, ONE)
    return env


def test_fault_travels_between_processes():
    fault = EnvFault({1: ValueError("no")}, "; and so on")
    got = pickle.loads(pickle.dumps(fault))
    assert str(got) == str(fault)
    assert str(got.causes[1]) == "no"


# The kind and the words of each fault; an `OddError` cannot leave a worker.
CAUSES = {
    "raise": (ZeroDivisionError, "at step 3"),
    "shape": (ValueError, r"obs must have shape \(2,\), got \(1,\)"),
    "dtype": (TypeError, "obs must have dtype float32, got complex128"),
    "reward": (TypeError, "reward must have dtype float32, got <U3"),
    "flag": (TypeError, "terminated must have dtype bool, got float64"),
    "values": (ValueError, r"not enough values to unpack \(expected 5, got 4\)"),
    "odd": (RuntimeError, "odd error"),
}


@each_place
@pytest.mark.parametrize("fault", CAUSES)
def test_fault_is_that_of_one_row_until_it_is_rebuilt_and_reset(make, place, fault):
    env = make(place)
    start(env, ("fine", fault, "fine"))
    pids = getattr(env, "pids", None)
    only = np.bool_([False, True, False])
    for number in range(1, FAULT_STEP + 2):  # one more step than that of the fault
        step = env.step(ACTION)
        np.testing.assert_array_equal(step.faulty, only & (number >= FAULT_STEP))
        np.testing.assert_array_equal(step.obs[~only, 0], [number] * 2)
        assert list(step.causes) == [1] * (number >= FAULT_STEP)
    kind, words = CAUSES[fault]
    if place == "workers":
        assert step.causes[1].__notes__[0].startswith("Traceback")
    elif fault == "odd":
        kind = host_envs.OddError
    with pytest.raises(kind, match=words):
        raise step.causes[1]
    with pytest.raises(EnvFault, match="environment 1 failed"):
        start(env, mask=only)
    env.rebuild(only)
    obs = start(env, mask=only)
    np.testing.assert_array_equal(obs[:, 0], [FAULT_STEP + 1, 0, FAULT_STEP + 1])
    step = env.step(ACTION)
    assert not step.faulty.any()
    np.testing.assert_array_equal(step.obs[:, 0], [FAULT_STEP + 2, 1, FAULT_STEP + 2])
    assert getattr(env, "pids", None) == pids


@each_place
def test_fault_at_reset_leaves_the_others_reset(make, place):
    env = make(place)
    start(env)
    env.step(ACTION)
    with pytest.raises(EnvFault, match="1 failed: RuntimeError: no start") as info:
        start(env, ("fine", "reset", "fine"))
    assert list(info.value.causes) == [1]
    step = env.step(ACTION)
    np.testing.assert_array_equal(step.obs[[0, 2], 0], [1, 1])
    np.testing.assert_array_equal(step.faulty, [False, True, False])


def test_interrupt_is_no_fault(make):
    env = make()
    start(env, ("exit", "fine", "fine"))
    for _ in range(FAULT_STEP - 1):
        env.step(ACTION)
    with pytest.raises(SystemExit):
        env.step(ACTION)


def test_observed_info_that_is_missing_is_a_fault_that_names_it(make):
    env = make(observe_info={"seed": np.int32(0)})
    start(env)
    step = env.step(ACTION)
    assert step.faulty.all()
    with pytest.raises(KeyError, match=r"obs\['info'\] without 'seed'"):
        raise step.causes[0]


def test_recorded_info_is_zero_where_a_step_has_none():
    env = one(Count, record_info={"third": np.float32(0)})
    rows = [env.step(ACTION[:1]).info["third"].copy() for _ in range(4)]
    np.testing.assert_array_equal(rows, np.float32([[0], [0], [3], [0]]))


@each_place
def test_environments_go_on_where_they_were_saved(make, place):
    env, other = make(place, Described), make(place, Described)
    start(env), start(other, ("fine", "raise", "fine"))
    obs = np.copy(env.step(ACTION).obs)
    for _ in range(FAULT_STEP):
        step = other.step(ACTION)
    assert step.faulty.any()
    assert other.save() is None
    states = env.save()
    assert [type(state) for state in states] == [bytes] * 3
    other.load(states, obs)
    for _ in range(2):
        ours, theirs = env.step(ACTION), other.step(ACTION)
        np.testing.assert_array_equal(ours.obs, theirs.obs)
        np.testing.assert_array_equal(ours.truncated, theirs.truncated)
        assert not theirs.faulty.any()


@each_place
def test_environments_without_save_state_are_not_saved(make, place):
    assert make(place).save() is None


def test_rebuild_that_fails_leaves_the_environment_faulty():
    made = []

    def once():
        made.append(Count(fails=len(made) == 1))
        return made[-1]

    env = LocalEnvs([once])
    with pytest.raises(EnvFault, match="environment 0 failed: ValueError: no such"):
        env.rebuild(ONE)
    assert made[0].closed
    assert isinstance(env.causes[0], ValueError)


def test_close_closes_every_environment_once():
    made = [Count(), Count()]
    env = LocalEnvs([lambda: made[0], lambda: made[1]])
    env.close()
    env.close()
    assert made[0].closed
    assert made[1].closed


class Large(Count):
    """Counts from a number on, in 64 bits; its info has it, too."""

    observation_space = gymnasium.spaces.Box(-(2**62), 2**62, (2,), np.int64)

    def __init__(self, first):
        super().__init__()
        self.first = first

    def _obs(self):
        return np.full(2, self.first + self.count, np.int64)

    def _info(self):
        return {"count": np.int64(self.first + self.count)}


class Rounded(Large):
    """Observes integers of 64 bits in a space of floats."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)


TOO_WIDE = "since jax uses 32 bits, got"
ROUNDED = (
    "integers of at most 16777216, since float32 rounds larger integers, got 16777217"
)


@pytest.mark.parametrize(
    ("made", "first", "message"),
    [
        (Large, 2**31 - 2, f"{TOO_WIDE} 2147483648"),
        (Large, -(2**31) - 1, f"{TOO_WIDE} -2147483649"),
        (Rounded, 2**24 - 1, ROUNDED),
        (Rounded, -(2**24) - 1, ROUNDED),
    ],
)
def test_integers_that_32_bits_cannot_hold_are_faults(made, first, message):
    env = LocalEnvs([functools.partial(made, first)], record_info={"count": 0})
    if first < 0:
        with pytest.raises(EnvFault, match=message):
            env.reset(START, ONE)
        return
    assert env.reset(START, ONE).tolist() == [[first] * 2]
    assert not env.step(np.int32([1])).faulty.any()
    assert message in str(env.step(np.int32([1])).causes[0])
