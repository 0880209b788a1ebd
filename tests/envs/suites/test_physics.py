"""The shared part of brax and MuJoCo Playground, on an environment made up here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from rollout import envs
from rollout.envs.suites import physics

KEY = jax.random.key(3)


@struct.dataclass
class State:
    data: Any
    obs: Any
    reward: Any
    done: Any
    metrics: dict
    info: dict


class Suite:
    """Adds `model`, remembers the last observation, and writes into its state."""

    action_size = 2

    def __init__(self):
        self.model = jnp.float32(2.0)
        self.reward = self.own_reward  # bound to this object

    def own_reward(self):
        return self.model

    def reset(self, rng):
        assert rng.dtype == jnp.uint32
        obs = {"state": jax.random.normal(rng, (3,)), "privileged_state": jnp.zeros(1)}
        info = {"rng": jax.random.split(rng)[0]}
        return State(jnp.float32(0), obs, 0.0, 0.0, {"drawn": jnp.float32(0)}, info)

    def step(self, state, action):
        state.info["rng"], key = jax.random.split(state.info["rng"])
        state.metrics["drawn"] = jax.random.uniform(key)
        data = state.data + self.model
        obs = {**state.obs, "privileged_state": data[None]}
        done = jnp.where(data > 3, 1.0, 0.0)
        return state.replace(data=data, obs=obs, reward=self.reward(), done=done)


def adapt(env):
    return physics.adapt(env, model_field="model", frame_field=None)


def first_step(env, seed=4):
    state, _ = env.reset(KEY)
    return state, env.step(jax.random.key(seed), state, jnp.zeros(2))


def test_draws_of_a_step_are_from_its_key():
    env = adapt(Suite())
    key = jax.random.key_data(jax.random.key(4))
    state, step = first_step(env)
    after, drawn = jax.random.split(key)
    assert step.info["drawn"] == jax.random.uniform(drawn)
    np.testing.assert_array_equal(step.state.info["rng"], after)
    moved = state.replace(info={"rng": state.info["rng"] + 1})
    again = env.step(jax.random.key(4), moved, jnp.zeros(2))
    assert again.info["drawn"] == step.info["drawn"]


def test_keys_of_another_kind_are_taken():
    env = adapt(Suite())
    state, _ = env.reset(jax.random.key(0, impl="rbg"))
    step = env.step(jax.random.key(1, impl="rbg"), state, jnp.zeros(2))
    assert 0 <= step.info["drawn"] < 1


def test_state_that_is_passed_in_stays_as_it_is():
    state, step = first_step(adapt(Suite()))
    assert state.metrics["drawn"] == 0
    assert step.state.metrics["drawn"] != 0


def test_methods_that_an_environment_keeps_see_the_model_of_the_lane():
    env = adapt(Suite())
    _, step = first_step(env.replace(model=jnp.float32(5.0)))
    assert (step.reward, step.obs["privileged_state"][0]) == (5.0, 5.0)
    assert first_step(env)[1].reward == 2.0


def test_done_terminates_and_nothing_truncates():
    env = adapt(Suite())
    assert not first_step(env)[1].terminated
    _, step = first_step(env.replace(model=jnp.float32(5.0)))
    assert step.terminated
    assert not step.truncated
    assert step.reward.dtype == jnp.float32
    assert step.terminated.dtype == bool


def test_observations_by_name_have_a_space_by_name():
    env = adapt(Suite())
    space = env.observation_space
    assert isinstance(space, envs.Dict)
    shapes = {name: x.shape for name, x in space.spaces.items()}
    assert shapes == {"state": (3,), "privileged_state": (1,)}
    assert space.contains(env.reset(KEY)[1])
    assert env.action_space.shape == (2,)


def test_repr_is_short():
    assert len(repr(adapt(Suite()))) < 1000


def test_object_without_the_methods_is_refused():
    with pytest.raises(TypeError, match=r"`env` must have .* got object"):
        adapt(object())
