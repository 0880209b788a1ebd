"""Environments by name, and the contract each of them keeps."""

import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollout
from rollout import envs

IDS = envs.env_ids()
NEEDS_DOWNLOAD = "MNISTBandit-bsuite"
QUICK = ("DiscountingChain-bsuite", NEEDS_DOWNLOAD)


# What gymnax itself declares of observations, and does not keep.
MISTAKEN = {
    *("Catch-bsuite", "FourRooms-misc"),  # the dtype
    *("GaussianBandit-misc", "MemoryChain-bsuite", "MetaMaze-misc"),  # the bounds
}


@pytest.mark.parametrize(
    "env_id",
    [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in IDS],
)
def test_probe_finds_only_the_mistakes_of_gymnax(env_id, rank_promotion, quick_compile):
    """With `rank_promotion`: Swimmer itself does so."""
    if env_id == NEEDS_DOWNLOAD:
        with pytest.raises(ValueError, match="must download its data set when it is"):
            envs.make(env_id)
        return
    issues = rollout.check_env(envs.make(env_id, max_episode_steps=20), num_steps=100)
    wanted = ["obs"] * (env_id in MISTAKEN)
    wanted += ["ending"] * (env_id == "DeepSea-bsuite")  # its limit terminates
    assert [x.name for x in issues] == wanted, issues


def test_parameters_and_constructor_arguments_are_both_overridden_by_name():
    env = envs.make("Breakout-MinAtar", max_steps_in_episode=7)
    assert env.env_params.max_steps_in_episode == 7
    assert env.action_space == envs.Discrete(3)
    full = envs.make("Breakout-MinAtar", use_minimal_action_set=False)
    assert full.action_space == envs.Discrete(6)


def test_parameters_are_leaves_of_the_environment():
    env = envs.make("CartPole-v1")
    leaves, structure = jax.tree.flatten(env)
    assert 9.8 in leaves
    assert jax.tree.structure(envs.make("CartPole-v1", gravity=1.0)) == structure

    def fall(gravity):
        env = envs.make("CartPole-v1", gravity=gravity)
        state, _ = env.reset(jax.random.key(0))
        return env.step(jax.random.key(1), state, jnp.int32(1)).state.theta_dot

    speeds = np.asarray(jax.jit(jax.vmap(fall))(np.float32([0.0, 50.0])))
    assert speeds[0] != speeds[1]


def test_environments_of_suites_by_id():
    seat = envs.make("pgx:tic_tac_toe", opponent=None)
    assert seat.action_space == envs.Discrete(9)
    assert envs.make("pgx:tic_tac_toe", opponent=None) is seat  # so it is one program
    assert envs.make("gymnax:CartPole-v1") == envs.make("CartPole-v1")
    game = envs.make("pgx:tic_tac_toe")
    assert game.agents == ("player_0", "player_1")


@pytest.mark.compiles(100)  # what suites compile when they are imported: all, 82
def test_ids_of_a_suite_are_those_that_can_be_made():
    assert len(IDS) >= 24
    assert {"CartPole-v1", "Pendulum-v1", "Breakout-MinAtar", "Pong-misc"} <= set(IDS)
    ids = envs.env_ids("pgx")
    assert "pgx:tic_tac_toe" in ids
    installed = envs.env_ids("installed")
    assert installed[: len(IDS)] == IDS
    assert set(ids) <= set(installed)


def test_suite_that_is_not_installed_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxmarl", None)
    with pytest.raises(ValueError, match=r'pip install "\.\[jaxmarl\]"'):
        envs.make("jaxmarl:coin_game")
    assert not any(x.startswith("jaxmarl:") for x in envs.env_ids("installed"))


def test_import_of_a_suite_prints_nothing_and_leaves_the_streams(
    tmp_path, monkeypatch, capfd
):
    """As JaxMARL does it."""
    code = "import sys; sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__; "
    code += "print('here I am'); registered_envs = ['there']"
    (tmp_path / "jaxmarl.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jaxmarl", raising=False)
    streams = sys.stdout, sys.stderr, sys.__stdout__
    assert envs.env_ids("jaxmarl") == ("jaxmarl:there",)
    monkeypatch.delitem(sys.modules, "jaxmarl")
    assert (sys.stdout, sys.stderr, sys.__stdout__) == streams
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("env_id", ["CartPole-v1", "pgx:tic_tac_toe"])
def test_longest_episode_is_an_argument_for_every_suite(env_id):
    made = envs.make_vec(env_id, 2, max_episode_steps=3)
    want = envs.vectorize(envs.TimeLimit(envs.make(env_id), 3), 2)
    assert jax.tree.structure(made) == jax.tree.structure(want)  # one program
    chex.assert_trees_all_equal(made, want)
    game = envs.make("pgx:tic_tac_toe", max_episode_steps=3)
    assert (type(game), game.num_steps) == (envs.TimeLimit, 3)
