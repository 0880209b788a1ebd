"""One environment becomes B of them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit, raw
from suite_checks import play

from rollout import envs


def test_rewards_and_flags_are_cast_and_nothing_stays_weakly_typed():
    env = envs.vectorize(CountEnv(), 2)

    def play(key):
        reset_keys, step_keys = jax.random.split(key, (2, 2))
        state, obs = env.reset(reset_keys)
        return state, obs, env.step(step_keys, state, jnp.zeros(2, jnp.int32))

    state, obs, step = jax.eval_shape(play, jax.random.key(0))
    assert step.reward.dtype == jnp.float32
    assert step.terminated.dtype == step.truncated.dtype == bool
    state.pop("key"), step.state.pop("key")
    assert not any(x.weak_type for x in jax.tree.leaves((state, obs, step)))


def of_each(length, limit):
    """Lanes that terminate after a length, which a reset sets, or stop at a limit."""
    every = CountEnv(min_length=length, max_length=length, limit=limit)
    return envs.vectorize_each(every, auto_reset="compact")


def test_every_lane_has_parameters_of_its_own():
    length, limit = np.array([3, 9, 2] * 6), np.array([9, 4, 9] * 6)
    _, trajectory = play(of_each(length, limit), 12)
    step = np.arange(1, 13)[:, None]  # a multiple of 2, 3 and 4
    length, limit = length[None], limit[None]
    np.testing.assert_array_equal(
        trajectory.terminated, (step % length == 0) & (length < limit)
    )
    np.testing.assert_array_equal(
        trajectory.truncated, (step % limit == 0) & (limit < length)
    )
    steps = (step - 1) % np.minimum(length, limit) + 1
    np.testing.assert_array_equal(trajectory.episode_length, steps)


@pytest.mark.usefixtures("key_reuse")
def test_lanes_with_equal_parameters_are_those_of_vectorize():
    each = of_each(np.full(4, 9), np.full(4, 5))
    same = envs.vectorize(CountEnv(min_length=9, max_length=9, limit=5), 4)
    assert each.action_space == same.action_space

    @quick_jit
    def run(keys):
        results = []
        for env in (each, same):
            state, obs = env.reset(keys)
            step = env.step(keys, state, jnp.arange(4) % 3)
            lanes = envs.types.Lanes(episode_key=keys, state=step.state, obs=step.obs)
            fresh = env.reset_done(lambda lane: keys[lane], jnp.arange(4) < 2, lanes)
            results.append(raw((obs, step, fresh)))
        return results

    chex.assert_trees_all_equal(*run(jax.random.split(jax.random.key(0), 4)))
