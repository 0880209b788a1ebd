"""The shared part of brax and MuJoCo Playground, on an environment made up here."""

import jax
import jax.numpy as jnp
from plain_suites import Suite

from rollout import envs
from rollout.envs.suites import physics


def adapt(env):
    return physics.adapt(env, model_field="model", frame_field=None)


@jax.jit
def first_step(env, key):
    reset_key, step_key = jax.random.split(key)
    state, _ = env.reset(reset_key)
    return state, env.step(step_key, state, jnp.zeros(2))


def test_keys_of_another_kind_are_taken():
    _, step = first_step(adapt(Suite()), jax.random.key(0, impl="rbg"))
    assert 0 <= step.info["drawn"] < 1


def test_state_that_is_passed_in_stays_as_it_is():
    state, step = first_step(adapt(Suite()), jax.random.key(3))
    assert state.metrics["drawn"] == 0
    assert step.state.metrics["drawn"] != 0


def test_model_of_a_lane_reaches_kept_methods_and_done_terminates():
    env = adapt(Suite())
    _, step = first_step(env.replace(model=jnp.float32(5.0)), jax.random.key(3))
    assert (step.reward, step.obs["privileged_state"][0]) == (5.0, 5.0)
    assert (step.reward.dtype, step.terminated.dtype) == (jnp.float32, bool)
    assert step.terminated
    assert not step.truncated
    _, step = first_step(env, jax.random.key(3))
    assert step.reward == 2.0
    assert not step.terminated


def test_observations_by_name_have_a_space_by_name():
    env = adapt(Suite())
    assert isinstance(env.observation_space, envs.spaces.Dict)
    assert len(repr(env)) < 1000
