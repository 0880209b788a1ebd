"""Environments by id, and the contract of all gymnax environments."""

import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollout
from rollout import envs
from rollout.envs import registry

IDS = envs.env_ids()
NEEDS_DOWNLOAD = "MNISTBandit-bsuite"
QUICK = ("DiscountingChain-bsuite", NEEDS_DOWNLOAD)


# Environments of gymnax whose observations are outside of their space.
KNOWN_ISSUES = {
    *("Catch-bsuite", "FourRooms-misc"),  # the dtype
    *("GaussianBandit-misc", "MemoryChain-bsuite", "MetaMaze-misc"),  # the bounds
}


@pytest.mark.parametrize(
    "env_id",
    [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in IDS],
)
def test_check_env_reports_known_issues_only(env_id, rank_promotion, quick_compile):
    """Allows rank promotion, which Swimmer uses."""
    if env_id == NEEDS_DOWNLOAD:
        with pytest.raises(ValueError, match="download"):
            envs.make(env_id)
        return
    issues = rollout.check_env(envs.make(env_id, max_episode_steps=20), num_steps=100)
    want = ["obs"] * (env_id in KNOWN_ISSUES)
    # The time limit of DeepSea terminates, and all chains have one length.
    want += ["ending"] * (env_id in ("DeepSea-bsuite", "UmbrellaChain-bsuite"))
    assert [x.name for x in issues] == want, issues


def test_make_overrides_params_and_constructor_arguments():
    env = envs.make("Breakout-MinAtar", max_steps_in_episode=7)
    assert env.env_params.max_steps_in_episode == 7
    assert env.action_space == envs.Discrete(3)
    full_env = envs.make("Breakout-MinAtar", use_minimal_action_set=False)
    assert full_env.action_space == envs.Discrete(6)


def test_params_are_leaves_of_the_environment():
    env = envs.make("CartPole-v1")
    leaves, structure = jax.tree.flatten(env)
    assert 9.8 in leaves
    assert jax.tree.structure(envs.make("CartPole-v1", gravity=1.0)) == structure

    def step_once(gravity):
        env = envs.make("CartPole-v1", gravity=gravity)
        state, _ = env.reset(jax.random.key(0))
        return env.step(jax.random.key(1), state, jnp.int32(1)).state.theta_dot

    speeds = np.asarray(jax.jit(jax.vmap(step_once))(np.float32([0.0, 50.0])))
    assert speeds[0] != speeds[1]


def test_make_accepts_suite_ids():
    seat = envs.make("pgx:tic_tac_toe", opponent=None)
    assert seat.action_space == envs.Discrete(9)
    assert envs.make("pgx:tic_tac_toe", opponent=None) is seat  # a cached object
    assert envs.make("gymnax:CartPole-v1") == envs.make("CartPole-v1")
    game = envs.make("pgx:tic_tac_toe")
    assert game.agents == ("player_0", "player_1")


def test_env_ids_of_gymnax_and_pgx():
    assert len(IDS) >= 24
    assert {"CartPole-v1", "Pendulum-v1", "Breakout-MinAtar", "Pong-misc"} <= set(IDS)
    assert "pgx:tic_tac_toe" in envs.env_ids("pgx")


def test_missing_suite_has_no_ids_and_names_its_extra(monkeypatch):
    quick_suites = {x: registry.SUITES[x] for x in ("gymnax", "jaxmarl", "pgx")}
    monkeypatch.setattr(registry, "SUITES", quick_suites)
    monkeypatch.setitem(sys.modules, "jaxmarl", None)
    with pytest.raises(ValueError, match=r'pip install "\.\[jaxmarl\]"'):
        envs.make("jaxmarl:coin_game")
    assert envs.env_ids("installed") == (*IDS, *envs.env_ids("pgx"))


@pytest.mark.slow  # imports all suites
def test_env_ids_of_installed_suites():
    installed = envs.env_ids("installed")
    assert installed[: len(IDS)] == IDS
    assert set(envs.env_ids("pgx")) <= set(installed)


def test_suite_import_prints_nothing(tmp_path, monkeypatch, capfd):
    """JaxMARL replaces the streams and prints at import."""
    code = "import sys; sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__; "
    code += "print('text'); registered_envs = ['game']"
    (tmp_path / "jaxmarl.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jaxmarl", raising=False)
    streams = sys.stdout, sys.stderr, sys.__stdout__
    assert envs.env_ids("jaxmarl") == ("jaxmarl:game",)
    monkeypatch.delitem(sys.modules, "jaxmarl")
    assert (sys.stdout, sys.stderr, sys.__stdout__) == streams
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("env_id", ["CartPole-v1", "pgx:tic_tac_toe"])
def test_make_accepts_max_episode_steps(env_id):
    env = envs.make_vec(env_id, 2, max_episode_steps=3)
    want = envs.vectorize(envs.TimeLimit(envs.make(env_id), 3), 2)
    assert jax.tree.structure(env) == jax.tree.structure(want)  # one program
    chex.assert_trees_all_equal(env, want)
    game = envs.make("pgx:tic_tac_toe", max_episode_steps=3)
    assert (type(game), game.num_steps) == (envs.TimeLimit, 3)
