"""Adapting gymnax-style environments: old, new and other people's."""

import os
import subprocess
import sys
import types

import gymnax
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


class OldAlone(Old, environment.Environment):
    """Defines `step_env` and none of the methods that the base class has."""


class OldRenamed(OldOnNewBase):
    """Old code whose `info` has the discount, which asks `is_terminated` since 1.0."""

    is_terminated = OldOnNewBase.is_terminal

    def step_env(self, key, state, action, params):
        *result, info = super().step_env(key, state, action, params)
        return *result, {**info, "discount": self.discount(result[1], params)}


class NotRenamed(OldRenamed):
    is_terminated = environment.Environment.is_terminated


class New(Base, environment.Environment):
    def endings(self, time, is_over, params):
        return (is_over,)

    def is_terminated(self, state, params):
        return jnp.bool_(False)


class Delegating:
    """A wrapper that has everything from the environment inside."""

    def __init__(self, env):
        self._env = env

    def __getattr__(self, name):
        return getattr(self._env, name)


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
        (OldAlone(), LIMIT, {}, True),
        (OldRenamed(), LIMIT, {}, True),
        (New(), LIMIT, {}, True),
        (Delegating(New()), LIMIT, {}, True),
        (Delegating(OldAlone()), LIMIT, {}, True),
        (OtherNames(), OTHER_LIMIT, OTHER_NAMES, True),
        (Endless(), types.SimpleNamespace(), {}, False),
        # What its base class has alone is not its own limit.
        (Endless(), Inherited(), {}, False),
    ],
)
def test_time_limit_truncates_and_the_task_terminates(env, params, options, has_limit):
    adapted = envs.from_gymnax(env, params, **options)

    @jax.jit
    @jax.vmap
    def take(time, action):
        step = adapted.step(jax.random.key(0), env.state_class(time), action)
        return step.obs, step.terminated, step.truncated

    obs, *ends = take(np.int32([0, 0, 3]), np.int32([0, 1, 0]))
    np.testing.assert_array_equal(obs, [1, 1, 4])
    want = [[False, True, False], [False, False, has_limit]]
    np.testing.assert_array_equal(ends, want)


def test_both_flags_may_be_set_by_gymnax_itself():
    env = envs.make("CartPole-v1", max_steps_in_episode=1)

    @jax.jit
    def fall(keys):
        state, _ = env.reset(keys[0])
        step = env.step(keys[1], state.replace(theta=jnp.float32(1.0)), jnp.int32(0))
        return step.terminated, step.truncated

    assert all(fall(jax.random.split(jax.random.key(0))))


def test_what_does_not_fit_is_refused_while_tracing():
    options = {"limit_field": "max_timesteps", "time_field": "clock"}
    key, state = jax.random.key(0), OtherState(jnp.int32(0))
    wrong = envs.from_gymnax(OtherNames(), OTHER_LIMIT, **options)
    with pytest.raises(ValueError, match="`time_field` must be a field of the state"):
        wrong.step(key, state, 0)
    renamed = envs.from_gymnax(NotRenamed(), LIMIT)
    with pytest.raises(ValueError, match="write `is_terminated = is_terminal` below"):
        renamed.step(key, State(jnp.int32(0)), 0)
    four = envs.from_gymnax(Four(), LIMIT)
    with pytest.raises(ValueError, match=r"`step_env` must return .*, got 4 values"):
        four.step(key, state, 0)


def test_parameters_are_those_of_the_environment_by_default():
    env, params = gymnax.make("CartPole-v1")
    assert envs.from_gymnax(env).env_params == params
    with pytest.raises(TypeError, match="got Old without default_params"):
        envs.from_gymnax(Old())


def test_foreign_environment_gets_keys_of_the_caller():
    seen = []

    class Foreign(Old):
        def reset_env(self, key, params):
            seen.append(jax.random.key_impl(key))
            return jnp.float32(jax.random.poisson(key, 3.0)), State(0)

    jax.eval_shape(envs.from_gymnax(Foreign(), LIMIT).reset, jax.random.key(0))
    assert seen == ["threefry2x32"]


def run_python(code, *paths):
    path = os.pathsep.join([*map(str, paths), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_packages_that_draw_are_imported_when_gymnax_draws():
    run_python("""
import sys, jax
from rollout import envs

env = envs.make("Catch-bsuite")
assert not {"matplotlib", "seaborn", "pandas"} & set(sys.modules)
from gymnax.environments.bsuite import catch
assert catch.plt.get_backend().lower() == "agg"  # imported by this line
assert isinstance(sys.modules["matplotlib"].__file__, str)
state, _ = env.reset(jax.random.key(0))
assert next(env.render_frames([state])).ndim == 3
""")


def test_gymnax_that_reads_a_drawing_package_at_import_is_imported(tmp_path):
    folder = tmp_path / "gymnax"
    folder.mkdir()
    text = "import matplotlib.pyplot as plt\nBACKEND = plt.get_backend()\n"
    (folder / "__init__.py").write_text(text + "registered_envs = ['a']\n")
    run_python(
        """
from rollout.envs.suites import gymnax
assert gymnax.ids() == ("a",)
import sys
assert sys.modules["gymnax"].BACKEND.lower() == "agg"
""",
        tmp_path,
    )
