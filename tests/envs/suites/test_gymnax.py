"""Adapting gymnax-style environments: old, new and other people's."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from gymnax.environments import environment

from rollout import envs


@struct.dataclass
class State:
    time: jax.Array


@struct.dataclass
class OtherState:
    timestep: jax.Array


LIMIT = types.SimpleNamespace(max_steps_in_episode=4)
OTHER_LIMIT = types.SimpleNamespace(max_timesteps=4)


@struct.dataclass
class Inherited(environment.EnvParams):
    """Parameters of an old environment, with gymnax's own limit of one step."""


class Base:
    """Counts; `obs` and the state are the number of steps."""

    state_class = State

    def reset_env(self, key, params):
        return jnp.float32(0), self.state_class(jnp.int32(0))

    def step_env(self, key, state, action, params):
        time = jax.tree.leaves(state)[0] + 1
        ends = self.endings(time, action == 1, params)
        return jnp.float32(time), self.state_class(time), 1.0, *ends, {}

    def action_space(self, params):
        return envs.Discrete(2)

    def observation_space(self, params):
        return envs.Box(0.0, 9.0, ())


class Old(Base):
    """gymnax before 1.0: `done` merges the time limit; action 1 terminates."""

    def endings(self, time, is_over, params):
        (limit,) = vars(params).values()
        return (is_over | (time >= limit),)


class Six(Base):
    def endings(self, time, is_over, params):
        return is_over, time >= params.max_steps_in_episode


class OldOnNewBase(Old, environment.Environment):
    """Old code on the base class of gymnax 1: inherits `is_truncated`."""

    def is_terminal(self, state, params):
        return state.time >= params.max_steps_in_episode


class Endless(Base):
    def endings(self, time, is_over, params):
        return (is_over,)


class OtherNames(Old):
    state_class = OtherState


class Four(Base):
    def endings(self, time, is_over, params):
        return ()


OTHER_NAMES = {"limit_field": "max_timesteps", "time_field": "timestep"}


@pytest.mark.parametrize(
    ("env", "params", "options", "has_limit"),
    [
        (Old(), LIMIT, {}, True),
        (Six(), LIMIT, {}, True),
        (OldOnNewBase(), LIMIT, {}, True),
        (OtherNames(), OTHER_LIMIT, OTHER_NAMES, True),
        (Endless(), types.SimpleNamespace(), {}, False),
        # What its base class has alone is not its own limit.
        (Endless(), Inherited(), {}, False),
    ],
)
def test_time_limit_truncates_and_the_task_terminates(env, params, options, has_limit):
    adapted = envs.from_gymnax(env, params, **options)
    for time, action, ends in (
        (0, 0, (False, False)),
        (0, 1, (True, False)),
        (3, 0, (False, has_limit)),
    ):
        state = env.state_class(jnp.int32(time))
        step = adapted.step(jax.random.key(0), state, jnp.int32(action))
        assert step.obs == time + 1
        assert (bool(step.terminated), bool(step.truncated)) == ends


def test_both_flags_may_be_set_by_gymnax_itself():
    env = envs.make("CartPole-v1", max_steps_in_episode=1)
    state, _ = env.reset(jax.random.key(0))
    fallen = state.replace(theta=jnp.float32(1.0))
    step = env.step(jax.random.key(0), fallen, jnp.int32(0))
    assert (bool(step.terminated), bool(step.truncated)) == (True, True)


def test_what_does_not_fit_is_refused_while_tracing():
    options = {"limit_field": "max_timesteps", "time_field": "clock"}
    key, state = jax.random.key(0), OtherState(jnp.int32(0))
    wrong = envs.from_gymnax(OtherNames(), OTHER_LIMIT, **options)
    with pytest.raises(ValueError, match="`time_field` must be a field of the state"):
        wrong.step(key, state, 0)
    four = envs.from_gymnax(Four(), LIMIT)
    with pytest.raises(ValueError, match=r"`step_env` must return .*, got 4 values"):
        four.step(key, state, 0)


def test_foreign_environment_gets_keys_of_the_caller():
    seen = []

    class Foreign(Old):
        def reset_env(self, key, params):
            seen.append(jax.random.key_impl(key))
            return jnp.float32(jax.random.poisson(key, 3.0)), State(0)

    envs.from_gymnax(Foreign(), LIMIT).reset(jax.random.key(0))
    assert seen == ["threefry2x32"]


def test_spaces_of_gymnax_become_ours():
    torque = envs.make("Pendulum-v1").action_space
    assert (torque.shape, float(torque.high)) == ((1,), 2.0)
    assert not torque.contains(jnp.array([3.0]))
    space = envs.make("Acrobot-v1").action_space
    assert space == envs.Discrete(3)
    np.testing.assert_array_equal(
        space.contains(jnp.array([-1, 0, 2, 3])), [False, True, True, False]
    )
