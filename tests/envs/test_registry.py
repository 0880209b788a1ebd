"""Environments by name, and the contract each of them keeps."""

import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit, raw

import rollout
from rollout import envs

IDS = envs.env_ids()
NEEDS_DOWNLOAD = "MNISTBandit-bsuite"
QUICK = ("MountainCarContinuous-v0", "DiscountingChain-bsuite", NEEDS_DOWNLOAD)


@pytest.mark.parametrize(
    "env_id",
    [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in IDS],
)
def test_every_environment_collects(env_id):
    message = None
    try:
        env = envs.make_vec(env_id, 2)
    except ValueError as error:
        message = str(error)
    if message is not None:
        assert env_id == NEEDS_DOWNLOAD
        assert "must download its data set when it is made, got: " in message
        return
    # Swimmer itself promotes ranks.
    with jax.numpy_rank_promotion("allow"):
        check_collects(env)


def check_collects(env):
    """Traces the collection of three steps, and compiles one step without it."""
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)

    def collect(key):
        carry = collector.init(key)
        return raw((carry, *collector.collect_steps(carry, None, 3)))

    carry, after, trajectory = jax.eval_shape(collect, jax.random.key(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(carry, after)
    chex.assert_shape(trajectory.reward, (3, 2))
    chex.assert_type([trajectory.reward, trajectory.terminated], [jnp.float32, bool])

    @quick_jit
    def step(keys):
        state, obs = env.reset(keys[0])
        action = jax.vmap(env.action_space.sample)(keys[1])
        inside = jax.vmap(env.action_space.contains)(action)
        return raw((state, obs, env.step(keys[2], state, action), inside))

    state, obs, result, inside = step(jax.random.split(jax.random.key(0), (3, 2)))
    before, after = (state, obs), (result.state, result.obs)
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
    assert inside.all()
    assert np.isfinite(np.asarray(result.reward)).all()
    assert not np.any(result.truncated)


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

    speeds = jax.jit(jax.vmap(fall))(jnp.array([0.0, 50.0]))
    assert speeds[0] != speeds[1]


def test_environments_of_suites_by_id():
    seat = envs.make("pgx:tic_tac_toe")
    assert seat.action_space == envs.Discrete(9)
    assert envs.make("pgx:tic_tac_toe") is seat  # so it is one program
    assert envs.make("gymnax:CartPole-v1") == envs.make("CartPole-v1")
    game = envs.make_agents("pgx:tic_tac_toe")
    assert game.agents == ("player_0", "player_1")


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
    with pytest.raises(ValueError, match=r'pip install "rollout-jax\[jaxmarl\]"'):
        envs.make_agents("jaxmarl:coin_game")
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
    game = envs.make_agents("pgx:tic_tac_toe", max_episode_steps=3)
    assert (type(game), game.num_steps) == (envs.TimeLimit, 3)
