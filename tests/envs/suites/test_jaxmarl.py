"""The JaxMARL adapter, tested with environments that use all optional features."""

import functools
import re

import jax
import jax.numpy as jnp
import jaxmarl
import numpy as np
import plain_suites
import pytest
import suite_checks
from flax import struct
from jaxmarl.environments import spaces
from jaxmarl.wrappers import baselines

from rollout import envs

KEY = jax.random.key(3)
pytestmark = [
    pytest.mark.slow,  # the import alone takes seconds
    # The MPE environments add arrays of different ranks.
    pytest.mark.usefixtures("quick_compile", "key_reuse", "rank_promotion"),
]


@struct.dataclass
class DuelData:
    step: jax.Array
    is_out: jax.Array  # [3]


@struct.dataclass
class DuelState:
    state: DuelData


class Duel:
    """Two red agents and a blue agent; action 1 removes an agent.

    The episode ends if no agent remains. In step n (from 1), all agents have the
    reward n. The first observations are floats, later observations are integers, and
    the first step count is a Python number.
    """

    agents = ("red_0", "red_1", "blue_0")
    max_steps = 4

    def observation_space(self, agent):
        return spaces.Box(0, 9, (2,) if "red" in agent else (3,))

    def action_space(self, agent):
        return spaces.Discrete(3 if "red" in agent else 4)

    def observe(self, state, dtype):
        obs = {
            agent: jnp.full(self.observation_space(agent).shape, state.step, dtype)
            for agent in self.agents
        }
        return {**obs, "world_state": jnp.asarray(state.is_out, jnp.float32)}

    def reset(self, key):
        del key  # unused
        state = DuelData(step=0, is_out=jnp.zeros((3,), bool))
        return self.observe(state, jnp.float32), DuelState(state)

    def step_env(self, key, state, actions):
        state = state.state
        action = jnp.stack([actions[agent] for agent in self.agents])
        is_out = state.is_out | (action == 1)
        state = DuelData(step=jnp.int32(state.step + 1), is_out=is_out)
        dones = dict(zip(self.agents, is_out, strict=True))
        dones["__all__"] = jnp.all(is_out) | (state.step >= self.max_steps)
        reward = dict.fromkeys((*self.agents, "__all__"), state.step)
        info = {"draw": jax.random.uniform(key), "count": 3}
        return self.observe(state, jnp.int32), DuelState(state), reward, dones, info

    def get_avail_actions(self, state):
        """Masks the action whose number is the number of steps."""
        return {
            agent: (jnp.arange(self.action_space(agent).n) != state.state.step).astype(
                jnp.float32
            )
            for agent in self.agents
        }


make_env = functools.cache(jaxmarl.make)  # tests share compiled programs


def test_agents_with_masks_equal_plain_loop():
    def observation(obs):
        return {group: x["observation"] for group, x in obs.items()}

    plain = plain_suites.jaxmarl_style(Duel())
    step = suite_checks.check_steps_of_agents(
        plain, observe_fn=observation, num_steps=4
    )
    assert step.episode_truncated
    lanes = envs.vectorize(plain.adapt(), 3)
    rows = suite_checks.collect(lanes, num_steps=24)
    for obs in (rows.obs, rows.next_obs):
        assert jax.vmap(jax.vmap(lanes.observation_space.contains))(obs).all()
    assert (rows.info.env["count"] == 3).all()


TERMINATED, TRUNCATED = (True, False), (False, True)


def test_agents_terminate_separately_or_together():
    env = envs.suites.from_jaxmarl(Duel())
    state, _, _ = env.reset(KEY)
    step = env.step(KEY, state, {"red": jnp.array([0, 1]), "blue": jnp.array([0])})
    assert step.terminated.tolist() == [False, True, False]
    assert step.acting.tolist() == [True, False, True]
    assert not step.truncated.any()
    assert not step.episode_terminated
    red = step.obs["red"]
    # After the first step, action 1 is masked.
    np.testing.assert_array_equal(red["action_mask"], [[True, False, True]] * 2)
    np.testing.assert_array_equal(red["world_state"], [[0.0, 1.0, 0.0]] * 2)
    assert step.obs["blue"]["action_mask"].shape == (1, 4)
    step = env.step(KEY, state, {"red": jnp.array([1, 1]), "blue": jnp.array([1])})
    assert (step.episode_terminated, step.episode_truncated) == TERMINATED


@struct.dataclass
class SoloState:
    clock: jax.Array


class Solo:
    """A single agent; the fields for limit and time have other names."""

    agents = ("solo",)
    horizon = 2

    def observation_space(self, agent):
        return spaces.MultiDiscrete([5])

    def action_space(self, agent):
        return spaces.Box(-1, 1, (2,))

    def reset(self, key):
        return {"solo": jnp.zeros((1,), jnp.int32)}, SoloState(jnp.int32(0))

    def step_env(self, key, state, actions):
        state = SoloState(state.clock + 1)
        done = (state.clock >= self.horizon) | (actions["solo"][0] > 0)
        dones = {"solo": done, "__all__": done}
        obs = {"solo": state.clock.reshape(1)}
        return obs, state, {"solo": 1.0}, dones, {"name": "no array"}

    def get_avail_actions(self, state):
        """Returns an array like JaxNav's, which does not mask discrete actions."""
        return {"solo": jnp.ones((2,))}


def play_solo(env, pushes):
    state, _, _ = env.reset(KEY)
    for push in pushes:
        step = env.step(KEY, state, {"agents": jnp.full((1, 2), push, jnp.float32)})
        state = step.state
    return step


@pytest.mark.parametrize(
    ("options", "pushes", "ending"),
    [
        ({"limit_field": "horizon", "time_field": "clock"}, [-1, -1], TRUNCATED),
        ({"limit_field": "horizon", "time_field": "clock"}, [1], TERMINATED),
        ({}, [-1, -1], TERMINATED),  # unknown limit
    ],
)
def test_limit_and_time_fields_are_options(options, pushes, ending):
    step = play_solo(envs.suites.from_jaxmarl(Solo(), **options), pushes)
    assert (step.episode_terminated, step.episode_truncated) == ending
    assert step.info == {}  # a string is not an array


def test_spaces_include_mask_and_world_state():
    env = envs.suites.from_jaxmarl(Duel())
    assert env.action_spaces == {"red": envs.Discrete(3), "blue": envs.Discrete(4)}
    blue = env.observation_spaces["blue"].spaces
    assert sorted(blue) == ["action_mask", "observation", "world_state"]
    assert blue["observation"] == envs.Box(0, 9, (3,))
    assert blue["action_mask"] == envs.Box(0, 1, (4,), jnp.dtype(bool))
    assert blue["world_state"].shape == (3,)
    solo = envs.suites.from_jaxmarl(Solo())
    assert solo.observation_spaces["agents"].dtype == jnp.int32
    np.testing.assert_array_equal(solo.observation_spaces["agents"].high, [4])
    assert solo.action_spaces == {"agents": envs.Box(-1, 1, (2,))}
    space = envs.suites.from_jaxmarl(WrongSpaceSolo()).observation_spaces["agents"]
    assert space == envs.Box(0, 255, (2, 3), jnp.dtype(jnp.uint8))


class WrongSpaceSolo(Solo):
    """Declares a wrong observation shape and dtype, as Overcooked does."""

    def observation_space(self, agent):
        return spaces.Box(0, 255, (3, 2))

    def reset(self, key):
        return {"solo": jnp.zeros((2, 3), jnp.uint8)}, SoloState(jnp.int32(0))


def test_agents_with_equal_spaces_form_groups():
    tag = envs.suites.from_jaxmarl(make_env("MPE_simple_tag_v3"))
    assert tag.groups == {
        "adversary": ("adversary_0", "adversary_1", "adversary_2"),
        "agent": ("agent_0",),
    }
    # A group without a common prefix has the name of its first agent.
    crypto = envs.suites.from_jaxmarl(make_env("MPE_simple_crypto_v3"))
    assert crypto.groups == {"eve_0": ("eve_0",), "alice_0": ("alice_0", "bob_0")}
    spread = envs.suites.from_jaxmarl(make_env("MPE_simple_spread_v3"))
    assert spread.groups == {"agents": ("agent_0", "agent_1", "agent_2")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_field": "clock"}, "field of `env`, and `time_field"),
        ({"limit_field": "horizon", "time_field": "age"}, "got 'horizon' and 'age'"),
    ],
)
def test_error_names_wrong_fields(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        envs.suites.from_jaxmarl(Solo(), **options)


@pytest.mark.parametrize(
    "wrap",
    [
        baselines.LogWrapper,
        baselines.SMAXLogWrapper,
        lambda env: baselines.CTRolloutManager(env, batch_size=2),
    ],
)
def test_jaxmarl_wrappers_raise(wrap):
    env = wrap(make_env("MPE_simple_spread_v3"))
    message = f"without its wrappers, got {type(env).__name__}"
    with pytest.raises(TypeError, match=re.escape(message)):
        envs.suites.from_jaxmarl(env)
