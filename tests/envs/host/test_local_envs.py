"""Environments in this process: their results and their faults."""

import functools
import pickle
import re

import gymnasium
import host_envs
import numpy as np
import pytest
from host_envs import AT, FAULTS, Count, seed_of

from rollout import envs
from rollout.envs.host.local_envs import LocalEnvs
from rollout.envs.host.types import EnvFault

EVERY = np.ones(3, bool)
ACTION = np.int32([1, 2, 3])


def make(**options):
    return LocalEnvs([Count] * 3, **options)


def start(env, faults=("fine",) * 3, mask=EVERY):
    seeds = np.uint32([seed_of(fault) for fault in faults])
    return env.reset(seeds, mask)


def test_fault_travels_between_processes():
    fault = EnvFault({1: ValueError("no")}, "; and so on")
    got = pickle.loads(pickle.dumps(fault))
    assert str(got) == str(fault)
    assert str(got.causes[1]) == "no"


def test_step_returns_successors_rewards_and_flags():
    env = LocalEnvs([Count, functools.partial(Count, 2), functools.partial(Count, 1)])
    assert env.num_envs == 3
    np.testing.assert_array_equal(start(env), np.zeros((3, 2)))
    first = env.step(ACTION)
    assert first.obs.dtype == first.reward.dtype == np.float32
    np.testing.assert_array_equal(first.obs, np.ones((3, 2)))
    np.testing.assert_array_equal(first.reward, [1, 2, 3])
    np.testing.assert_array_equal(first.terminated, [False] * 3)
    np.testing.assert_array_equal(first.truncated, [False, False, True])
    second = env.step(ACTION)
    np.testing.assert_array_equal(second.terminated, [False, True, False])
    assert not second.faulty.any()
    assert second.info == {}
    assert second.mask is None
    assert second.causes == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_that_of_one_row(fault):
    env = make()
    start(env, ("fine", fault, "fine"))
    for _ in range(AT):
        step = env.step(ACTION)
    np.testing.assert_array_equal(step.faulty, [False, True, False])
    np.testing.assert_array_equal(step.obs[[0, 2], 0], [AT, AT])
    assert list(step.causes) == [1]
    words = {
        "raise": "at step 3",
        "shape": r"obs must have shape \(2,\), got \(1,\)",
        "dtype": "obs must have dtype float32, got complex128",
        "reward": "reward must have dtype float32, got <U3",
        "flag": "terminated must have dtype bool, got float64",
        "values": r"`step` must return \(obs, .*, info\), got 4 values",
        "odd": "odd error",
    }
    with pytest.raises(Exception, match=words[fault]):
        raise step.causes[1]


def test_faulty_one_takes_no_step_until_it_is_rebuilt_and_reset():
    env = make()
    start(env, ("raise", "fine", "fine"))
    for _ in range(AT + 1):
        step = env.step(ACTION)
    np.testing.assert_array_equal(step.faulty, [True, False, False])
    only = np.bool_([True, False, False])
    with pytest.raises(envs.EnvFault, match="environment 0 failed: ZeroDivision"):
        start(env, mask=only)
    env.rebuild(only)
    start(env, mask=only)
    step = env.step(ACTION)
    assert not step.faulty.any()
    np.testing.assert_array_equal(step.obs[:, 0], [1, AT + 2, AT + 2])


def test_fault_at_reset_leaves_the_others_reset():
    env = make()
    start(env)
    env.step(ACTION)
    with pytest.raises(envs.EnvFault, match="1 failed: RuntimeError: no start") as info:
        start(env, ("fine", "reset", "fine"))
    assert list(info.value.causes) == [1]
    step = env.step(ACTION)
    np.testing.assert_array_equal(step.obs[[0, 2], 0], [1, 1])
    np.testing.assert_array_equal(step.faulty, [False, True, False])


def test_interrupt_is_no_fault():
    env = make()
    start(env, ("exit", "fine", "fine"))
    for _ in range(AT - 1):
        env.step(ACTION)
    with pytest.raises(SystemExit):
        env.step(ACTION)


def test_observed_info_stands_next_to_the_observation():
    env = make(observe_info={"even": np.bool_(True)})
    assert isinstance(env.observation_space, envs.Dict)
    assert env.observation_space.spaces["info"].spaces["even"].dtype == bool
    obs = start(env)
    np.testing.assert_array_equal(obs["info"]["even"], [True] * 3)
    step = env.step(ACTION)
    assert set(step.obs) == {"obs", "info"}
    np.testing.assert_array_equal(step.obs["obs"], np.ones((3, 2)))
    np.testing.assert_array_equal(step.obs["info"]["even"], [False] * 3)


def test_observed_info_that_is_missing_is_a_fault_that_names_it():
    env = make(observe_info={"seed": np.int32(0)})
    start(env)
    step = env.step(ACTION)
    assert step.faulty.all()
    with pytest.raises(KeyError, match=r"obs\['info'\] without 'seed'"):
        raise step.causes[0]


def test_recorded_info_is_zero_where_a_step_has_none():
    env = make(record_info={"third": np.float32(0)})
    start(env)
    rows = [env.step(ACTION).info["third"].copy() for _ in range(4)]
    np.testing.assert_array_equal(
        rows, np.float32([[0] * 3, [0] * 3, [3] * 3, [0] * 3])
    )


def test_environments_go_on_where_they_were_saved():
    env = make()
    start(env, ("fine", "raise", "fine"))
    for _ in range(AT):
        obs = np.copy(env.step(ACTION).obs)
    states = env.save(allow_pickle=True)
    assert [type(state) for state in states] == [bytes] * 3
    other = make()
    start(other)
    assert other.load(states, obs, allow_pickle=True)
    for _ in range(2):
        ours, theirs = env.step(ACTION), other.step(ACTION)
        np.testing.assert_array_equal(ours.obs[[0, 2]], theirs.obs[[0, 2]])
        np.testing.assert_array_equal(ours.truncated, theirs.truncated)
        np.testing.assert_array_equal(theirs.faulty, [False, True, False])
    assert "ZeroDivisionError: at step 3" in str(theirs.causes[1])
    obs = start(other, mask=np.bool_([True, False, False]))
    np.testing.assert_array_equal(obs[[0, 2], 0], [0, AT + 2])


def test_observations_are_there_after_a_load():
    env, other = make(), make()
    start(env), start(other)
    obs = np.copy(env.step(ACTION).obs)
    assert other.load(env.save(allow_pickle=True), obs, allow_pickle=True)
    rows = start(other, mask=np.bool_([True, False, False]))
    np.testing.assert_array_equal(rows[:, 0], [0, 1, 1])


def test_what_cannot_be_pickled_says_so_and_is_not_loaded():
    env = LocalEnvs([host_envs.Stubborn])
    assert env.save() is None
    saved = env.save(allow_pickle=True)
    assert b"pickling Stubborn raises TypeError: stubborn" in saved[0]
    assert not env.load(saved, np.zeros((1, 2)), allow_pickle=True)


@pytest.mark.parametrize("make_fn", [Count, host_envs.Described])
def test_nothing_is_pickled_unless_it_is_allowed(make_fn, monkeypatch):
    env, other = LocalEnvs([make_fn] * 3), LocalEnvs([make_fn] * 3)
    start(env), start(other)
    obs = np.copy(env.step(ACTION).obs)
    pickled = env.save(allow_pickle=True) if make_fn is Count else None
    fail = lambda *_: pytest.fail("it pickles")  # noqa: E731
    (
        monkeypatch.setattr("pickle.loads", fail),
        monkeypatch.setattr("pickle.dumps", fail),
    )
    states = env.save()
    assert (states is None) == (make_fn is Count)
    assert other.load(states or pickled, obs) == (make_fn is not Count)


def test_environment_that_takes_arrays_keeps_its_settings():
    env = LocalEnvs([functools.partial(host_envs.Described, 5)])
    other = LocalEnvs([functools.partial(host_envs.Described, 3)])
    for each in (env, other):
        each.reset(np.zeros(1, np.uint32), np.ones(1, bool))
    obs = np.copy(env.step(ACTION[:1]).obs)
    assert other.load(env.save(), obs)
    steps = [other.step(ACTION[:1]) for _ in range(2)]
    assert steps[-1].obs[0, 0] == 3
    assert steps[-1].truncated[0]  # after 3 steps, not after 5


def test_settings_of_wrapped_environments_count():
    gymnasium = pytest.importorskip("gymnasium")
    wrap = lambda steps: gymnasium.wrappers.TimeLimit(Count(), steps)  # noqa: E731
    env, other = (LocalEnvs([functools.partial(wrap, n)]) for n in (5, 3))
    for each in (env, other):
        each.reset(np.zeros(1, np.uint32), np.ones(1, bool))
    states = env.save(allow_pickle=True)
    with pytest.raises(ValueError, match=r"got TimeLimit\._max_episode_steps 5 there"):
        other.load(states, np.zeros((1, 2)), allow_pickle=True)


def test_rebuild_that_fails_leaves_the_environment_faulty():
    made = []

    def once():
        made.append(Count(fails=len(made) == 1))
        return made[-1]

    env = LocalEnvs([once])
    with pytest.raises(
        envs.EnvFault, match="environment 0 failed: ValueError: no such"
    ):
        env.rebuild(np.ones(1, bool))
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


@pytest.mark.parametrize("first", [2**31 - 2, -(2**31) - 1, 2**40])
def test_integers_beyond_32_bits_do_not_wrap(first):
    fits = -(2**31) <= first < 2**31
    env = LocalEnvs([functools.partial(Large, first)], record_info={"count": 0})
    one = np.ones(1, bool)
    if not fits:
        with pytest.raises(EnvFault, match="must be from -2147483648 to 2147483647"):
            env.reset(np.uint32([0]), one)
        return
    assert env.reset(np.uint32([0]), one).tolist() == [[first] * 2]
    assert not env.step(np.int32([1])).faulty.any()
    step = env.step(np.int32([1]))  # 2^31
    assert "as numbers have 32 bits, got 2147483648" in str(step.causes[0])


class Odd(Count):
    """Returns other things than Gymnasium's two and five."""

    def __init__(self, name, result):
        super().__init__()
        self.name, self.result = name, result

    def reset(self, *, seed=None, options=None):
        begun = super().reset(seed=0)
        return self.result if self.name == "reset" else begun

    def step(self, action):
        return self.result


@pytest.mark.parametrize("result", [None, "text", (0, 1, 2), [1, 2]])
@pytest.mark.parametrize("name", ["reset", "step"])
def test_other_numbers_of_values_are_named(name, result):
    env = LocalEnvs([functools.partial(Odd, name, result)])
    one, words = np.ones(1, bool), rf"`{name}` must return \(obs, .*info\), got"
    if name == "reset":
        with pytest.raises(EnvFault, match=words):
            env.reset(np.uint32([0]), one)
        return
    env.reset(np.uint32([0]), one)
    assert re.match(words, str(env.step(np.int32([1])).causes[0]))
