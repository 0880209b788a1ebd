"""`check_env` against environments in JAX that each make one mistake."""

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
    """Counts from a random number on, to be broken in one place."""

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


def seeing(fn):
    return {"see": lambda self, state: fn(Toy.see(self, state))}


def with_step(**fields):
    def change(self, step):
        return step.replace(**{name: fn(step) for name, fn in fields.items()})

    return {"change": change}


class Escaping(envs.spaces.Space):
    """Draws what it does not contain."""

    shape, dtype = (), np.dtype(np.int32)

    def sample(self, key):
        return jnp.int32(3)

    def contains(self, x):
        return x < 3


def draw_twice(self, key):
    return self.begin(
        {"count": jax.random.randint(key, (), 0, 5) + 0, "sum": more(key)}
    )


def more(key):
    return jax.random.randint(key, (), 0, 2)


def reset_by_own_key(self, key):
    return Toy.reset(self, jax.random.key(0))


def reset_by_numpy(self, key):
    count = jnp.int32(np.random.randint(1 << 30))  # never the same twice
    return Toy.begin(self, {"count": count, "sum": more(key)})


def branch(self, step):
    if step.reward > step.state["count"]:
        return step.replace(reward=0.0)
    return step


MISTAKES = {
    "shape of observations": (
        seeing(lambda obs: obs[:1]),
        "obs",
        "float32 of shape (2,), got float32 of shape (1,)",
    ),
    "bounds of observations": (
        seeing(lambda obs: obs - 4),
        "obs",
        "must be in [0, 20], got -",
    ),
    "space of actions": (
        {"action_space": Escaping()},
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
    "a key of its own": (
        {"reset": reset_by_own_key},
        "key",
        "`reset` samples from a key that it creates",
    ),
    "a generator of NumPy": (
        {"reset": reset_by_numpy},
        "key",
        "`reset` differs between two traces",
    ),
    "a key used twice": ({"reset": draw_twice}, "key", "`reset` uses a key twice"),
    "an ending without a flag": (
        with_step(terminated=lambda step: False, obs=lambda step: step.obs % 9),
        "ending",
        "no episode ended in 40 steps",
    ),
    "limits that terminate, too": (
        with_step(
            terminated=lambda step: step.state["count"] >= 9,
            truncated=lambda step: step.state["count"] >= 9,
        ),
        "ending",
        "truncations is also a termination",
    ),
    "a step of Gymnasium's kind": (
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


# What else such an environment does.
FURTHER = {"a generator of NumPy": ("obs",), "space of actions": ("action",)}
PLAYED = (
    "bounds of observations",
    "an ending without a flag",
    "limits that terminate, too",
)


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(x, marks=pytest.mark.slow) if x in PLAYED else x for x in MISTAKES],
)
@pytest.mark.usefixtures("quick_compile")
def test_mistake_is_found_and_nothing_else(mistake):
    change, name, message = MISTAKES[mistake]
    env = struct.dataclass(type("Broken", (Toy,), change))()
    issues = rollout.check_env(env, num_steps=40)
    assert [x.name for x in issues] == [name, *FURTHER.get(mistake, ())], issues
    assert message in issues[0].message


def test_issues_do_not_hide_others():
    class Masked(Toy):
        """Observes a mask of integers, and has four faults."""

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


def test_mistake_in_an_environment_of_several_agents_is_found():
    """It has one, whose reward has no axis of agents."""
    (issue,) = rollout.check_env(OneAgent(struct.dataclass(Shapeless)()))
    assert issue.name == "contract"
    assert "`reward` must be one value per agent, shape (1,)" in issue.message


class InTurns(ChanceEnv):
    """Says that all act."""

    simultaneous = True

    def choose(self, word):
        return jnp.arange(3) == word % 3


@pytest.mark.usefixtures("quick_compile")
def test_agents_that_take_turns_and_say_otherwise_are_found():
    env = jax.tree_util.register_static(InTurns)()
    messages = {x.name: x.message for x in rollout.check_env(env)}
    assert "before step 1: leave it out" in messages["contract"]


@struct.dataclass
class TwoParts(Toy):
    """The action is a tuple of two parts, which are not an action and extras."""

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
def test_nothing_is_found_where_all_is_well(env):
    assert rollout.check_env(env, num_steps=60) == ()


@struct.dataclass
class Late(Toy):
    """Has a NaN as the observation after the third step of an episode."""

    def reset(self, key):
        return self.begin({"count": jnp.int32(0), "sum": jnp.int32(0)})

    def see(self, state):
        return jnp.where(state["count"] == 3, jnp.nan, Toy.see(self, state))


@pytest.mark.usefixtures("quick_compile")
def test_step_of_a_finding_is_that_of_the_episode():
    (issue,) = rollout.check_env(Late(), num_steps=60)
    what = "`obs[0]` must be finite, got nan, at step 3 of an episode"
    assert str(issue) == f"obs: {what}"


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("is_host", [False, True])
@pytest.mark.parametrize("name", ["action", "extras", "reward", ""])
def test_policy_of_a_collector_is_probed(name, is_host):
    def act(params, obs, key):
        number = jnp.where(name == "action", 3, 0)
        extra = jnp.where(name == "extras", jnp.nan, 0.0)
        size = obs.shape[0]
        return jnp.full(size, number), {"log_prob": jnp.full(size, extra)}

    policy = rollout.stateless_policy(act)
    if is_host:
        env = HostCount(3)
        collector = rollout.HostCollector(env=env, policy=policy)
    else:
        env = Toy() if name != "reward" else struct.dataclass(Rewarding)()
        collector = rollout.Collector(env=envs.vectorize(env, 3), policy=policy)
    found = rollout.check_env(collector, None, jax.random.key(0), num_steps=30)
    if name == "action" and is_host:  # which is refused before it is played
        assert "must return actions of Discrete" in found[0].message
    elif name == "reward" and is_host:
        assert found == ()
    else:
        assert [x.name for x in found] == ([name] if name else [])


class Rewarding(Toy):
    def change(self, step):
        return step.replace(reward=jnp.nan)
