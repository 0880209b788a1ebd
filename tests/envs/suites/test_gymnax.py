"""Adapters of gymnax environments: old and new interfaces, and custom classes."""

import os
import subprocess
import sys
import types

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from flax import struct
from gymnax.environments import environment

import rollout
from rollout import envs


@struct.dataclass
class State:
    time: jax.Array


@struct.dataclass
class TimestepState:
    timestep: jax.Array


PARAMS = types.SimpleNamespace(max_steps_in_episode=4)
TIMESTEPS_PARAMS = types.SimpleNamespace(max_timesteps=4)


@struct.dataclass
class InheritedParams(environment.EnvParams):
    """Parameters of an old environment, with gymnax's default limit of one step."""


class BaseEnv:
    """Counts its steps: the observation and the state are the number of steps."""

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


class DoneEnv(BaseEnv):
    """Has the interface before gymnax 1.0: `done` includes the limit; action 1 ends."""

    def endings(self, time, is_over, params):
        (limit,) = vars(params).values()
        return (is_over | (time >= limit),)


class SixValueEnv(BaseEnv):
    def endings(self, time, is_over, params):
        return is_over, time >= params.max_steps_in_episode


class DoneEnvOnNewBase(DoneEnv, environment.Environment):
    """Has the old interface and inherits `is_truncated` from gymnax 1."""

    def is_terminal(self, state, params):
        return state.time >= params.max_steps_in_episode


class MinimalDoneEnv(DoneEnv, environment.Environment):
    """Defines `step_env` and inherits all other methods."""


class RenamedDoneEnv(DoneEnvOnNewBase):
    """Returns the discount in `info`; it calls `is_terminated` since gymnax 1.0."""

    is_terminated = DoneEnvOnNewBase.is_terminal

    def step_env(self, key, state, action, params):
        *result, info = super().step_env(key, state, action, params)
        return *result, {**info, "discount": self.discount(result[1], params)}


class UnrenamedDoneEnv(RenamedDoneEnv):
    is_terminated = environment.Environment.is_terminated


class OuterEnv(BaseEnv, environment.Environment):
    """Steps an environment of the old interface that it holds."""

    def step_env(self, key, state, action, params):
        return UnrenamedDoneEnv().step_env(key, state, action, params)


class UnterminatedEnv(BaseEnv, environment.Environment):
    """Lacks both methods that gymnax's `discount` may call."""

    def step_env(self, key, state, action, params):
        return state.time, state, self.discount(state, params), False, {}


class TruncatedEnv(BaseEnv, environment.Environment):
    def endings(self, time, is_over, params):
        return (is_over,)

    def is_terminated(self, state, params):
        return jnp.bool_(False)


class DelegatingWrapper:
    """A wrapper that delegates all attributes to its environment."""

    def __init__(self, env):
        self._env = env

    def __getattr__(self, name):
        return getattr(self._env, name)


class UnlimitedEnv(BaseEnv):
    def endings(self, time, is_over, params):
        return (is_over,)


class OtherFieldsEnv(DoneEnv):
    state_class = TimestepState


class AttributeEnv(DoneEnvOnNewBase):
    """Has the limit as an attribute, as most environments before gymnax 1.0."""

    max_steps = limit = 4

    def endings(self, time, is_over, params):
        return (is_over | (time >= self.limit),)


class OtherAttributeEnv(AttributeEnv):
    max_steps = None


class FourValueEnv(BaseEnv):
    def endings(self, time, is_over, params):
        return ()


OTHER_FIELDS = {"limit_field": "max_timesteps", "time_field": "timestep"}


@pytest.mark.parametrize(
    ("env", "params", "options", "has_limit"),
    [
        (DoneEnv(), PARAMS, {}, True),
        (SixValueEnv(), PARAMS, {}, True),
        (DoneEnvOnNewBase(), PARAMS, {}, True),
        (MinimalDoneEnv(), PARAMS, {}, True),
        (RenamedDoneEnv(), PARAMS, {}, True),
        (TruncatedEnv(), PARAMS, {}, True),
        (DelegatingWrapper(TruncatedEnv()), PARAMS, {}, True),
        (DelegatingWrapper(MinimalDoneEnv()), PARAMS, {}, True),
        (OtherFieldsEnv(), TIMESTEPS_PARAMS, OTHER_FIELDS, True),
        (AttributeEnv(), InheritedParams(), {}, True),
        (OtherAttributeEnv(), InheritedParams(), {"limit_field": "limit"}, True),
        (UnlimitedEnv(), types.SimpleNamespace(), {}, False),
        # The default limit of the base class is not a limit of the environment.
        (UnlimitedEnv(), InheritedParams(), {}, False),
    ],
)
def test_time_limit_truncates_and_the_task_terminates(env, params, options, has_limit):
    adapted = envs.from_gymnax(env, params, **options)

    @jax.jit
    @jax.vmap
    def step_states(time, action):
        step = adapted.step(jax.random.key(0), env.state_class(time), action)
        return step.obs, step.terminated, step.truncated

    obs, *ends = step_states(np.int32([0, 0, 3]), np.int32([0, 1, 0]))
    np.testing.assert_array_equal(obs, [1, 1, 4])
    want = [[False, True, False], [False, False, has_limit]]
    np.testing.assert_array_equal(ends, want)


def test_limits_as_attributes_truncate_all_episodes():
    """A plain loop of 8 episodes reaches the limit 8 times."""
    env = envs.from_gymnax(AttributeEnv(), InheritedParams())
    policy = rollout.stateless_policy(lambda params, obs, key: np.zeros(2, np.int32))
    collector = rollout.Collector(env=envs.vectorize(env, 2), policy=policy)
    run = quick_jit(lambda x: collector.collect_steps(collector.init(x), None, 16)[1])
    rows = run(jax.random.key(0))
    assert (int(rows.truncated.sum()), int(rows.terminated.sum())) == (8, 0)


def test_gymnax_may_set_both_flags():
    env = envs.make("CartPole-v1", max_steps_in_episode=1)

    @jax.jit
    def step_fallen(keys):
        state, _ = env.reset(keys[0])
        step = env.step(keys[1], state.replace(theta=jnp.float32(1.0)), jnp.int32(0))
        return step.terminated, step.truncated

    assert all(step_fallen(jax.random.split(jax.random.key(0))))


def test_unsupported_environments_raise_while_tracing():
    options = {"limit_field": "max_timesteps", "time_field": "clock"}
    key, state = jax.random.key(0), TimestepState(jnp.int32(0))
    wrong_field = envs.from_gymnax(OtherFieldsEnv(), TIMESTEPS_PARAMS, **options)
    with pytest.raises(ValueError, match="`time_field` must"):
        wrong_field.step(key, state, 0)
    for env in (UnrenamedDoneEnv(), OuterEnv()):
        with pytest.raises(ValueError, match=r"`Unr.*`is_terminated = is_terminal`"):
            envs.from_gymnax(env, PARAMS).step(key, State(jnp.int32(0)), 0)
    with pytest.raises(
        ValueError, match="`UnterminatedEnv` must define `is_terminated`"
    ):
        envs.from_gymnax(UnterminatedEnv(), PARAMS).step(key, State(jnp.int32(0)), 0)
    four_values = envs.from_gymnax(FourValueEnv(), PARAMS)
    with pytest.raises(ValueError, match=r"`step_env` must return .*, got 4 values"):
        four_values.step(key, state, 0)


def test_params_default_to_environment_params():
    env, params = gymnax.make("CartPole-v1")
    assert envs.from_gymnax(env).env_params == params
    with pytest.raises(TypeError, match="DoneEnv without default_params"):
        envs.from_gymnax(DoneEnv())


def test_environment_receives_plain_keys():
    key_types = []

    class PoissonResetEnv(DoneEnv):
        def reset_env(self, key, params):
            key_types.append(jax.random.key_impl(key))
            return jnp.float32(jax.random.poisson(key, 3.0)), State(0)

    env = envs.from_gymnax(PoissonResetEnv(), InheritedParams())
    jax.eval_shape(env.reset, jax.random.key(0))
    assert key_types == ["threefry2x32"]


def run_python(code, *paths):
    path = os.pathsep.join([*map(str, paths), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_plotting_packages_are_imported_lazily():
    run_python("""
import sys, jax, numpy as np
from rollout import envs

env = envs.make("Catch-bsuite")
assert not {"matplotlib", "seaborn", "pandas"} & set(sys.modules)
from gymnax.environments.bsuite import catch
assert catch.plt.get_backend().lower() == "agg"  # this line imports matplotlib
assert isinstance(sys.modules["matplotlib"].__file__, str)
shapes, _ = jax.eval_shape(env.reset, jax.random.key(0))
state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
assert next(env.render_frames([state])).ndim == 3
""")


@pytest.mark.slow
def test_gymnax_may_use_plotting_packages_at_import(tmp_path):
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
