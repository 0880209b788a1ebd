"""Tests of `check_env` with environments that make one mistake."""

import inspect

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import ChanceEnv, OneAgent
from cases import CountEnv
from flax import struct
from host_count import HostCount

import rollout
from rollout import envs


@struct.dataclass
class Toy:
    """Counts from a random number. Subclasses replace one method."""

    observation_space = envs.Box(0.0, 20.0, (2,))
    action_space = envs.Discrete(3)

    def reset(self, key):
        count = jax.random.randint(key, (), 0, 5)
        return self.begin({"count": count, "sum": jnp.zeros((), jnp.int32)})

    def begin(self, state):
        return state, self.see(state)

    def step(self, key, state, action):
        state = {"count": state["count"] + 1, "sum": state["sum"] + action}
        return self.change(
            envs.EnvStep(
                state=state,
                obs=self.see(state),
                reward=1.0,
                terminated=state["count"] >= 9,
                truncated=False,
                info={},
            )
        )

    def see(self, state):
        return jnp.full((2,), state["count"], jnp.float32)

    def change(self, step):
        return step


def with_obs(fn):
    return {"see": lambda self, state: fn(Toy.see(self, state))}


def with_step(**fields):
    def change(self, step):
        return step.replace(**{name: fn(step) for name, fn in fields.items()})

    return {"change": change}


class WrongContains(envs.spaces.Space):
    """A space whose samples are not elements of the space."""

    shape, dtype = (), np.dtype(np.int32)

    def sample(self, key):
        return jnp.int32(3)

    def contains(self, x):
        return x < 3


def reuse_key(self, key):
    return self.begin(
        {"count": jax.random.randint(key, (), 0, 5) + 0, "sum": sample_sum(key)}
    )


def sample_sum(key):
    return jax.random.randint(key, (), 0, 2)


def reset_with_constant_key(self, key):
    return Toy.reset(self, jax.random.key(0))


def reset_with_numpy(self, key):
    count = jnp.int32(np.random.randint(1 << 30))
    return Toy.begin(self, {"count": count, "sum": sample_sum(key)})


def branch(self, step):
    if step.reward > step.state["count"]:
        return step.replace(reward=0.0)
    return step


MISTAKES = {
    "shape of observations": (
        with_obs(lambda obs: obs[:1]),
        "obs",
        "float32 of shape (2,), got float32 of shape (1,)",
    ),
    "bounds of observations": (
        with_obs(lambda obs: obs - 4),
        "obs",
        "must be in [0, 20], got -",
    ),
    "space of actions": (
        {"action_space": WrongContains()},
        "action_space",
        "`contains` must be True for every sample of `sample`",
    ),
    "weak types": (
        {"begin": lambda self, state: Toy.begin(self, {**state, "sum": 0})},
        "weak_type",
        "`state['sum']` must not be weakly typed",
    ),
    "dtype of the state": (
        with_step(state=lambda step: {**step.state, "sum": step.obs[0]}),
        "contract",
        "int32 of shape (8,) at ['sum'], got float32 of shape (8,)",
    ),
    "constant key": (
        {"reset": reset_with_constant_key},
        "key",
        "`reset` samples from a key that it creates",
    ),
    "NumPy generator": (
        {"reset": reset_with_numpy},
        "key",
        "`reset` differs between two traces",
    ),
    "key reuse": ({"reset": reuse_key}, "key", "`reset` uses a key twice"),
    "ending without a flag": (
        with_step(terminated=lambda step: False, obs=lambda step: step.obs % 9),
        "ending",
        "no episode ended in 40 steps",
    ),
    "limit that terminates": (
        with_step(
            terminated=lambda step: step.state["count"] >= 9,
            truncated=lambda step: step.state["count"] >= 9,
        ),
        "ending",
        "truncations is also a termination",
    ),
    "limit without truncation": (
        {
            "reset": lambda self, key: Toy.begin(
                self, {"count": jnp.int32(0), "sum": sample_sum(key)}
            ),
            **with_step(terminated=lambda step: step.state["count"] >= 9),
        },
        "ending",
        "episodes terminates at step 9, which is correct only if",
    ),
    "Gymnasium step": (
        {"change": lambda self, step: (step.obs, 1.0, False, False, {})},
        "contract",
        "return a `rollout.envs.EnvStep`",
    ),
    "Python's `if` on an array": (
        {"change": branch},
        "raises",
        f"{__file__}:{inspect.getsourcelines(branch)[1] + 1}: `if step.reward > step.",
    ),
}


SECONDARY = {"NumPy generator": ("obs",), "space of actions": ("action",)}
SLOW = (
    "bounds of observations",
    "ending without a flag",
    "limit that terminates",
)


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in MISTAKES],
)
@pytest.mark.usefixtures("quick_compile")
def test_mistake_is_the_only_issue(mistake):
    change, name, message = MISTAKES[mistake]
    env = struct.dataclass(type("Broken", (Toy,), change))()
    issues = rollout.check_env(env, num_steps=40)
    assert [x.name for x in issues] == [name, *SECONDARY.get(mistake, ())], issues
    assert message in issues[0].message


def test_several_mistakes_are_reported():
    class Masked(Toy):
        """An environment with an integer mask and four mistakes."""

        observation_space = envs.spaces.Dict(
            {
                "x": envs.Box(0.0, 1.0, (1,)),
                "action_mask": envs.Box(0, 1, (4,), np.int8),
            }
        )
        action_space = envs.Discrete(4)

        def reset(self, key):
            return jnp.int32(0), self.observe(np.random.random())

        def step(self, key, state, action):
            obs = self.observe(5.0)
            return envs.EnvStep(state=state, obs=obs, reward=0.0, terminated=False)

        def observe(self, x):
            return {"x": jnp.full(1, x), "action_mask": jnp.ones(4, jnp.int8)}

    issues = rollout.check_env(struct.dataclass(Masked)(), num_steps=40)
    assert [x.name for x in issues] == ["weak_type", "key", "obs", "ending"], issues


class Shapeless(Toy):
    def change(self, step):
        return step.replace(reward=jnp.zeros(2))


def test_agent_reward_shape_is_checked():
    """The reward of the environment has no axis of agents."""
    (issue,) = rollout.check_env(OneAgent(struct.dataclass(Shapeless)()))
    assert issue.name == "contract"
    assert "`reward` must be one value per agent, shape (1,)" in issue.message


class TurnBasedEnv(ChanceEnv):
    """A turn-based environment that sets `simultaneous`."""

    simultaneous = True

    def choose(self, word):
        return jnp.arange(3) == word % 3


@pytest.mark.usefixtures("quick_compile")
def test_simultaneous_flag_is_checked():
    env = jax.tree_util.register_static(TurnBasedEnv)()
    messages = {x.name: x.message for x in rollout.check_env(env)}
    assert "before step 1: leave it out" in messages["contract"]


@struct.dataclass
class TwoParts(Toy):
    """An environment whose action is a tuple of two parts."""

    action_space = envs.spaces.as_space(
        gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(n) for n in (3, 2)])
    )

    def step(self, key, state, action):
        return super().step(key, state, action[0] + action[1])


@pytest.mark.parametrize(
    "env",
    [
        envs.TimeLimit(CountEnv(), 3),
        TwoParts(),
        pytest.param(OneAgent(Toy()), marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("quick_compile")
def test_valid_environment_has_no_issues(env):
    assert rollout.check_env(env, num_steps=60) == ()


@struct.dataclass
class NanEnv(Toy):
    """Observes NaN after the third step of an episode."""

    def reset(self, key):
        return self.begin({"count": jnp.int32(0), "sum": jnp.int32(0)})

    def see(self, state):
        return jnp.where(state["count"] == 3, jnp.nan, Toy.see(self, state))


@pytest.mark.usefixtures("quick_compile")
def test_issue_names_the_step_of_the_episode():
    (issue,) = rollout.check_env(NanEnv(), num_steps=60)
    message = "`obs[0]` must be finite, got nan, at step 3 of an episode"
    assert str(issue) == f"obs: {message}"


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("is_host", [False, True])
@pytest.mark.parametrize("name", ["action", "extras", "reward", ""])
def test_policy_of_a_collector_is_checked(name, is_host):
    def act(params, obs, key):
        number = jnp.where(name == "action", 3, 0)
        log_prob = jnp.where(name == "extras", jnp.nan, 0.0)
        size = obs.shape[0]
        return jnp.full(size, number), {"log_prob": jnp.full(size, log_prob)}

    policy = rollout.stateless_policy(act)
    if is_host:
        env = HostCount(3)
        collector = rollout.HostCollector(env=env, policy=policy)
    else:
        env = Toy() if name != "reward" else struct.dataclass(NanRewardEnv)()
        collector = rollout.Collector(env=envs.vectorize(env, 3), policy=policy)
    issues = rollout.check_env(collector, None, jax.random.key(0), num_steps=30)
    if name == "action" and is_host:  # raises before the first step
        assert "must return actions of Discrete" in issues[0].message
    elif name == "reward" and is_host:
        assert issues == ()
    else:
        assert [x.name for x in issues] == ([name] if name else [])


class NanRewardEnv(Toy):
    def change(self, step):
        return step.replace(reward=jnp.nan)
