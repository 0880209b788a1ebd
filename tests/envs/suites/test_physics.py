"""The physics adapters: common behavior with a custom suite, brax and Playground."""

import jax
import jax.numpy as jnp
import numpy as np
import plain_suites
import pytest
from plain_suites import ContactSuite, Suite
from suite_checks import check_contract, collect, play

from rollout import envs
from rollout.envs.suites import physics
from rollout.envs.suites.brax import from_brax
from rollout.envs.suites.playground import from_playground

KEY = jax.random.key(3)


@pytest.fixture
def brax_envs(rank_promotion):
    return plain_suites.import_quietly("brax.envs")


@pytest.fixture
def playground(rank_promotion):
    return plain_suites.import_quietly("mujoco_playground")


def adapt(env, **options):
    return physics.adapt(env, model_field="model", frame_field=None, **options)


@jax.jit
def first_step(env, key):
    reset_key, step_key = jax.random.split(key)
    state, _ = env.reset(reset_key)
    return state, env.step(step_key, state, jnp.zeros(2))


def test_rbg_keys_are_accepted():
    _, step = first_step(adapt(Suite()), jax.random.key(0, impl="rbg"))
    assert 0 <= step.info["drawn"] < 1


def test_step_does_not_modify_input_state():
    state, step = first_step(adapt(Suite()), jax.random.key(3))
    assert state.metrics["drawn"] == 0
    assert step.state.metrics["drawn"] != 0


def test_replaced_model_is_used_and_done_terminates():
    env = adapt(Suite())
    assert isinstance(env.observation_space, envs.spaces.Dict)
    assert len(repr(env)) < 1000
    _, step = first_step(
        env.replace(parameters={"model": jnp.float32(5.0)}), jax.random.key(3)
    )
    assert (step.reward, step.obs["privileged_state"][0]) == (5.0, 5.0)
    assert (step.reward.dtype, step.terminated.dtype) == (jnp.float32, bool)
    assert step.terminated
    assert not step.truncated
    _, step = first_step(env, jax.random.key(3))
    assert step.reward == 2.0
    assert not step.terminated


class Wind(Suite):
    """A suite whose reward has two parameters, one in a wrapped environment."""

    def __init__(self, model, wind, inner=None):
        super().__init__()
        self.model, self.wind = model, {"speed": wind}
        if inner is not None:
            self.env = inner

    def step(self, state, action):
        step = super().step(state, action)
        bias = self.env.bias if hasattr(self, "env") else 0.0
        return step.replace(reward=10 * self.model + self.wind["speed"] + bias)


class Bias:
    def __init__(self, bias):
        self.bias = bias


def test_traced_attributes_vary_by_lane():
    def make(x):
        return adapt(Wind(x, x + 1, Bias(100 * x)))

    lanes = jax.vmap(make)(jnp.arange(3.0))
    _, step = jax.vmap(first_step, (0, None))(lanes, KEY)
    expected = [10 * x + x + 1 + 100 * x for x in range(3)]
    np.testing.assert_array_equal(step.reward, expected)


@pytest.mark.parametrize("wind", [lambda x: 2 * x, lambda x: 5.0])
def test_traced_attributes_need_different_names(wind):
    class Other(Bias):
        def __init__(self, bias):
            self.wind = bias

    with pytest.raises(ValueError, match=r"one attribute 'wind'.* a wrapped env"):
        jax.vmap(lambda x: adapt(Wind(x, x, Other(wind(x)))))(jnp.arange(3.0))


def test_brax_truncation_flag_truncates():
    class LimitedSuite(Suite):
        def step(self, state, action):
            state = super().step(state, action)
            state.info["truncation"] = jnp.ones(())
            return state.replace(done=jnp.ones(()))

    class MarkedSuite(LimitedSuite):
        def reset(self, rng):
            state = super().reset(rng)
            return state.replace(info={**state.info, "truncation": jnp.zeros(())})

    _, step = first_step(adapt(MarkedSuite()), jax.random.key(3))
    assert (bool(step.terminated), bool(step.truncated)) == (False, True)


@pytest.mark.parametrize(
    "auto_reset", ["compact", pytest.param("select", marks=pytest.mark.slow)]
)
def test_shared_arrays_are_not_in_the_state(auto_reset):
    env = adapt(ContactSuite(), has_shared_arrays=True)
    models = np.array([1.0, 2.0, 3.0], np.float32)
    (carry, rows), (_, expected) = (
        play(
            envs.vectorize_each(
                x.replace(parameters={"model": models}), auto_reset=auto_reset
            ),
            num_steps=9,
        )
        for x in (env, adapt(Suite()))
    )
    assert {x.shape[0] for x in jax.tree.leaves(carry.env_state)} == {3}
    assert carry.env_state.data.limits is None
    assert rows.terminated.sum(axis=0).tolist() == [2, 4, 4]
    jax.tree.map(np.testing.assert_array_equal, rows, expected)


def test_brax_environment_without_model_is_traced_once(brax_envs):
    suite_env = brax_envs.get_environment("fast")
    env = from_brax(suite_env)
    assert jax.tree.leaves(env) == []
    lanes = envs.vectorize(envs.TimeLimit(env, 3), 2)
    rows = collect(lanes, num_steps=8)
    counts = suite_env.reset_count, suite_env.step_count
    collect(lanes, num_steps=8)
    assert (suite_env.reset_count, suite_env.step_count) == counts
    np.testing.assert_array_equal(rows.truncated[:, 0], np.arange(1, 9) % 3 == 0)
    assert not rows.terminated.any()
    assert not envs.render.can_render(env)


@pytest.mark.compiles(60)  # brax builds a system with eager operations
@pytest.mark.parametrize("backend", ["generalized", "spring", "positional", "mjx"])
def test_brax_backends_satisfy_the_contract(backend, brax_envs):
    check_contract(envs.make("brax:inverted_pendulum", backend=backend))


def test_brax_episode_limit(brax_envs):
    """The default limit equals the limit of `brax.envs.create`."""
    env = envs.make("brax:fast")
    assert (type(env), env.num_steps) == (envs.TimeLimit, 1000)
    long_env = envs.make("brax:fast", max_episode_steps=2000)
    assert long_env == envs.TimeLimit(env.env, 2000)  # replaces the default limit
    with pytest.raises(ValueError, match="`max_episode_steps`"):
        envs.make("brax:inverted_pendulum", episode_length=5)


def test_brax_training_wrappers_raise_and_custom_wrappers_use_model(brax_envs):
    training, fast = brax_envs.training, brax_envs.get_environment("fast")
    for env in (
        brax_envs.create("fast"),
        training.VmapWrapper(fast),
        brax_envs.Wrapper(training.AutoResetWrapper(fast)),
    ):
        with pytest.raises(ValueError, match=r"`env` must be without .* got .*Wrapper"):
            from_brax(env)

    class GravityReward(brax_envs.Wrapper):
        def step(self, state, action):
            return state.replace(reward=self.sys.gravity[2])

    env = from_brax(GravityReward(brax_envs.get_environment("inverted_pendulum")))
    state = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(env.reset, KEY)[0]
    )
    for scale in (1.0, 3.0):
        model = env.parameters["sys"]
        model = model.replace(gravity=model.gravity * scale)
        step = env.replace(parameters={"sys": model}).step(KEY, state, jnp.zeros(1))
        np.testing.assert_allclose(step.reward, -9.81 * scale, rtol=1e-6)


def test_playground_training_wrappers_raise(playground):
    wrapper, overrides = playground.wrapper, {"impl": "jax"}
    suite_env = playground.registry.load("CartpoleBalance", config_overrides=overrides)
    for env in (
        wrapper.wrap_for_brax_training(suite_env),
        wrapper.Wrapper(wrapper.brax_training.EpisodeWrapper(suite_env, 10, 1)),
    ):
        with pytest.raises(ValueError, match=r"`env` must be without .* got .*Wrapper"):
            from_playground(env)
    assert from_playground(wrapper.Wrapper(suite_env)).action_space.shape == (1,)


def test_playground_options(playground):
    env = envs.make("playground:PendulumSwingup", sim_dt=0.005)
    assert env.env.env.mjx_model.impl.value == "jax"
    assert env.env.env.sim_dt == 0.005
    for options, message in (
        ({"impl": "cpp"}, r"`env` must be made with .*'cpp'"),
        ({"gravity": 1.0}, r"are action_repeat, .*; got gravity"),
        ({"sim_dt": "short"}, "PendulumSwingup with sim_dt='short' fails"),
    ):
        with pytest.raises(ValueError, match=message):
            envs.make("playground:PendulumSwingup", **options)


@pytest.mark.slow  # MuJoCo Warp compiles kernels
def test_mujoco_warp_lanes_reset_independently(playground):
    env = make_hopper(playground)
    compact, select = (
        play(envs.vectorize(envs.TimeLimit(env, 7), 3, auto_reset=x), num_steps=20)[1]
        for x in ("compact", "select")
    )
    jax.tree.map(np.testing.assert_array_equal, compact, select)
    assert compact.truncated.sum(axis=0).tolist() == [2, 2, 2]


@pytest.mark.slow
def test_mujoco_warp_steps_equal_steps_with_contacts(playground):
    env = make_hopper(playground)
    lanes, suite_env = envs.vectorize(env, 3), env.env
    keys = jax.vmap(jax.random.key)(np.arange(3))
    actions = np.random.default_rng(1).uniform(-1, 1, (30, 3, 4)).astype(np.float32)

    def step(states, action):
        result = lanes.step(keys, states[0], action)
        suite_state = jax.vmap(suite_env.step)(states[1], action)
        return (result.state, suite_state), (result.obs, suite_state.obs)

    @jax.jit
    def run(keys):
        suite_state = jax.vmap(suite_env.reset)(jax.vmap(jax.random.key_data)(keys))
        return jax.lax.scan(step, (lanes.reset(keys)[0], suite_state), actions)

    (state, suite_state), (obs, expected) = run(keys)
    np.testing.assert_array_equal(obs, expected)
    leaves = jax.tree.leaves_with_path(suite_state)
    arrays = {str(path[-1]): x for path, x in leaves}
    assert arrays[".nacon"] > 0
    assert arrays[".contact__pos"].shape == (64, 3)
    assert {x.shape[0] for x in jax.tree.leaves(state)} == {3}


def test_mujoco_warp_sleeping_bodies_raise(playground):
    hopper = make_hopper(playground).env
    option = hopper.mjx_model.opt
    sleeping = option.replace(enableflags=option.enableflags | 16)  # mjENBL_SLEEP
    hopper._mjx_model = hopper.mjx_model.replace(opt=sleeping)
    with pytest.raises(ValueError, match=r"`env` .* sleeping bodies"):
        from_playground(hopper)


def make_hopper(playground):
    overrides = {"impl": "warp", "naconmax": 64}
    return from_playground(
        playground.registry.load("HopperStand", config_overrides=overrides)
    )


def test_playground_episode_limit(playground):
    for options, limit in (
        ({}, 1000),
        ({"episode_length": 7}, 7),
        ({"max_episode_steps": 9}, 9),
    ):
        env = envs.make("playground:PendulumSwingup", **options)
        assert (type(env), env.num_steps) == (envs.TimeLimit, limit)


def test_missing_playground_download_raises(playground, monkeypatch):
    def load(name, config_overrides):
        raise OSError("no network")

    monkeypatch.setattr(playground.registry, "load", load)
    with pytest.raises(ValueError, match=r"Go1Getup .* no network"):
        envs.make("playground:Go1Getup")
