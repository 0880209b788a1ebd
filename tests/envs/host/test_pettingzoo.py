"""`from_pettingzoo`: structure, options, and environments that break the interface."""

import warnings

import gymnasium
import jax
import numpy as np
import pytest
from zoo_envs import Crowd, Duel

import rollout
from rollout import envs
from rollout.envs.host.types import EnvFault

ALL = np.ones(2, bool)
SEEDS = np.arange(2, dtype=np.uint32)


def take(env, num_steps=20):
    """Plays an environment with zeros; raises the cause of its first fault."""
    try:
        env.reset(SEEDS, ALL)
    except EnvFault as fault:
        raise next(iter(fault.causes.values())) from fault
    for _ in range(num_steps):
        sample = jax.eval_shape(env.action_space.sample, jax.random.key(0))
        action = jax.tree.map(lambda x: np.zeros((2, *x.shape), x.dtype), sample)
        result = env.step(action)
        for cause in result.causes.values():
            raise cause
        done = result.terminated | result.truncated
        if done.any():
            try:
                env.reset(SEEDS + 2, done)
            except EnvFault as fault:
                raise next(iter(fault.causes.values())) from fault


def test_observations_and_actions_are_stacked_by_group():
    env = envs.from_pettingzoo(Crowd, 2)
    assert env.agents == Crowd.possible_agents
    assert env.groups == {
        "red": ("red_0", "red_1", "red_2"),
        "blue": ("blue_0", "blue_1"),
    }
    obs = env.reset(SEEDS, ALL)
    shapes = jax.tree.map(np.shape, obs)
    blue = {"position": (2, 2, 4), "step": (2, 2)}
    assert shapes == {"red": (2, 3, 3), "blue": blue, "acting": (2, 5)}
    assert obs["blue"]["position"].dtype == np.float32
    vectorized = jax.eval_shape(env.observation_space.sample, jax.random.key(0))
    assert jax.tree.map(lambda x: (2, *x.shape), vectorized) == shapes
    assert isinstance(env.action_spaces["blue"], envs.Box)


def test_agents_that_do_not_act_have_valid_observations():
    env = envs.from_pettingzoo(Duel, 2)
    obs = env.reset(SEEDS, ALL)
    idle = ~obs["acting"]
    assert idle.sum() == 4
    assert (obs["agents"]["action_mask"][idle] == 1).all()
    assert (obs["agents"]["observation"][idle] == 1).all()


@pytest.mark.parametrize("make", [Crowd, Duel], ids=["parallel", "turns"])
def test_infos_are_observed_and_recorded(make):
    key = "hits" if make is Crowd else "turns"
    late = {"late": False} if make is Crowd else {}
    env = envs.from_pettingzoo(make, 2, record_info={key: 0}, **late)
    env.reset(SEEDS, ALL)
    action = jax.tree.map(
        lambda x: np.zeros((2, *x.shape), x.dtype),
        jax.eval_shape(env.action_space.sample, jax.random.key(0)),
    )
    info = env.step(action).info
    group = next(iter(env.groups))
    assert info.env[group][key].shape == (2, len(env.groups[group]))
    assert info.env[group][key].max() == 1
    if make is Duel:
        env = envs.from_pettingzoo(make, 2, observe_info={key: 0})
        obs = env.reset(SEEDS, ALL)
        assert set(obs["agents"]) == {"obs", "info"}
        assert obs["agents"]["info"][key].shape == (2, 3)


def test_given_groups_are_used():
    groups = {"north": ["north"], "others": ["south", "east"]}
    env = envs.from_pettingzoo(Duel, 2, groups=groups)
    assert env.groups == {"north": ("north",), "others": ("south", "east")}
    obs = env.reset(SEEDS, ALL)
    assert obs["others"]["observation"].shape == (2, 2, 2)
    take(env)


def test_frames_are_rendered():
    env = envs.from_pettingzoo(Crowd, 2)
    env.reset(SEEDS, ALL)
    assert env.draw(0).shape == (8, 8, 3)


@pytest.mark.parametrize("make", [Crowd, Duel], ids=["parallel", "turns"])
def test_check_env_finds_no_mistake(make):
    assert rollout.check_env(envs.from_pettingzoo(make, 2), num_steps=60) == ()


def change(base, **methods):
    """Returns a subclass with methods `(self, result, *args)` of other results."""
    name = "Changed"
    namespace = {}
    for method, fn in methods.items():

        def changed(self, *args, method=method, fn=fn, **options):
            result = getattr(base, method)(self, *args, **options)
            return fn(self, result)

        namespace[method] = changed
    return type(name, (base,), namespace)


def edit(index, agent=None, value=None, **options):
    """Returns a function that changes entry `agent` of a result of `step`."""

    def fn(self, result):
        values = dict(result[index])
        for x in [agent] if agent else list(values):
            if "drop" in options:
                values.pop(x, None)
            elif x in values:
                values[x] = value
        return (*result[:index], values, *result[index + 1 :])

    return fn


def set_agents(change_fn):
    def fn(self, result):
        self.agents = change_fn(self)
        return result

    return fn


def keep_all(self):
    return list(self.possible_agents)


class Stubborn(Duel):
    """An ended agent stays in `agents` after its dead step."""

    def step(self, action):
        agent = self.agent_selection
        if not self.terminations[agent] and not self.truncations[agent]:
            super().step(action)


class Unaccounted(Duel):
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        del self._cumulative_rewards


def together():
    return {"late": False}


def set_value(name, value):
    def fn(self, result):
        vars(self)[name] = dict.fromkeys(self.agents, value)
        return result

    return fn


def set_selection(self, result):
    self.agent_selection = "west"
    return result


RED = "red_0"
BROKEN = {  # environment: words of the message
    "no_observation": (change(Crowd, step=edit(0, RED, drop=1)), ["observations", RED]),
    "no_reward": (change(Crowd, step=edit(1, RED, drop=1)), ["rewards", RED]),
    "no_termination": (change(Crowd, step=edit(2, drop=1)), ["terminations", "red_"]),
    "no_truncation": (change(Crowd, step=edit(3, drop=1)), ["truncations", "red_"]),
    "flag": (change(Crowd, step=edit(2, RED, 1.0)), ["terminations", RED, "1.0"]),
    "reward": (change(Crowd, step=edit(1, RED, None)), ["rewards", RED, "None"]),
    "nan": (change(Crowd, step=edit(1, RED, np.nan)), ["rewards", RED, "nan"]),
    "vector_reward": (change(Crowd, step=edit(1, RED, np.ones(2))), ["rewards", RED]),
    "shape": (change(Crowd, step=edit(0, RED, np.zeros(4))), [RED, "(3,)", "(4,)"]),
    "dtype": (change(Crowd, step=edit(0, RED, np.zeros(3, complex))), [RED, "complex"]),
    "four_results": (change(Crowd, step=lambda _, x: x[:4]), ["truncations", "infos"]),
    "list": (
        change(Crowd, step=lambda _, x: (*x[:1], [], *x[2:])),
        ["rewards", "dict"],
    ),
    "reset": (change(Crowd, reset=lambda _, x: x[0]), ["(observations, infos)"]),
    "no_agent": (change(Crowd, reset=set_agents(lambda _: [])), ["must not be empty"]),
    "unknown": (
        change(Crowd, step=set_agents(lambda x: [*x.agents, "green_0"])),
        ["possible_agents", "green_0"],
    ),
    "unknown_reward": (
        change(Crowd, step=lambda _, x: (x[0], x[1] | {"green_0": 0.0}, *x[2:])),
        ["rewards", "green_0"],
    ),
    "unknown_flag": (
        change(Crowd, step=lambda _, x: (*x[:2], x[2] | {"__all__": True}, *x[3:])),
        ["terminations", "__all__"],
    ),
    "unknown_start": (
        change(Crowd, reset=lambda _, x: (x[0] | {"green_0": None}, x[1])),
        ["observations", "green_0"],
    ),
    "leaves": (
        change(Crowd, step=set_agents(lambda x: x.agents[:1])),
        ["must not leave", "_"],
    ),
    "returns": (change(Crowd, step=set_agents(keep_all)), ["after its end", "_"]),
    "stubborn": (Stubborn, ["must leave `agents`", "None"]),
    "totals": (Unaccounted, ["_cumulative_rewards"]),
    "selection": (change(Duel, step=set_selection), ["agent_selection", "west"]),
    "turn_flag": (
        change(Duel, step=set_value("terminations", 1)),
        ["terminations", "bool", "1"],
    ),
    "turn_reward": (
        change(Duel, step=set_value("_cumulative_rewards", np.inf)),
        ["rewards", "inf"],
    ),
    "turn_obs": (
        change(Duel, last=lambda _, x: (None, *x[1:])),
        ["observation of", "action_mask"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_fault_names_agent_and_entry(name):
    base, words = BROKEN[name]
    options = {"late": False} if issubclass(base, Crowd) else {}
    errors = ValueError, TypeError, KeyError, AttributeError
    with pytest.raises(errors) as error:
        take(envs.from_pettingzoo(base, 2, **options))
    for word in words:
        assert word in str(error.value), error.value


def test_space_must_not_change():
    class Growing(Crowd):
        def reset(self, seed=None, options=None):
            self.resets = vars(self).get("resets", 0) + 1
            return super().reset(seed=seed)

        def action_space(self, agent):
            if vars(self).get("resets", 0) > 1 and agent == RED:
                return gymnasium.spaces.Discrete(4)
            return super().action_space(agent)

    with pytest.raises(ValueError, match=r"red_0.*must not change"):
        take(envs.from_pettingzoo(Growing, 2), 40)


def test_agents_that_start_later_need_an_option():
    class Sometimes(Crowd):
        def reset(self, seed=None, options=None):
            self.late = seed != 0
            return super().reset(seed=seed)

    with pytest.raises(ValueError, match="simultaneous=False"):
        take(envs.from_pettingzoo(Sometimes, 2))
    take(envs.from_pettingzoo(Sometimes, 2, simultaneous=False))


REFUSED = {
    "gymnasium": (lambda: gymnasium.make("CartPole-v1"), {}, "possible_agents"),
    "groups": (Duel, {"groups": {"all": ["north", "east"]}}, "env.groups"),
    "str": (Duel, {"groups": {"north": "red", "east": "red"}}, "a list of agents"),
    "unequal": (Crowd, {"groups": {"all": Crowd.possible_agents}}, "equal spaces"),
    "turns": (Duel, {"simultaneous": True}, "AECEnv"),
    "workers": (Duel, {"num_workers": 3}, "num_workers"),
    "instance": (Crowd(), {}, "`make`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_raise(name):
    make, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        envs.from_pettingzoo(make, 2, **options)


def test_exception_in_a_worker_names_the_environment():
    env = envs.from_pettingzoo(
        change(Crowd, step=edit(1, RED, drop=1)), 2, num_workers=2, late=False
    )
    env.reset(SEEDS, ALL)
    sample = jax.eval_shape(env.action_space.sample, jax.random.key(0))
    action = jax.tree.map(lambda x: np.zeros((2, *x.shape), x.dtype), sample)
    result = env.step(action)
    env.close()
    assert result.faulty.all()
    assert "red_0" in str(EnvFault(result.causes))


@pytest.mark.parametrize("adapt", [rollout.check_env, envs.from_gymnasium])
def test_other_adapters_name_from_pettingzoo(adapt):
    with pytest.raises(ValueError, match="from_pettingzoo"):
        adapt(Crowd())


def test_environments_of_these_tests_have_the_interface_of_pettingzoo():
    pettingzoo = pytest.importorskip("pettingzoo")
    with warnings.catch_warnings(action="ignore"):  # imports of its own tests
        api = pytest.importorskip("pettingzoo.test")

    class ParallelCrowd(Crowd, pettingzoo.ParallelEnv):
        metadata = {"name": "crowd"}  # noqa: RUF012

    class TurnDuel(Duel, pettingzoo.AECEnv):
        metadata = {"name": "duel"}  # noqa: RUF012

    with warnings.catch_warnings(action="ignore"):  # agents that join later
        api.parallel_api_test(ParallelCrowd(), num_cycles=50)
        api.api_test(TurnDuel(), num_cycles=50)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("mpe2.simple_spread_v3", "parallel_env"),
        ("mpe2.simple_adversary_v3", "parallel_env"),
        ("mpe2.simple_tag_v3", "env"),
        ("pettingzoo.classic.tictactoe_v3", "env"),
        ("pettingzoo.classic.connect_four_v3", "env"),
    ],
)
def test_check_env_finds_no_mistake_in_pettingzoo(module, function):
    with warnings.catch_warnings(action="ignore"):
        module = pytest.importorskip(module)
        env = envs.from_pettingzoo(vars(module)[function], 2)
        # A board game does not depend on its seed, and some episodes take longer.
        issues = rollout.check_env(env, num_steps=60)
    assert {x.name for x in issues} <= {"seed", "ending"}
