"""Tests of the errors for wrong names of functions, classes, fields and arguments."""

import copy
import pickle
import pkgutil

import jax
import numpy as np
import pytest

import rollout
from rollout import envs
from rollout.base import names
from rollout.recipes.ppo import PPO, Config


@pytest.fixture(scope="module")
def objects():
    """Objects of each class with hints, without any compilation."""
    agent = PPO(envs.make_vec("CartPole-v1", num_envs=2))
    state = jax.eval_shape(agent.init, jax.random.key(0))
    row = agent.collector.row_shape(state.params)
    return {
        "agent": agent,
        "collector": agent.collector,
        "state": state,
        "stats": rollout.stats.CollectStats.init(state.carry.episode),
        "trajectory": jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), row),
        "rollout": rollout,
    }


@pytest.mark.parametrize(
    ("module", "name", "right_name"),
    [
        (rollout, "PPO", "rollout.recipes.ppo.PPO"),
        (rollout, "Config", "rollout.recipes.ppo.Config"),
        (rollout, "collect", "rollout.Collector.collect_steps"),
        (rollout, "train", "rollout.recipes.run"),
        (rollout, "evaluate_policy", "rollout.evaluate"),
        (rollout, "compute_gae", "rollout.gae"),
        (rollout, "ReplayBuffer", "rollout.buffers.ReplayBuffer"),
        (rollout, "Environment", "rollout.envs.types.Env"),
        # Names that another package defines.
        (rollout, "make", "rollout.envs.make"),
        (rollout, "wrappers", "rollout.envs.wrappers"),
        (rollout, "AgentStats", "rollout.agents.AgentStats"),
        (envs, "from_brax", "rollout.envs.suites.from_brax"),
        # Misspelled names.
        (rollout, "summarise", "rollout.summarize"),
        (envs, "vectorise", "rollout.envs.vectorize"),
        (rollout.buffers, "RolloutBuffer", "rollout.Collector.collect_steps"),
        (rollout.recipes, "SAC", "rollout.recipes.sac.SAC"),
    ],
)
def test_missing_name_of_a_package_names_the_right_one(module, name, right_name):
    with pytest.raises(AttributeError) as error:
        getattr(module, name)
    assert str(error.value) == (
        f"module {module.__name__!r} has no attribute {name!r}. "
        f"Did you mean `{right_name}`?"
    )


@pytest.mark.parametrize("name", ["jax", "nonsense", "__wrapped__", "_collect"])
def test_unknown_name_of_a_package_has_no_hint(name):
    with pytest.raises(AttributeError) as error:
        getattr(rollout, name)
    assert str(error.value) == f"module 'rollout' has no attribute {name!r}"


def test_every_suggested_name_of_a_package_exists():
    for path, aliases in names.NAMES.items():
        home, _, name = path.rpartition(".")
        assert callable(getattr(pkgutil.resolve_name(home), name)), path
        assert not [x for x in aliases if hasattr(rollout, x)], path
    aliases = [x for group in names.NAMES.values() for x in group]
    assert len(aliases) == len(set(aliases)) > 60


@pytest.mark.parametrize(
    ("label", "name", "right_name"),
    [
        ("stats", "return_mean", "stats.returns.mean"),
        ("stats", "episode_length", "stats.lengths.mean"),
        ("trajectory", "observation", "trajectory.obs"),
        ("trajectory", "log_prob", 'trajectory.extras["log_prob"]'),
        ("collector", "collect", "collector.collect_steps"),
        ("agent", "save", "rollout.checkpoint.save(path, state)"),
        ("agent", "get_action", "agent.predict"),
        ("agent", "value", "agent.collector.value(carry, params)"),
    ],
)
def test_missing_attribute_names_the_right_one(objects, label, name, right_name):
    with pytest.raises(AttributeError) as error:
        getattr(objects[label], name)
    name_of_class = type(objects[label]).__name__
    assert str(error.value) == (
        f"{name_of_class!r} object has no attribute {name!r}. "
        f"Did you mean `{right_name}`?"
    )


def test_every_suggested_attribute_exists(objects):
    labels = {"Agent": "agent", "CollectStats": "stats", "Transition": "trajectory"}
    for name, members in names.MEMBERS.items():
        for right_name, aliases in members.items():
            path = right_name.partition("(")[0]
            assert eval(path, dict(objects)) is not None, path
            value = objects[labels.get(name, "collector")]
            assert not [x for x in aliases if hasattr(value, x)]


class Named(names.Hints):
    """An object whose property raises."""

    @property
    def broken(self):
        return self.inner

    @property
    def inner(self):
        raise AttributeError("the error of the user")


def test_hints_keep_the_error_of_a_property():
    with pytest.raises(AttributeError, match=r"^the error of the user$"):
        _ = Named().broken
    with pytest.raises(AttributeError, match=r"^'Named' object has no attribute 'x'$"):
        _ = Named().x


def test_hints_do_not_change_copies(objects):
    stats = objects["stats"]
    for other in (copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        assert other.num_episodes == stats.num_episodes
    assert not hasattr(stats, "return_mean")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("num_envs", "`rollout.envs.make_vec(id, num_envs=...)`"),
        ("seed", "`agent.init(jax.random.key(seed))`"),
        ("episode_length", "`rollout.envs.make_vec(id, num_envs, max_episode_steps="),
    ],
)
def test_argument_in_a_config_names_the_function(name, words):
    with pytest.raises(TypeError) as error:
        Config(**{name: 1})
    assert f"`{name}` must be a field of `Config`" in str(error.value)
    assert words in str(error.value)


def test_call_with_a_key_or_a_state_names_the_right_argument(objects):
    agent, state = objects["agent"], objects["state"]
    with pytest.raises(ValueError, match=r"jax.random.split\(key, num_envs\)"):
        agent.env.reset(jax.random.key(0))
    with pytest.raises(ValueError, match=r"TrainState. Pass `state.params`"):
        agent.predict(state, np.zeros(4))
    with pytest.raises(ValueError, match=r"Write `PPO\(env, Config\(...\)\)`"):
        PPO("MlpPolicy", "CartPole-v1")
