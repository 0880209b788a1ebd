"""Adapting environments of brax."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import plain_physics
import pytest

import rollout
from rollout import envs
from rollout.envs.suites.brax import from_brax, ids

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # brax imports jaxopt, which warns
    brax_envs = pytest.importorskip("brax.envs")

pytestmark = [
    # brax says of itself that it is not maintained, and uses what mujoco-mjx renames.
    pytest.mark.filterwarnings("ignore:Brax System:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing `:DeprecationWarning"),
]
KEY = jax.random.key(3)
LIMIT = 5  # with it, about half of the episodes are truncated


@pytest.fixture(autouse=True)
def suite_promotes_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def make():
    suite_env = brax_envs.get_environment("inverted_pendulum", backend="generalized")
    return suite_env, from_brax(suite_env)


@functools.cache
def trajectory():
    return plain_physics.collect(make()[1], LIMIT, seed=0)


@pytest.mark.slow
def test_rows_are_those_of_a_plain_loop():
    suite_env, rows = make()[0], trajectory()
    want = plain_physics.play(suite_env, "sys", rows.action, LIMIT, seed=0)
    plain_physics.check(rows, want)


@pytest.mark.slow
def test_fallen_pole_terminates_and_time_limit_truncates():
    rows = trajectory()
    fallen = np.abs(rows.next_obs[..., 1]) > 0.2
    np.testing.assert_array_equal(rows.terminated, fallen)
    np.testing.assert_array_equal(rows.truncated, rows.episode_length == LIMIT)
    assert (rows.terminated & ~rows.truncated).any()
    assert (rows.truncated & ~rows.terminated).any()


@pytest.mark.slow
def test_next_obs_at_an_ending_is_the_true_successor():
    rows = jax.device_get(trajectory())
    done = rows.terminated | rows.truncated
    going_on = ~done[:-1]
    np.testing.assert_array_equal(rows.next_obs[:-1][going_on], rows.obs[1:][going_on])
    # A reset stands within 0.01 of the middle, a fallen pole does not.
    assert (np.abs(rows.obs[1:][~going_on]) <= 0.01).all()
    assert (np.abs(rows.next_obs[:-1][~going_on]) > 0.01).any(axis=-1).all()


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
    assert (env.action_space.low, env.action_space.high) == (-1.0, 1.0)


@pytest.mark.slow
def test_lanes_have_gravity_of_their_own():
    suite_env, env = make()
    scales = jnp.array([1.0, 2.0])
    each = jax.vmap(lambda scale: with_gravity(env, scale))(scales)
    lanes = envs.vectorize_each(each, 2)
    keys = jax.random.split(KEY, 3)
    state, _ = jax.jit(env.reset)(keys[0])
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    obs = jax.jit(lanes.step)(keys[1:], states, jnp.zeros((2, 1))).obs
    own = suite_env.sys
    for lane, scale in enumerate(scales):
        suite_env.sys = own.replace(gravity=own.gravity * scale)
        try:
            want = jax.jit(lambda *args: suite_env.step(*args))(state, jnp.zeros(1))
        finally:
            suite_env.sys = own
        # Another program: roundings of numbers of at most 1.
        np.testing.assert_allclose(obs[lane], want.obs, rtol=0, atol=1e-5)
    assert np.abs(obs[0] - obs[1]).max() > 1e-3


def with_gravity(env, scale):
    return env.replace(model=env.model.replace(gravity=env.model.gravity * scale))


def test_environment_without_a_model_has_no_leaves_and_is_traced_once():
    suite_env = brax_envs.get_environment("fast")
    env = from_brax(suite_env)
    assert jax.tree.leaves(env) == []
    lanes = envs.vectorize(envs.TimeLimit(env, 3), 2)
    policy = rollout.random_policy(lanes.action_space)
    collector = rollout.Collector(env=lanes, policy=policy)
    carry = collector.init(KEY)
    carry, rows = collector.collect_steps(carry, None, 8)
    counts = suite_env.reset_count, suite_env.step_count
    collector.collect_steps(carry, None, 8)
    assert (suite_env.reset_count, suite_env.step_count) == counts
    np.testing.assert_array_equal(rows.truncated[:, 0], np.arange(1, 9) % 3 == 0)
    assert not rows.terminated.any()
    with pytest.raises(ValueError, match=r"must have a model to be drawn, got Fast"):
        env.render_frames(carry.env_state)


@pytest.mark.parametrize("backend", ["generalized", "spring", "positional", "mjx"])
def test_state_keeps_its_shapes(backend):
    env = envs.make("brax:inverted_pendulum", backend=backend)
    state, obs = jax.eval_shape(env.reset, KEY)
    step = jax.eval_shape(type(env).step, env, KEY, state, jnp.zeros(1))
    assert jax.tree.structure(step.state) == jax.tree.structure(state)
    same = jax.tree.map(
        lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype), state, step.state
    )
    assert jax.tree.all(same)
    assert (obs.shape, step.obs.shape) == (env.observation_space.shape,) * 2


def test_wrappers_of_training_are_refused():
    training = brax_envs.training
    fast = brax_envs.get_environment("fast")
    wrapped = [
        brax_envs.create("fast"),
        training.EpisodeWrapper(fast, 10, 1),
        training.VmapWrapper(fast),
        brax_envs.Wrapper(training.AutoResetWrapper(fast)),
    ]
    for env in wrapped:
        with pytest.raises(ValueError, match=r"`env` must be without .* got .*Wrapper"):
            from_brax(env)


def test_other_wrappers_are_kept_and_get_the_model():
    class Weigh(brax_envs.Wrapper):
        def step(self, state, action):
            return state.replace(reward=self.sys.gravity[2])

    env = from_brax(Weigh(make()[0]))
    state = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(env.reset, KEY)[0]
    )
    for scale in (1.0, 3.0):
        step = with_gravity(env, scale).step(KEY, state, jnp.zeros(1))
        np.testing.assert_allclose(step.reward, -9.81 * scale, rtol=1e-6)


def test_object_without_the_methods_is_refused():
    with pytest.raises(TypeError, match=r"`env` must have .* got object"):
        from_brax(object())


def test_adapters_of_one_environment_are_one_program():
    one, other = (jax.tree.structure(from_brax(make()[0])) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)


def test_make_gives_the_same_environment_once():
    assert "ant" in ids()
    env = envs.make("brax:inverted_pendulum", backend="spring")
    assert env is envs.make("brax:inverted_pendulum", backend="spring")
    assert env.env.backend == "spring"
    with pytest.raises(ValueError, match=r"brax:ant with legs=5 fails: .*'legs'"):
        envs.make("brax:ant", legs=5)


@pytest.mark.slow
def test_frames_are_drawn_without_a_screen():
    plain_physics.check_is_drawn("brax:inverted_pendulum")
