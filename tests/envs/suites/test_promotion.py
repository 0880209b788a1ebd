"""States that `reset` starts with integers and `step` continues with floats."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import plain_suites
import pytest
from flax import struct
from suite_checks import check_contract, play

from rollout import envs
from rollout.envs.suites import physics


@struct.dataclass
class State:
    """A position that starts as a Python integer and moves by halves."""

    position: jax.Array
    speed: jax.Array


def begin():
    return State(position=0, speed=jnp.int8(0))


def move(state):
    """The speed becomes a float one step later than the position."""
    return State(position=state.position + 0.5, speed=state.speed + state.position)


class GymnaxStyle:
    """An environment in the style of gymnax; the observation is an integer at first."""

    default_params = None

    def reset_env(self, key, params):
        del key, params
        return jnp.array([begin().position]), begin()

    def step_env(self, key, state, action, params):
        del key, action, params
        state = move(state)
        return jnp.array([state.position]), state, state.speed, False, {}

    def action_space(self, params):
        return envs.Discrete(2)

    def observation_space(self, params):
        return envs.Box(0.0, 99.0, (1,))


class BraxStyle:
    """An environment in the style of brax, with integers in `metrics` and `info`."""

    action_size = 1

    def reset(self, rng):
        del rng
        state, obs = begin(), jnp.zeros((1,), jnp.int32)
        info = {"speed": state.speed}
        return plain_suites.State(state.position, obs, 0, 0, {"sum": 0}, info)

    def step(self, state, action):
        del action
        old = State(position=state.data, speed=state.info["speed"])
        new = move(old)
        return state.replace(
            data=new.position,
            obs=jnp.array([new.position]),
            reward=new.speed,
            done=jnp.float32(0.0),
            metrics={"sum": state.metrics["sum"] + new.position},
            info={"speed": new.speed},
        )


class JaxmarlStyle:
    """An environment of one agent in the style of JaxMARL."""

    agents = ("solo",)

    def reset(self, key):
        del key
        return {"solo": jnp.array([begin().position])}, begin()

    def step_env(self, key, state, actions):
        del key, actions
        state = move(state)
        obs, dones = {"solo": jnp.array([state.position])}, {"solo": False}
        return obs, state, {"solo": state.speed}, {**dones, "__all__": False}, {}

    def action_space(self, agent):
        return envs.Discrete(2)

    def observation_space(self, agent):
        return envs.Box(0.0, 99.0, (1,))


@struct.dataclass
class Timestep:
    """A time step in the style of navix."""

    state: State
    observation: jax.Array
    action: jax.Array = -1
    reward: jax.Array = 0.0
    step_type: jax.Array = 0
    info: dict = struct.field(default_factory=dict)

    def is_termination(self):
        return jnp.bool_(False)

    is_truncation = is_termination


@struct.dataclass
class KeyedState(State):
    key: jax.Array


class NavixStyle:
    """An environment in the style of navix."""

    action_space = types.SimpleNamespace(maximum=1, dtype=np.int32)

    def reset(self, key):
        state = KeyedState(**vars(begin()), key=key)
        return Timestep(state, jnp.array([state.position]))

    def _step(self, timestep, action):
        del action
        old = timestep.state
        new = move(State(position=old.position, speed=old.speed))
        state = KeyedState(**vars(new), key=old.key)
        return Timestep(state, jnp.array([new.position]), reward=new.speed)


def adapt_physics(env):
    return physics.adapt(env, model_field="model", frame_field=None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: envs.from_gymnax(GymnaxStyle()),
        lambda: adapt_physics(BraxStyle()),
        lambda: envs.suites.from_jaxmarl(JaxmarlStyle()),
        lambda: envs.suites.from_navix(NavixStyle()),
    ],
    ids=["gymnax", "brax", "jaxmarl", "navix"],
)
def test_state_that_starts_with_integers_equals_python_loop(make):
    state, obs, rewards = State(position=0, speed=0), [], []
    for _ in range(6):
        state = move(state)
        obs.append(state.position)
        rewards.append(state.speed)
    env = make()
    _, rows = play(envs.vectorize(env, 2), num_steps=6)
    want = np.stack([rewards] * 2, axis=1)
    np.testing.assert_array_equal(rows.reward, want)
    next_obs = rows.next_obs
    if isinstance(next_obs, dict):
        next_obs = next_obs["agents"][:, :, 0]
    else:
        check_contract(env)
    np.testing.assert_array_equal(next_obs[..., 0], np.stack([obs] * 2, axis=1))
    if rows.info and isinstance(rows.info, dict):  # the metrics of brax
        np.testing.assert_array_equal(rows.info["sum"][:, 0], np.cumsum(obs))


def test_added_key_of_info_is_named():
    class AddingSuite(plain_suites.Suite):
        def step(self, state, action):
            state = super().step(state, action)
            return state.replace(info={**state.info, "energy": jnp.float32(1.0)})

    lanes = envs.vectorize(adapt_physics(AddingSuite()), 2)
    message = r"as `env.reset` does: .*, got another structure: .* at .info\['energy'\]"
    with pytest.raises(ValueError, match=message):
        play(lanes, num_steps=2)
