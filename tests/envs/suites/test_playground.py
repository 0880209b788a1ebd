"""Adapting environments of MuJoCo Playground."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import plain_physics
import pytest

from rollout import envs
from rollout.envs.suites.playground import from_playground, ids

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore"
    )  # it imports brax, which imports jaxopt, which warns
    registry = pytest.importorskip("mujoco_playground").registry
    from mujoco_playground._src import wrapper

# What mujoco-mjx renames.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing `:DeprecationWarning")
KEY = jax.random.key(3)
LIMIT = 40


@pytest.fixture(autouse=True)
def suite_promotes_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def make():
    overrides = {"impl": "jax"}
    suite_env = registry.load("CartpoleBalance", config_overrides=overrides)
    return suite_env, from_playground(suite_env)


@functools.cache
def trajectory():
    return plain_physics.collect(make()[1], LIMIT, seed=0)


@functools.cache
def first_state():
    return jax.jit(make()[1].reset)(KEY)[0]


@pytest.mark.slow
def test_rows_are_those_of_a_plain_loop():
    suite_env, rows = make()[0], trajectory()
    want = plain_physics.play(suite_env, "_mjx_model", rows.action, LIMIT, seed=0)
    # jax 0.10 rounds some entries of the rotations otherwise within its loop; nothing
    # here is greater than 10, and most is below 1.
    plain_physics.check(rows, want, atol=1e-5)
    assert sorted(rows.info) == sorted(first_state().metrics)


@pytest.mark.slow
def test_time_limit_truncates_with_the_true_successor():
    rows = jax.device_get(trajectory())
    done = rows.episode_length == LIMIT
    np.testing.assert_array_equal(rows.truncated, done)
    assert not rows.terminated.any()
    going_on = ~done[:-1]
    np.testing.assert_array_equal(rows.next_obs[:-1][going_on], rows.obs[1:][going_on])
    assert (rows.next_obs[:-1][~going_on] != rows.obs[1:][~going_on]).any(axis=-1).all()


@pytest.mark.slow
def test_state_that_is_not_finite_terminates_and_lanes_have_gravity_of_their_own():
    suite_env, env = make()
    scales = jnp.array([1.0, 2.0, 1.0])
    each = jax.vmap(lambda scale: with_gravity(env, scale))(scales)
    lanes = envs.vectorize_each(each, 3)
    state = first_state()
    data = state.data.replace(qpos=jnp.full_like(state.data.qpos, jnp.nan))
    all_states = [state, state, state.replace(data=data)]
    states = jax.tree.map(lambda *x: jnp.stack(x), *all_states)
    result = jax.jit(lanes.step)(jax.random.split(KEY, 3), states, jnp.zeros((3, 1)))
    np.testing.assert_array_equal(result.terminated, [False, False, True])
    assert not result.truncated.any()
    own = suite_env.mjx_model
    for lane in (0, 1):
        suite_env._mjx_model = with_gravity(env, scales[lane]).model
        try:
            want = jax.jit(lambda *args: suite_env.step(*args))(state, jnp.zeros(1))
        finally:
            suite_env._mjx_model = own
        # Another program: roundings of numbers of at most 1.
        np.testing.assert_allclose(result.obs[lane], want.obs, rtol=0, atol=1e-5)
    assert np.abs(result.obs[0] - result.obs[1]).max() > 1e-4


def with_gravity(env, scale):
    option = env.model.opt.replace(gravity=env.model.opt.gravity * scale)
    return env.replace(model=env.model.replace(opt=option))


@pytest.mark.slow
def test_spaces_contain_what_comes_out():
    env, rows = make()[1], trajectory()
    for space, x in [
        (env.observation_space, rows.obs),
        (env.observation_space, rows.next_obs),
        (env.action_space, rows.action),
    ]:
        assert x.shape[2:] == space.shape
        assert x.dtype == space.dtype
        assert jax.vmap(jax.vmap(space.contains))(x).all()


def test_state_keeps_its_shapes():
    env = make()[1]
    state, obs = jax.eval_shape(env.reset, KEY)
    step = jax.eval_shape(type(env).step, env, KEY, state, jnp.zeros(1))
    assert jax.tree.structure(step.state) == jax.tree.structure(state)
    got, want = (
        jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (step.state, state)
    )
    assert jax.tree.leaves(got) == jax.tree.leaves(want)
    assert (obs.shape, step.obs.shape) == (env.observation_space.shape,) * 2


def test_wrappers_of_training_are_refused():
    suite_env = make()[0]
    wrapped = [
        wrapper.wrap_for_brax_training(suite_env),
        wrapper.BraxAutoResetWrapper(suite_env),
        wrapper.Wrapper(wrapper.brax_training.EpisodeWrapper(suite_env, 10, 1)),
    ]
    for env in wrapped:
        with pytest.raises(ValueError, match=r"`env` must be without .* got .*Wrapper"):
            from_playground(env)
    assert from_playground(wrapper.Wrapper(suite_env)).action_space.shape == (1,)


def test_warp_is_refused_and_is_not_the_default():
    with pytest.raises(ValueError, match=r"`env` must be made with .*'warp'"):
        envs.make("playground:PendulumSwingup", impl="warp")
    env = envs.make("playground:PendulumSwingup", sim_dt=0.005)
    assert env is envs.make("playground:PendulumSwingup", sim_dt=0.005)
    assert env.env.mjx_model.impl.value == "jax"
    assert env.env.sim_dt == 0.005


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match=r"are action_repeat, .*; got gravity"):
        envs.make("playground:PendulumSwingup", gravity=1.0)
    with pytest.raises(ValueError, match="PendulumSwingup with sim_dt='short' fails"):
        envs.make("playground:PendulumSwingup", sim_dt="short")


def test_missing_download_is_reported(monkeypatch):
    def load(name, config_overrides):
        raise OSError("no network")

    monkeypatch.setattr(registry, "load", load)
    assert "Go1Getup" in ids()
    with pytest.raises(ValueError, match="Go1Getup cannot be made here: no network"):
        envs.make("playground:Go1Getup")


@pytest.mark.slow
def test_frames_are_drawn_without_a_screen():
    plain_physics.check_is_drawn("playground:PendulumSwingup")
