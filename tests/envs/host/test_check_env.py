"""`check_env` with environments that contain one mistake each."""

import functools
import sys

import gymnasium
import numpy as np
import pytest
from host_count import HostCount
from space_envs import Sampled

import rollout
from rollout import envs


class Toy(HostCount):
    """A `HostCount` whose subclasses change one behavior."""

    def step(self, action):
        return self.change(super().step(action))

    def change(self, step):
        return step


def replace_fields(**fields):
    """Returns a class whose step replaces fields with functions of the step."""

    class ChangedEnv(Toy):
        def change(self, step):
            return step._replace(**{name: fn(step) for name, fn in fields.items()})

    return ChangedEnv


class TextSpace(Toy):
    observation_space = gymnasium.spaces.Text(3)


class RaisesInStep(Toy):
    def change(self, step):
        raise ZeroDivisionError("no such move.")


class WritesAction(Toy):
    def step(self, action):
        step = super().step(action)
        action[:] = 0
        return step


class ResetAffectsOthers(Toy):
    """A masked reset changes all environments."""

    def reset(self, seeds, mask):
        super().reset(seeds, mask)
        self.obs = np.where(mask[:, None], 0.0, self.obs + 5.0).astype(np.float32)
        return self.obs


class SharedReward(Toy):
    """The reward of each environment is the sum of all actions."""

    def change(self, step):
        total = np.float32(step.info["action"].sum())
        return step._replace(reward=np.full_like(step.reward, total))


class GlobalGenerator(Toy):
    """A reset samples its seed from a global generator."""

    rng = np.random.default_rng(0)

    def reset(self, seeds, mask):
        seeds = self.rng.integers(2**32, size=seeds.shape, dtype=np.uint32)
        return super().reset(seeds, mask)


class SeedIgnored(Toy):
    """A reset ignores its seed."""

    def reset(self, seeds, mask):
        return super().reset(np.zeros_like(seeds), mask)


class SelfResetting(Toy):
    """A step resets finished environments and returns the reset observation."""

    def change(self, step):
        done = step.terminated | step.truncated
        self.is_done[:] = False
        self.obs[done] = 0.0
        return step._replace(obs=self.obs)


def raise_os_error(number, env_id):
    return OSError("torn") if (number, env_id) == (9, 0) else None


class GymEnv(gymnasium.Env):
    """A Gymnasium environment whose subclasses change one behavior."""

    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    flag, reward, obs = staticmethod(bool), 1.0, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = int(self.np_random.integers(5))
        return self.make_obs(), {}

    def step(self, action):
        self.count += 1
        return self.make_obs(), self.reward, self.flag(self.count > 7), False, {}

    def make_obs(self):
        return np.full(2, self.count, np.float32) if self.obs is None else self.obs


class StepsAfterEnd(GymEnv):
    """A step after the end continues to count, which Gymnasium allows."""

    def step(self, action):
        result = super().step(action)
        return *result[:2], self.count == 8, *result[3:]


class WithoutOptions(GymEnv):
    def reset(self, *, seed=None):
        return super().reset(seed=seed)


class SharedState(GymEnv):
    """All environments share one state, like a global variable."""

    state = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.state[:] = obs
        return self.state, info

    def step(self, action):
        self.state += 1
        return self.state, 1.0, bool(self.state[0] > 7), False, {}


def make_gym(env_class=GymEnv, **changes):
    """Returns a function that makes environments with replaced attributes."""
    return functools.partial(
        envs.from_gymnasium, type("ChangedEnv", (env_class,), changes)
    )


def make_sync_vector(mode):
    mode = gymnasium.vector.AutoresetMode[mode]
    return lambda num: envs.from_gymnasium(
        gymnasium.vector.SyncVectorEnv([GymEnv] * num, autoreset_mode=mode)
    )


def cast_flag(name):
    """Returns a class with an integer flag."""
    return replace_fields(**{name: lambda step: getattr(step, name).astype(np.int64)})


def scale_fields(**factors):
    return replace_fields(
        **{x: lambda step, x=x: getattr(step, x) * factors[x] for x in factors}
    )


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
NAN, INF = np.float32(np.nan), np.float32(np.inf)
PlainTupleStep = type(
    "PlainTupleStep", (Toy,), {"change": lambda self, step: tuple(step)}
)
# A function that makes environments, the names of the issues, and words of a message.
CASES = [
    (TextSpace, "contract", "`observation_space` must"),
    (RaisesInStep, "raises", "ZeroDivisionError: no such move"),
    slow(PlainTupleStep, "contract", "HostStep`, got 9 values"),
    (replace_fields(obs=lambda step: step.obs[:, 0]), "contract", "(3,) at .obs"),
    slow(cast_flag("terminated"), "contract", "got int64 of shape (3,) at .terminated"),
    slow(replace_fields(mask=lambda step: [True, True, True]), "contract", ""),
    slow(WritesAction, "raises", "is read-only"),
    (ResetAffectsOthers, "contract", "observations of other"),
    (SharedReward, "shared", "seeds and actions of other"),
    (SelfResetting, "ending", "after the end"),
    (GlobalGenerator, "seed", "different episodes"),
    slow(SeedIgnored, "ending seed", "equal episodes"),
    (functools.partial(HostCount, fault_fn=raise_os_error), "fault", "OSError: torn"),
    # Gymnasium environments.
    slow(make_gym(flag=staticmethod(int)), "fault", "terminated must have dtype bool"),
    (make_gym(obs=np.zeros(2, "F")), "gymnasium fault", "obs must have dtype float32"),
    (make_gym(obs=np.zeros(2, "F")), "gymnasium fault", "complex64 of shape (2,)"),
    (make_gym(WithoutOptions), "gymnasium", "`options`"),
    (make_sync_vector("NEXT_STEP"), "contract", "NEXT_STEP"),
    # No issues.
    *((x, "", "") for x in (HostCount, make_gym(StepsAfterEnd))),
    slow(make_gym(), "", ""),
    slow(make_sync_vector("DISABLED"), "", ""),
    slow(functools.partial(envs.from_gymnasium, "CartPole-v1"), "", ""),
]


def check_env(env, num_steps=40):
    """Uses 40 steps, so that tests share compiled programs."""
    return rollout.check_env(env, num_steps=num_steps)


def issue_names(env, **options):
    return [issue.name for issue in check_env(env, **options)]


@pytest.mark.parametrize(("make", "expected", "message"), CASES)
def test_issue_names_and_messages(make, expected, message):
    issues = check_env(make(3))
    assert [issue.name for issue in issues] == expected.split()
    assert not issues or any(message in issue.message for issue in issues)


def test_message_contains_step_of_the_episode():
    """Makes a fault in a later episode."""

    class LateFault(Toy):
        num_resets = 0

        def reset(self, seeds, mask):
            self.num_resets += 1
            return super().reset(seeds, mask)

        def change(self, step):
            is_bad = (step.obs[:, 0] == 3) & (self.num_resets > 2)
            return step._replace(reward=np.where(is_bad, NAN, step.reward))

    message = dict(check_env(LateFault(3)))["fault"]
    assert "`reward` must be finite, got nan" in message
    assert "step 3" in message


def test_single_environment_has_no_issues():
    assert check_env(HostCount(1)) == ()


@pytest.mark.parametrize(
    "make",
    [
        scale_fields(obs=NAN),
        slow(scale_fields(reward=INF)),
        slow(replace_fields(obs=lambda step: -step.obs - 1)),
    ],
)
def test_nonfinite_and_out_of_bounds_values_are_faults(make):
    assert issue_names(make(3)) == ["fault"]


def test_out_of_bounds_message_contains_the_bounds():
    issues = dict(check_env(make_gym(obs=np.full(2, 99.0, np.float32))(3)))
    assert "`obs[0]` must be in [-9, 9]" in issues["fault"]


def test_shared_state_is_reported():
    wide_space = gymnasium.spaces.Box(-99.0, 99.0, (2,), np.float32)
    assert "shared" in issue_names(
        make_gym(SharedState, observation_space=wide_space)(3)
    )


def test_too_few_steps_report_missing_endings():
    env = HostCount(3, min_length=10, max_length=20, limit=99)
    assert issue_names(env, num_steps=8) == ["ending", "seed"]
    assert check_env(env) == ()


def test_missing_package_of_gymnasium_checker_raises(monkeypatch):
    """The checker converts arrays of JAX."""
    monkeypatch.setitem(sys.modules, "array_api_compat", None)
    env = type("JaxEnv", (GymEnv,), {"metadata": {"jax": True}})
    with pytest.raises(ModuleNotFoundError, match=r"checker needs .*array_api_compat"):
        rollout.check_env(envs.from_gymnasium(env, 2), num_steps=8)


def test_tuple_actions_have_no_issues():
    """A tuple of two actions is not read as an action and extras."""
    space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(n) for n in (3, 2)])
    env = envs.from_gymnasium(functools.partial(Sampled, space), 2)
    assert rollout.check_env(env, num_steps=7) == ()
