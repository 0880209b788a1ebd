"""Adapting gymnax-style environments: old, new and other people's."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from gymnax.environments import environment

from rollout import envs

PARAMS = types.SimpleNamespace(max_steps_in_episode=4)
jax.tree_util.register_static(types.SimpleNamespace)


class Base:
    """Counts; `obs` and the state are the number of steps."""

    def reset_env(self, key, params):
        return jnp.float32(0), types_state(0)

    def action_space(self, params):
        return envs.Discrete(2)

    def observation_space(self, params):
        return envs.Box(0.0, 9.0, ())


@jax.tree_util.register_pytree_node_class
class types_state:  # noqa: N801
    def __init__(self, time):
        self.time = time

    def tree_flatten(self):
        return (self.time,), None

    @classmethod
    def tree_unflatten(cls, aux, leaves):
        return cls(*leaves)


class OldEnv(Base):
    """gymnax before 1.0: `done` merges the time limit; action 1 terminates."""

    def step_env(self, key, state, action, params):
        state = types_state(state.time + 1)
        done = (action == 1) | (state.time >= params.max_steps_in_episode)
        return jnp.float32(state.time), state, 1.0, done, {}


class SixEnv(Base):
    """Both flags from `step_env`."""

    def step_env(self, key, state, action, params):
        state = types_state(state.time + 1)
        flags = action == 1, state.time >= params.max_steps_in_episode
        return jnp.float32(state.time), state, 1.0, *flags, {}


class OldOnNewBase(OldEnv, environment.Environment):
    """Old code on the base class of gymnax 1: inherits `is_truncated`."""

    def is_terminal(self, state, params):
        return state.time >= params.max_steps_in_episode


class NoLimit(OldEnv):
    """An old environment whose parameters know no time limit."""

    def step_env(self, key, state, action, params):
        state = types_state(state.time + 1)
        return jnp.float32(state.time), state, 1.0, action == 1, {}


class FourEnv(Base):
    def step_env(self, key, state, action, params):
        return jnp.float32(0), state, 1.0, {}


def endings(env, time, action):
    step = env.step(jax.random.key(0), types_state(jnp.int32(time)), jnp.int32(action))
    assert step.obs == time + 1
    return bool(step.terminated), bool(step.truncated)


@pytest.mark.parametrize("cls", [OldEnv, SixEnv, OldOnNewBase])
def test_time_limit_is_a_truncation_and_the_task_a_termination(cls):
    env = envs.from_gymnax(cls(), PARAMS)
    assert endings(env, 0, 0) == (False, False)
    assert endings(env, 0, 1) == (True, False)
    assert endings(env, 3, 0) == (False, True)


def test_environment_without_a_time_limit_only_terminates():
    env = envs.from_gymnax(NoLimit(), types.SimpleNamespace())
    assert endings(env, 3, 0) == (False, False)
    assert endings(env, 3, 1) == (True, False)


def test_both_flags_may_be_set_by_gymnax_itself():
    env = envs.make("CartPole-v1", max_steps_in_episode=1)
    state, _ = env.reset(jax.random.key(0))
    fallen = state.replace(theta=jnp.float32(1.0))
    step = env.step(jax.random.key(0), fallen, jnp.int32(0))
    assert (bool(step.terminated), bool(step.truncated)) == (True, True)


def test_step_env_of_another_length_is_refused():
    env = envs.from_gymnax(FourEnv(), PARAMS)
    with pytest.raises(ValueError, match=r"`step_env` must return .*, got 4 values"):
        env.step(jax.random.key(0), types_state(0), 0)


def test_object_without_the_methods_is_refused():
    with pytest.raises(TypeError, match=r"`env` must have .* got object"):
        envs.from_gymnax(object(), PARAMS)


def test_foreign_environment_gets_keys_of_the_caller():
    seen = []

    class Foreign(OldEnv):
        def reset_env(self, key, params):
            seen.append(jax.random.key_impl(key))
            return jnp.float32(jax.random.poisson(key, 3.0)), types_state(0)

    envs.from_gymnax(Foreign(), PARAMS).reset(jax.random.key(0))
    assert seen == ["threefry2x32"]


def test_spaces_of_gymnax_become_ours():
    pendulum = envs.make("Pendulum-v1")
    assert pendulum.action_space.shape == (1,)
    assert float(pendulum.action_space.high) == 2.0
    sample = pendulum.action_space.sample(jax.random.key(0))
    assert pendulum.action_space.contains(sample)
    assert not pendulum.action_space.contains(jnp.array([3.0]))
    space = envs.make("Acrobot-v1").action_space
    assert space == envs.Discrete(3)
    np.testing.assert_array_equal(
        space.contains(jnp.array([-1, 0, 2, 3])), [False, True, True, False]
    )
    assert space.sample(jax.random.key(0)).dtype == jnp.int32


@struct.dataclass
class Inherited(environment.EnvParams):
    """Parameters of an old environment, with gymnax's own limit of one step."""


@struct.dataclass
class OtherNames:
    max_timesteps: int = 3


class Endless(OldEnv):
    """Merges nothing: its base class's limit is not its own."""

    def step_env(self, key, state, action, params):
        state = types_state(state.time + 1)
        return jnp.float32(state.time), state, 1.0, action == 1, {}


class OtherTime(Base):
    """Keeps its time and its limit under other names, and merges them into `done`."""

    def reset_env(self, key, params):
        return jnp.float32(0), {"timestep": 0}

    def step_env(self, key, state, action, params):
        state = Timed(state.timestep + 1)
        done = (action == 1) | (state.timestep >= params.max_timesteps)
        return jnp.float32(state.timestep), state, 1.0, done, {}


@struct.dataclass
class Timed:
    timestep: jax.Array


def flags(env, state, action):
    result = env.step(jax.random.key(0), state, jnp.int32(action))
    return bool(result.terminated), bool(result.truncated), result.state


def test_limit_of_the_base_class_alone_is_none():
    env = envs.from_gymnax(Endless(), Inherited())
    state = types_state(0)
    for action, expected in (
        (0, (False, False)),
        (0, (False, False)),
        (1, (True, False)),
    ):
        *got, state = flags(env, state, action)
        assert tuple(got) == expected


def test_limit_and_time_may_have_other_names():
    env = envs.from_gymnax(
        OtherTime(),
        OtherNames(),
        limit_field="max_timesteps",
        time_field="timestep",
    )
    state = Timed(jnp.int32(0))
    for expected in ((False, False), (False, False), (False, True)):
        *got, state = flags(env, state, 0)
        assert tuple(got) == expected
    assert flags(env, Timed(jnp.int32(0)), 1)[:2] == (True, False)
    wrong = envs.from_gymnax(
        OtherTime(), OtherNames(), limit_field="max_timesteps", time_field="clock"
    )
    with pytest.raises(ValueError, match="`time_field` must be a field of the state"):
        flags(wrong, Timed(jnp.int32(0)), 0)
