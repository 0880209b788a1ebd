"""JAX environments in virtual time: the rows, their order and their times."""

import jax
import numpy as np
import pytest
from simulated import simulate_latency

from rollout import envs
from rollout.envs import prng

B = 4
ALL = np.ones(B, bool)
NUMBERS = np.arange(B)


def by_number(rng, env_id, number):
    """Environment i takes 4 - i seconds."""
    del rng, number
    return float(B - env_id)


@pytest.fixture
def cart_pole():
    return envs.make("CartPole-v1")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def draw(rng, num=B):
    return rng.integers(0, 2, num, dtype=np.int32)


@jax.jit
def kernel_reset(env, seeds):
    episode_key = jax.vmap(jax.random.key)(seeds)
    state, obs = env.reset(prng.fold_in(episode_key, envs.types.RESET))
    return envs.types.Lanes(episode_key=episode_key, state=state, obs=obs)


@jax.jit
def kernel_step(env, lanes, number, action, next_seeds):
    """As a collector steps lanes: the answer, then the lanes with new episodes."""
    step_keys = prng.fold_in(lanes.episode_key, number)
    result = env.step(step_keys, lanes.state, action)
    next_keys = jax.vmap(jax.random.key)(next_seeds)
    lanes = lanes._replace(state=result.state, obs=result.obs)
    done = result.terminated | result.truncated
    return result, env.reset_done(lambda lane: next_keys[lane], done, lanes)


def test_rows_are_those_of_vectorize(cart_pole, rng):
    # Seeds up to the largest, and 60 steps: each ends more than once.
    seeds = np.array([0, 7, 2**31, 2**32 - 50 * B], np.uint32)
    env, kernel = simulate_latency(cart_pole, B), envs.vectorize(cart_pole, B)
    lanes, number = kernel_reset(kernel, seeds), np.zeros(B, np.int32)
    np.testing.assert_array_equal(env.reset(seeds, ALL), lanes.obs)
    num_done = 0
    for _ in range(60):
        action, next_seeds = draw(rng), seeds + np.uint32(B)
        number += 1
        want, lanes = kernel_step(kernel, lanes, number, action, next_seeds)
        step = env.step(action)
        for name in ("obs", "reward", "terminated", "truncated"):
            got, expected = getattr(step, name), np.asarray(getattr(want, name))
            np.testing.assert_array_equal(got, expected)
            assert got.dtype == expected.dtype
        assert not step.faulty.any()
        assert step.mask is None
        done = step.terminated | step.truncated
        seeds, number[done] = np.where(done, next_seeds, seeds), 0
        obs = env.reset(seeds, done) if done.any() else step.obs
        np.testing.assert_array_equal(obs, lanes.obs)
        num_done += np.count_nonzero(done)
    assert num_done > B
    assert env.now == 0.0


def test_one_stream_is_the_same_whoever_else_is_sent(cart_pole, rng):
    together, apart = (simulate_latency(cart_pole, B) for _ in range(2))
    for env in (together, apart):
        env.reset(NUMBERS.astype(np.uint32), ALL)
    for _ in range(5):
        action = draw(rng)
        want = together.step(action)
        for numbers in ([2], [3, 0], [1]):
            apart.send(action[numbers], np.array(numbers))
        got, env_id = apart.receive(B)
        np.testing.assert_array_equal(env_id, [2, 3, 0, 1])
        want = jax.tree.map(lambda x, rows=env_id: x[rows], want)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_answers_come_in_the_order_of_their_times(cart_pole, rng):
    env = simulate_latency(cart_pole, B, latency_fn=by_number)
    env.reset(NUMBERS.astype(np.uint32), ALL)
    env.send(draw(rng), NUMBERS)
    assert env.now == 0.0
    assert env.receive(2)[1].tolist() == [3, 2]
    assert env.now == 2.0
    env.send(draw(rng, 1), np.array([3]))  # at 2, so it answers at 3, after 1
    step, env_id = env.receive(3)
    assert env_id.tolist() == [1, 3, 0]
    assert env_id.dtype == np.int32
    assert env.now == 4.0
    assert step.obs.shape == (3, 4)


def test_a_timeout_loses_nothing(cart_pole, rng):
    env = simulate_latency(cart_pole, B, latency_fn=by_number)
    env.reset(NUMBERS.astype(np.uint32), ALL)
    env.send(draw(rng), NUMBERS)
    with pytest.raises(TimeoutError, match=r"fewer than 3 answered in 2\.5 seconds"):
        env.receive(3, timeout=2.5)
    assert env.now == 2.5
    assert env.receive(3, timeout=0.5)[1].tolist() == [3, 2, 1]
    assert env.now == 3.0


def test_a_reset_drops_what_is_in_flight(cart_pole, rng):
    env = simulate_latency(cart_pole, B, latency_fn=by_number)
    env.reset(NUMBERS.astype(np.uint32), ALL)
    env.send(draw(rng), NUMBERS)
    first = env.reset(NUMBERS.astype(np.uint32), NUMBERS >= 2)
    assert env.receive(2)[1].tolist() == [1, 0]
    np.testing.assert_array_equal(
        first[2:], env.reset(NUMBERS.astype(np.uint32), ALL)[2:]
    )
    env.send(draw(rng), NUMBERS)
