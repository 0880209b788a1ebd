"""Gradients flow through the kernel, with either way of auto-reset."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_env

import rollout
from rollout import envs

PARAMS = {"w": jnp.array([[0.3], [-0.2], [0.5]]), "b": jnp.array([0.1])}


@rollout.stateless_policy
def policy(params, obs, key):
    return jnp.tanh(obs @ params["w"] + params["b"][None])


@functools.partial(jax.value_and_grad, argnums=(0, 1), allow_int=True)
def mean_reward(params, env, carry):
    collector = rollout.Collector(env=env, policy=policy)
    return collector.collect_steps(carry, params, 20)[1].reward.mean()


@pytest.mark.slow  # one gradient of test_kernel.py is fast
@pytest.mark.parametrize("auto_reset", ["compact", "select"])
def test_gradients_agree_with_finite_differences(auto_reset):
    env = make_env("Pendulum-v1", max_steps_in_episode=200)
    env = envs.vectorize(env, 8, auto_reset=auto_reset)
    carry = rollout.Collector(env=env, policy=policy).init(jax.random.key(0))
    differentiate = jax.jit(mean_reward)
    _, (gradient, of_env) = differentiate(PARAMS, env, carry)
    size = 1e-2
    for name, row in (("w", 0), ("w", 1), ("w", 2), ("b", 0)):
        below, above = (
            float(differentiate(PARAMS | {name: moved}, env, carry)[0])
            for moved in (PARAMS[name].at[row].add(x) for x in (-size, size))
        )
        expected = (above - below) / (2 * size)
        # Central differences err by O(size^2) relative to the third derivative, and by
        # float32's 1e-7 * |reward| / size = 1e-5 * 5.
        got = np.ravel(gradient[name])[row]
        np.testing.assert_allclose(got, expected, rtol=2e-2, atol=1e-3)
        assert abs(expected) > 1e-3
    assert np.isfinite(of_env.env.env_params.g)
    assert of_env.env.env_params.g != 0
