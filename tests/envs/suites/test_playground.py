"""What only MuJoCo Playground has."""

import plain_suites
import pytest

from rollout import envs
from rollout.envs.suites.playground import from_playground

suite = plain_suites.import_quietly("mujoco_playground")
wrapper = suite.wrapper
pytestmark = pytest.mark.usefixtures("rank_promotion")


def test_wrappers_of_training_are_refused_and_others_kept():
    overrides = {"impl": "jax"}
    suite_env = suite.registry.load("CartpoleBalance", config_overrides=overrides)
    for env in (
        wrapper.wrap_for_brax_training(suite_env),
        wrapper.BraxAutoResetWrapper(suite_env),
        wrapper.Wrapper(wrapper.brax_training.EpisodeWrapper(suite_env, 10, 1)),
    ):
        with pytest.raises(ValueError, match=r"`env` must be without .* got .*Wrapper"):
            from_playground(env)
    assert from_playground(wrapper.Wrapper(suite_env)).action_space.shape == (1,)


def test_warp_is_refused_and_is_not_the_default():
    with pytest.raises(ValueError, match=r"`env` must be made with .*'warp'"):
        envs.make("playground:PendulumSwingup", impl="warp")
    env = envs.make("playground:PendulumSwingup", sim_dt=0.005)
    assert env is envs.make("playground:PendulumSwingup", sim_dt=0.005)
    assert env.env.env.mjx_model.impl.value == "jax"
    assert env.env.env.sim_dt == 0.005


def test_episodes_end_as_the_configuration_says():
    for options, limit in (
        ({}, 1000),
        ({"episode_length": 7}, 7),
        ({"max_episode_steps": 9}, 9),
    ):
        env = envs.make("playground:PendulumSwingup", **options)
        assert (type(env), env.num_steps) == (envs.TimeLimit, limit)


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match=r"are action_repeat, .*; got gravity"):
        envs.make("playground:PendulumSwingup", gravity=1.0)
    with pytest.raises(ValueError, match="PendulumSwingup with sim_dt='short' fails"):
        envs.make("playground:PendulumSwingup", sim_dt="short")


def test_missing_download_is_reported(monkeypatch):
    def load(name, config_overrides):
        raise OSError("no network")

    monkeypatch.setattr(suite.registry, "load", load)
    with pytest.raises(ValueError, match="Go1Getup cannot be created here: no network"):
        envs.make("playground:Go1Getup")
