"""The contract of several agents: the results of its lanes, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import ChanceEnv, OneAgent, schedule
from cases import CountEnv, quick_jit, raw

from rollout import envs

B = 3


def keys(num=B):
    return jax.random.split(jax.random.key(0), num)


def one_step(env, num_envs=B):
    """The first step of every lane, with the actions that the space draws."""
    env = envs.vectorize_agents(env, num_envs)

    @quick_jit
    def run(reset_keys, action_keys, step_keys):
        state, obs = env.reset(reset_keys)
        action = jax.vmap(env.action_space.sample)(action_keys)
        return obs, action, env.step(step_keys, state, action)

    return env, *run(keys(num_envs), keys(num_envs), keys(num_envs))


def test_lanes_have_stacked_groups_and_say_who_acts():
    env, obs, action, step = one_step(ChanceEnv())
    assert env.agents == ("a", "b", "c")
    assert env.groups == {"two": ("a", "c"), "one": ("b",)}
    shapes = {"two": (B, 2), "one": (B, 1, 2)}
    assert {x: action[x].shape for x in action} == shapes
    assert {x: obs[x].shape for x in obs} == {**shapes, "acting": (B, 3)}
    inside = quick_jit(jax.vmap(env.observation_space.contains))
    assert np.all(inside(obs))
    assert np.all(inside(step.obs))
    assert np.all(quick_jit(jax.vmap(env.action_space.contains))(action))
    np.testing.assert_array_equal(step.info.env["action"]["two"], action["two"])


def test_reward_is_that_of_the_team():
    _, obs, _, step = one_step(ChanceEnv())
    info = step.info.agents
    assert (step.reward.shape, step.reward.dtype) == ((B,), jnp.float32)
    np.testing.assert_array_equal(step.reward, info.reward.sum(axis=1))
    np.testing.assert_array_equal(info.acted, obs["acting"])
    np.testing.assert_array_equal(info.agent_length, obs["acting"])
    np.testing.assert_array_equal(
        info.unassigned_reward, jnp.where(obs["acting"], 0.0, info.reward)
    )


@pytest.mark.slow
def test_who_has_ended_acts_no_more_and_ends_no_more():
    env = schedule(
        acting=np.ones((5, 2)),
        reward=np.ones((4, 2)),
        terminated=[[0, 1], [0, 1], [0, 0], [0, 0]],
        truncated=[[0, 0], [0, 0], [0, 1], [0, 0]],
    )
    env = envs.vectorize_agents(env, 1)
    state, obs = quick_jit(env.reset)(keys(1))
    take, seen = quick_jit(env.step), []
    for _ in range(4):
        action = {"all": jnp.zeros((1, 2), jnp.int32)}
        step = take(keys(1), state, action)
        info = step.info.agents
        flags = info.terminated | info.truncated
        seen.append((bool(info.acted[0, 1]), bool(flags[0, 1])))
        state, obs = step.state, step.obs
    assert seen == [(True, True), (False, False), (False, False), (False, False)]
    assert not obs["acting"][0, 1]


def test_word_of_an_agent_counts_to_its_end():
    """24 bits hold the number of actions, and stay at the largest."""
    env = envs.vectorize_agents(OneAgent(CountEnv()), 1)
    state, _ = quick_jit(env.reset)(keys(1))
    packed = state.packed + jnp.uint32((2**24 - 2) << 8)
    state = state.replace(packed=packed)
    take, lengths = quick_jit(env.step), []
    for _ in range(2):
        step = take(keys(1), state, {"all": jnp.zeros((1, 1), jnp.int32)})
        state = step.state
        lengths.append(int(step.info.agents.agent_length[0, 0]))
        assert step.info.agents.acted[0, 0]
    assert lengths == [2**24 - 1, 2**24 - 1]


def test_space_of_several_parts_draws_each_from_a_key_of_its_own():
    space = envs.spaces.Repeated(
        envs.Dict({"x": envs.Discrete(9), "y": envs.Box(0, 1, (2,))}), 4
    )
    drawn = quick_jit(space.sample)(jax.random.key(1))
    assert drawn["x"].shape == (4,)
    assert drawn["y"].shape == (4, 2)
    assert len(np.unique(drawn["y"])) == 8
    assert space.contains(drawn)
    assert not space.contains({**drawn, "x": drawn["x"].at[2].set(9)})
    assert space.shape is None
    assert envs.spaces.Repeated(envs.Box(0, 1, (2,)), 4).shape == (4, 2)


def test_lanes_of_one_agent_are_those_of_the_plain_environment():
    plain = envs.vectorize(CountEnv(), B)
    want_state, want = quick_jit(plain.reset)(keys())
    env = envs.vectorize_agents(OneAgent(CountEnv()), B)
    state, obs = quick_jit(env.reset)(keys())
    np.testing.assert_array_equal(obs["all"][:, 0], want)
    jax.tree.map(np.testing.assert_array_equal, raw(state.env_state), raw(want_state))
