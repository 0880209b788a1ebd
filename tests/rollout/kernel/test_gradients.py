"""Gradients flow through the kernel, with either way of auto-reset."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_env

import rollout
from rollout import envs


def act(params, obs, key):
    return jnp.tanh(obs @ params["w"] + params["b"][None])


POLICY = rollout.stateless_policy(act)


def mean_reward(params, env, carry):
    collector = rollout.Collector(env=env, policy=POLICY)
    _, trajectory = collector.collect_steps(carry, params, 20)
    return trajectory.reward.mean()


pytestmark = pytest.mark.slow  # one gradient of test_kernel.py is fast


@pytest.fixture(scope="module", params=["compact", "select"])
def start(request):
    env = envs.vectorize(
        make_env("Pendulum-v1", max_steps_in_episode=200), 8, auto_reset=request.param
    )
    return env, rollout.Collector(env=env, policy=POLICY).init(jax.random.key(0))


PARAMS = {"w": jnp.array([[0.3], [-0.2], [0.5]]), "b": jnp.array([0.1])}


@functools.cache
def with_gradients():
    """The mean reward, and its gradients by policy and environment, in one program."""
    gradients = jax.value_and_grad(mean_reward, argnums=(0, 1), allow_int=True)
    return jax.jit(gradients)


def test_gradient_of_policy_parameters_agrees_with_finite_differences(start):
    _, (gradient, _) = with_gradients()(PARAMS, *start)
    size = 1e-2
    for name, row in (("w", 0), ("w", 1), ("w", 2), ("b", 0)):
        ends = []
        for sign in (-1, 1):
            moved = PARAMS[name].at[row].add(sign * size)
            ends.append(float(with_gradients()({**PARAMS, name: moved}, *start)[0]))
        expected = (ends[1] - ends[0]) / (2 * size)
        # Central differences err by O(size^2) relative to the third derivative, and by
        # float32's 1e-7 * |reward| / size = 1e-5 * 5.
        np.testing.assert_allclose(
            np.ravel(gradient[name])[row], expected, rtol=2e-2, atol=1e-3
        )
        assert abs(expected) > 1e-3


def test_gradient_of_environment_parameters_flows(start):
    _, (_, gradient) = with_gradients()(PARAMS, *start)
    gravity = gradient.env.env_params.g
    assert np.isfinite(gravity)
    assert gravity != 0
