"""`probe` against environments that each make one mistake."""

import functools

import gymnasium
import numpy as np
import pytest
from host_count import HostCount

import rollout
from rollout import envs


class Toy(HostCount):
    """`HostCount`, to be broken in one place."""

    def step(self, action):
        return self.change(super().step(action))

    def change(self, step):
        return step


def with_step(**fields):
    """A class whose step has other fields, each made of the step."""

    class Changed(Toy):
        def change(self, step):
            return step._replace(**{name: fn(step) for name, fn in fields.items()})

    return Changed


class Unbounded(Toy):
    observation_space = gymnasium.spaces.Text(3)


class Wide(Toy):
    action_space = envs.Box(0.0, 1.0, (), np.dtype(np.float64))


class Raises(Toy):
    def change(self, step):
        raise ZeroDivisionError("no such move.")


class Greedy(Toy):
    def step(self, action):
        step = super().step(action)
        action[:] = 0
        return step


class Neighbours(Toy):
    """A reset of some writes to all."""

    def reset(self, seeds, mask):
        super().reset(seeds, mask)
        self.obs = np.where(mask[:, None], 0.0, self.obs + 5.0).astype(np.float32)
        return self.obs


class OneReward(Toy):
    """The reward of each is the sum of the actions of all."""

    def change(self, step):
        total = np.float32(step.info["action"].sum())
        return step._replace(reward=np.full_like(step.reward, total))


class Unseeded(Toy):
    """It draws from a generator of its own."""

    rng = np.random.default_rng(0)

    def reset(self, seeds, mask):
        own = self.rng.integers(2**32, size=seeds.shape, dtype=np.uint32)
        return super().reset(own, mask)


class Deaf(Toy):
    """The seed does nothing."""

    def reset(self, seeds, mask):
        return super().reset(np.zeros_like(seeds), mask)


class Restless(Toy):
    """It resets itself where an episode ends, and shows that observation."""

    def change(self, step):
        over = step.terminated | step.truncated
        self.over[:] = False
        self.obs[over] = 0.0
        return step._replace(obs=self.obs)


def flags_of_another_kind(name):
    return with_step(**{name: lambda step: getattr(step, name).astype(np.int64)})


BROKEN = {
    "observation_space": Unbounded,
    "action_space": Wide,
    "raises": Raises,
    "step": type("Plain", (Toy,), {"change": lambda self, step: tuple(step)}),
    "obs": with_step(obs=lambda step: step.obs.astype(np.float64)),
    "reward": with_step(reward=lambda step: step.reward[:, None]),
    "terminated": flags_of_another_kind("terminated"),
    "truncated": flags_of_another_kind("truncated"),
    "faulty": flags_of_another_kind("faulty"),
    "mask": with_step(mask=lambda step: [True, True, True]),
    "action": Greedy,
    "reset": Neighbours,
    "shared": OneReward,
    "ending": Restless,
}


def probe(env, num_steps=40):
    """Of 3 environments and 40 steps, which all tests share if they can."""
    return rollout.probe(env, num_steps=num_steps)


def names(env, **options):
    return [finding.name for finding in probe(env, **options)]


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(name):
    assert names(BROKEN[name](3))[0] == name


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(HostCount, 3),
        functools.partial(HostCount, 1),
        functools.partial(Toy, 3),
        functools.partial(envs.from_gymnasium, "CartPole-v1", 3),
    ],
)
def test_nothing_is_found_where_all_is_well(make):
    assert probe(make()) == ()


def test_finding_prints_as_its_name_and_what_was_met():
    (finding,) = probe(Raises(3))
    assert str(finding) == ("raises: ZeroDivisionError: no such move, at step 1")


@pytest.mark.parametrize(
    ("env_class", "what"),
    [(Unseeded, "the same one starts another"), (Deaf, "others start the same")],
)
def test_seed_that_does_not_decide_the_episode_is_found(env_class, what):
    (finding,) = probe(env_class(3))
    assert finding.name == "seed"
    assert finding.message.startswith(what)


def test_info_that_changes_is_found():
    fields = iter([{"a": np.zeros(3)}, {"b": np.zeros(3)}])
    (finding,) = probe(with_step(info=lambda step: next(fields))(3))
    assert finding.name == "info"
    assert "'a'" in finding.message
    assert "'b'" in finding.message
    assert finding.message.endswith("at step 2")


def test_observations_in_the_same_memory_are_found():
    class OneRow(Toy):
        def change(self, step):
            return step._replace(obs=np.broadcast_to(step.obs[:1], step.obs.shape))

    assert "reset" in names(OneRow(3))
    assert "reset" not in names(OneRow(1))


def test_numbers_that_are_not_finite_or_outside_are_found():
    nan = with_step(
        obs=lambda step: step.obs * np.float32(np.nan),
        reward=lambda step: step.reward * np.float32(np.inf),
    )
    assert names(nan(3))[:2] == ["reward", "obs"]
    low = with_step(obs=lambda step: -step.obs - 1)
    assert names(low(3))[0] == "obs"


def test_window_without_an_ending_says_that_nothing_is_known_of_it():
    env = HostCount(3, min_length=10, max_length=20, limit=99)
    assert names(env, num_steps=8) == ["seed", "ending"]  # it counts, so far
    assert probe(env) == ()


def test_fault_is_found_with_its_cause():
    def fail(number, env_id):
        return OSError("torn") if (number, env_id) == (9, 0) else None

    env = HostCount(3, fault_fn=fail)
    (finding,) = probe(env)
    assert finding.name == "fault"
    assert "environment 0 failed: OSError: torn" in finding.message


class Gym(gymnasium.Env):
    """An environment of Gymnasium's kind, to be broken in one place."""

    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    flag, reward, obs = staticmethod(bool), 1.0, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = int(self.np_random.integers(5))
        return self.show(), {}

    def step(self, action):
        self.count += 1
        return self.show(), self.reward, self.flag(self.count > 7), False, {}

    def show(self):
        return np.full(2, self.count, np.float32) if self.obs is None else self.obs


class Shared(Gym):
    """Every environment has the same state, as one in a global variable."""

    state = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.state[:] = obs
        return self.state, info

    def step(self, action):
        self.state += 1
        return self.state, 1.0, bool(self.state[0] > 7), False, {}


@pytest.mark.parametrize(
    ("change", "name", "what"),
    [
        ({"flag": staticmethod(int)}, "fault", "terminated must have dtype bool"),
        ({"reward": np.ones(1)}, "fault", "reward must have shape (), got (1,)"),
        ({"obs": np.zeros(3, np.float32)}, "fault", "obs must have shape (2,)"),
        ({"obs": np.full(2, 99.0, np.float32)}, "obs", "`obs[0]` must be in [-9, 9]"),
        ({"obs": np.zeros(2, np.complex64)}, "fault", "obs must have dtype float32"),
    ],
)
def test_fault_of_an_environment_of_gymnasium_is_named(change, name, what):
    env = envs.from_gymnasium(type("Broken", (Gym,), change), 3)
    assert what in dict(probe(env))[name]


def test_gymnasium_has_the_first_word():
    class Plain(Gym):
        def reset(self, *, seed=None):
            return super().reset(seed=seed)

    finding, *others = probe(envs.from_gymnasium(Plain, 3))
    assert finding.name == "gymnasium"
    assert "`options`" in finding.message
    assert not others


def test_environments_with_one_state_for_all_are_found():
    assert "shared" in names(envs.from_gymnasium(Shared, 3))
    assert names(envs.from_gymnasium(Gym, 3)) == []


@pytest.mark.parametrize(
    ("mode", "expected"), [("DISABLED", []), ("NEXT_STEP", ["raises"])]
)
def test_vector_environment_that_cannot_be_cut_short_is_found(mode, expected):
    mode = gymnasium.vector.AutoresetMode[mode]
    env = gymnasium.vector.SyncVectorEnv([Gym] * 3, autoreset_mode=mode)
    assert names(envs.from_gymnasium(env)) == expected
