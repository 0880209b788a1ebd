"""Advantages and returns against plain loops, with endings, windows and void rows."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import collect, on_a_gpu, raw

import rollout

T, B, GAMMA, LAM = 64, 16, 0.9, 0.7
# Float32 sums of at most 64 terms against float64.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def make_trajectory(seed=0, void=0.0):
    """Random rewards and values over real endings, both flags among them."""
    rng = np.random.default_rng(seed)
    trajectory = jax.device_get(raw(collect("count")[1]))
    mask = rng.random((T, B)) >= void
    reward, value, next_value = rng.normal(size=(3, T, B)).astype(np.float32)
    # A value that counts nowhere may be anything.
    next_value = np.where(trajectory.terminated, np.float32(np.nan), next_value)
    changes = {"reward": reward, "mask": mask, "extras": {"value": value}}
    return jax.tree.map(jnp.asarray, (trajectory.replace(**changes), next_value))


def find_next(trajectory):
    """The next row that is not void, if it is of the same episode; else None."""
    mask, episode = np.asarray(trajectory.mask), np.asarray(trajectory.episode_id)

    def after(t, lane):
        later = np.flatnonzero(mask[t + 1 :, lane]) + t + 1
        same = later[:1][episode[later[:1], lane] == episode[t, lane]]
        return same[0] if same.size else None

    return [[after(t, lane) for lane in range(B)] for t in range(T)]


def plain_lambda_returns(trajectory, next_value, gamma, lam):
    x = jax.tree.map(lambda x: np.asarray(x, np.float64), trajectory.replace(info=()))
    after = np.where(x.terminated, 0.0, np.asarray(next_value, np.float64))
    returns, following = np.zeros((T, B)), find_next(trajectory)
    for lane in range(B):
        for t in reversed(range(T)):
            if not x.mask[t, lane]:
                continue
            later = after[t, lane]
            if following[t][lane] is not None:
                later = (1 - lam) * later + lam * returns[following[t][lane], lane]
            returns[t, lane] = x.reward[t, lane] + gamma * later
    return returns


def plain_gae(trajectory, next_value, gamma, lam):
    mask, value = (np.asarray(x) for x in (trajectory.mask, trajectory.extras["value"]))
    after = np.where(trajectory.terminated, 0.0, np.asarray(next_value))
    error = np.asarray(trajectory.reward) + gamma * after - value
    advantage, following = np.zeros((T, B)), find_next(trajectory)
    for lane in range(B):
        for t in reversed(range(T)):
            if mask[t, lane]:
                advantage[t, lane] = error[t, lane]
                if following[t][lane] is not None:
                    later = advantage[following[t][lane], lane]
                    advantage[t, lane] += gamma * lam * later
    return advantage


@pytest.mark.parametrize("void", [0.0, 0.2])
@pytest.mark.parametrize(("gamma", "lam"), [(GAMMA, LAM), (1.0, 1.0), (0.9, 0.0)])
def test_targets_agree_with_plain_loops(gamma, lam, void):
    trajectory, next_value = make_trajectory(void=void)
    assert trajectory.terminated.any()
    assert trajectory.truncated.any()
    options = {"gamma": gamma, "lam": lam}
    advantage = rollout.gae(trajectory, next_value, **options)
    expected = plain_gae(trajectory, next_value, gamma, lam)
    np.testing.assert_allclose(advantage, expected, **CLOSE)
    returns = rollout.lambda_returns(trajectory, next_value, **options)
    expected = plain_lambda_returns(trajectory, next_value, gamma, lam)
    np.testing.assert_allclose(returns, expected, **CLOSE)


@pytest.mark.slow
def test_rows_of_one_iteration_have_the_bits_of_those_one_by_one():
    """As compiled for an accelerator, run here; 64 rows, and 41."""
    trajectory, next_value = make_trajectory(void=0.2)
    next_value = jnp.nan_to_num(next_value)

    for rows in (T, 41):
        some = jax.tree.map(operator.itemgetter(slice(rows)), trajectory)
        compute = functools.partial(rollout.gae, gamma=GAMMA, lam=0.9)
        expected = compute(some, next_value[:rows])
        jax.clear_caches()  # so that it is traced again
        with on_a_gpu():
            got = compute(some, next_value[:rows])
        np.testing.assert_array_equal(got, expected)
    jax.clear_caches()


def test_target_does_not_cross_episodes_after_void_rows():
    """As where a stream drops the rest of an episode, with its end."""
    trajectory, next_value = make_trajectory()
    dropped = trajectory.mask.at[5:9].set(False) & ~trajectory.done
    dropped = trajectory.replace(
        mask=dropped,
        terminated=jnp.zeros_like(trajectory.terminated),
        truncated=jnp.zeros_like(trajectory.truncated),
    )
    got = rollout.lambda_returns(dropped, next_value, gamma=GAMMA, lam=LAM)
    expected = plain_lambda_returns(dropped, next_value, GAMMA, LAM)
    np.testing.assert_allclose(got, expected, **CLOSE)


def test_handmade_trajectory_needs_no_episode_ids():
    trajectory, next_value = make_trajectory()
    want = rollout.gae(trajectory, next_value, gamma=GAMMA, lam=LAM)
    trajectory = trajectory.replace(episode_id=())
    got = rollout.gae(trajectory, next_value, gamma=GAMMA, lam=LAM)
    np.testing.assert_array_equal(got, want)


def test_discounted_returns_agree_with_a_plain_loop():
    trajectory, next_value = make_trajectory()
    for after in (None, next_value):
        values = jnp.zeros((T, B)) if after is None else after
        expected = plain_lambda_returns(trajectory, values, GAMMA, 1.0)
        returns = rollout.discounted_returns(trajectory, after, gamma=GAMMA)
        np.testing.assert_allclose(returns, expected, **CLOSE)


def test_targets_are_the_same_within_jit_and_are_differentiated():
    trajectory, next_value = make_trajectory()
    next_value = jnp.nan_to_num(next_value)

    def total(next_value, gamma):
        options = {"gamma": gamma, "lam": LAM}
        return rollout.gae(trajectory, next_value, **options).sum()

    inside, gradient = jax.jit(jax.value_and_grad(total))(
        next_value, jnp.float32(GAMMA)
    )
    np.testing.assert_allclose(inside, total(next_value, GAMMA), rtol=1e-5)
    gradient, terminated = np.asarray(gradient), np.asarray(trajectory.terminated)
    assert not gradient[terminated].any()
    assert gradient[-1][~terminated[-1]].all()
