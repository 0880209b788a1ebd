"""`check_env` against environments that each make one mistake."""

import functools

import gymnasium
import numpy as np
import pytest
from host_count import HostCount
from space_envs import Sampled

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
        self.is_done[:] = False
        self.obs[over] = 0.0
        return step._replace(obs=self.obs)


def torn(number, env_id):
    return OSError("torn") if (number, env_id) == (9, 0) else None


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


class PlaysOn(Gym):
    """A step after the end is as any other, which Gymnasium allows."""

    def step(self, action):
        result = super().step(action)
        return *result[:2], self.count == 8, *result[3:]


class WithoutOptions(Gym):
    def reset(self, *, seed=None):
        return super().reset(seed=seed)


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


def gym(made=Gym, **changes):
    """Makes as many as asked for, with some attributes replaced."""
    return functools.partial(envs.from_gymnasium, type("Broken", (made,), changes))


def in_vector(mode):
    mode = gymnasium.vector.AutoresetMode[mode]
    return lambda num: envs.from_gymnasium(
        gymnasium.vector.SyncVectorEnv([Gym] * num, autoreset_mode=mode)
    )


def kind_of(name):
    """A class with a flag of another kind."""
    return with_step(**{name: lambda step: getattr(step, name).astype(np.int64)})


def scaled(**factors):
    return with_step(
        **{x: lambda step, x=x: getattr(step, x) * factors[x] for x in factors}
    )


NAN, INF = np.float32(np.nan), np.float32(np.inf)
PLAIN = type("Plain", (Toy,), {"change": lambda self, step: tuple(step)})
# What makes environments, the issues, and what one of them says.
FOUND = [
    (Unbounded, "contract", "`observation_space` must be a Box, Discrete"),
    (Raises, "raises", "raised ZeroDivisionError: no such move"),
    (PLAIN, "contract", "must return a `rollout.envs.host.HostStep`, got 9 values"),
    (with_step(obs=lambda step: step.obs[:, 0]), "contract", "(3,) at .obs"),
    (kind_of("terminated"), "contract", "got int64 of shape (3,) at .terminated"),
    (with_step(mask=lambda step: [True, True, True]), "contract", ""),
    (Greedy, "raises", "is read-only"),
    (Neighbours, "contract", "must not change the observations of other"),
    (OneReward, "shared", "depends on seeds and actions of other"),
    (Restless, "ending", "continues after the end"),
    (Unseeded, "seed", "equal seeds start different episodes"),
    (Deaf, "seed", "different seeds start equal episodes"),
    (functools.partial(HostCount, fault_fn=torn), "fault", "0 failed: OSError: torn"),
    # Of Gymnasium's kind.
    (gym(flag=staticmethod(int)), "fault", "terminated must have dtype bool"),
    (gym(obs=np.zeros(2, "F")), "gymnasium fault", "obs must have dtype float32"),
    (gym(WithoutOptions), "gymnasium", "`options`"),  # has the first word
    (in_vector("NEXT_STEP"), "contract", "NEXT_STEP cannot reset during"),
    # All is well.
    *((x, "", "") for x in (HostCount, Toy, gym(), gym(PlaysOn))),
    (in_vector("DISABLED"), "", ""),
    (functools.partial(envs.from_gymnasium, "CartPole-v1"), "", ""),
]


def check_env(env, num_steps=40):
    """Of 3 environments and 40 steps, which all tests share if they can."""
    return rollout.check_env(env, num_steps=num_steps)


def names(env, **options):
    return [issue.name for issue in check_env(env, **options)]


@pytest.mark.parametrize(("make", "expected", "message"), FOUND)
def test_mistakes_are_found_by_name_and_nothing_else(make, expected, message):
    issues = check_env(make(3))
    assert [issue.name for issue in issues] == expected.split()
    assert not issues or any(message in issue.message for issue in issues)


def test_steps_are_numbered_in_each_episode():
    """Like those of environments in JAX, and in later episodes, too."""

    class Late(Toy):
        num_resets = 0

        def reset(self, seeds, mask):
            self.num_resets += 1
            return super().reset(seeds, mask)

        def change(self, step):
            is_bad = (step.obs[:, 0] == 3) & (self.num_resets > 2)
            return step._replace(reward=np.where(is_bad, NAN, step.reward))

    message = dict(check_env(Late(3)))["fault"]
    assert "failed: ValueError: `reward` must be finite, got nan" in message
    assert message.endswith(", at step 3 of its episode")


def test_one_environment_has_no_others_to_depend_on():
    assert check_env(HostCount(1)) == ()


def test_numbers_that_are_not_finite_or_outside_are_found():
    for env in (
        scaled(obs=NAN)(3),
        scaled(reward=INF)(3),
        with_step(obs=lambda step: -step.obs - 1)(3),
    ):
        assert names(env) == ["fault"]
    issues = dict(check_env(gym(obs=np.full(2, 99.0, np.float32))(3)))
    assert "`obs[0]` must be in [-9, 9]" in issues["fault"]


def test_environments_with_one_state_for_all_are_found():
    wide = gymnasium.spaces.Box(-99.0, 99.0, (2,), np.float32)
    assert "shared" in names(gym(Shared, observation_space=wide)(3))


def test_window_without_an_ending_says_that_nothing_is_known_of_it():
    env = HostCount(3, min_length=10, max_length=20, limit=99)
    assert names(env, num_steps=8) == ["ending", "seed"]  # it counts, so far
    assert check_env(env) == ()


def test_actions_may_be_tuples():
    """Two parts, which are not an action and extras."""
    space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(n) for n in (3, 2)])
    env = envs.from_gymnasium(functools.partial(Sampled, space), 2)
    assert rollout.check_env(env, num_steps=20) == ()
