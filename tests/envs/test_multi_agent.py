"""Vectorized environments with several agents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from agents import ChanceEnv, OneAgent
from cases import CountEnv, quick_jit, raw

from rollout import envs

B = 3


@functools.cache
def first_step():
    """Returns the first step of all lanes and the results of `contains`."""
    env = envs.vectorize(ChanceEnv(), B)

    @quick_jit
    def run(key):
        reset_keys, action_keys, step_keys = jax.random.split(key, (3, B))
        state, obs = env.reset(reset_keys)
        action = jax.vmap(env.action_space.sample)(action_keys)
        step = env.step(step_keys, state, action)
        contains_obs = jax.vmap(env.observation_space.contains)
        contains_action = jax.vmap(env.action_space.contains)(action)
        return (
            obs,
            action,
            step,
            (contains_obs(obs), contains_obs(step.obs), contains_action),
        )

    return env, *jax.device_get(run(jax.random.key(0)))


def test_groups_are_stacked_with_acting_flags():
    env, obs, action, step, contained = first_step()
    assert env.agents == ("a", "b", "c")
    assert env.groups == {"two": ("a", "c"), "one": ("b",)}
    shapes = {"two": (B, 2), "one": (B, 1, 2)}
    assert {x: action[x].shape for x in action} == shapes
    assert {x: obs[x].shape for x in obs} == {**shapes, "acting": (B, 3)}
    assert np.all(contained)
    np.testing.assert_array_equal(step.info.env["action"]["two"], action["two"])


def test_reward_is_the_team_reward():
    _, obs, _, step, _ = first_step()
    info = step.info.agents
    assert (step.reward.shape, step.reward.dtype) == ((B,), jnp.float32)
    np.testing.assert_array_equal(step.reward, info.reward.sum(axis=1))
    np.testing.assert_array_equal(info.acted, obs["acting"])
    np.testing.assert_array_equal(info.agent_length, obs["acting"])
    np.testing.assert_array_equal(
        info.unassigned_reward, np.where(obs["acting"], 0.0, info.reward)
    )


def test_agent_step_count_saturates():
    """The number of actions has 24 bits and stays at its maximum."""
    env = envs.vectorize(OneAgent(CountEnv()), 1)

    @quick_jit
    def run(key):
        reset_keys, *step_keys = jax.random.split(key, (3, 1))
        state, _ = env.reset(reset_keys)
        state = state.replace(packed=state.packed + jnp.uint32((2**24 - 2) << 8))
        agent_infos = []
        for step_key in step_keys:
            step = env.step(step_key, state, {"all": jnp.zeros((1, 1), jnp.int32)})
            state = step.state
            agent_infos.append((step.info.agents.agent_length, step.info.agents.acted))
        return agent_infos

    for length, acted in run(jax.random.key(0)):
        np.testing.assert_array_equal(length, 2**24 - 1)
        assert acted.all()


def test_single_agent_equals_plain_environment():
    plain = envs.vectorize(CountEnv(), B)
    env = envs.vectorize(OneAgent(CountEnv()), B)

    @quick_jit
    def reset_envs(keys):
        (state, obs), want = env.reset(keys), plain.reset(keys)
        return (raw(state.env_state), obs), raw(want)

    with jax.debug_key_reuse(False):
        (state, obs), (want_state, want) = jax.device_get(
            reset_envs(jax.random.split(jax.random.key(0), B))
        )
    np.testing.assert_array_equal(obs["all"][:, 0], want)
    jax.tree.map(np.testing.assert_array_equal, state, want_state)
