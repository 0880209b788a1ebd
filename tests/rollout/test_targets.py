"""Compares advantages and returns with plain loops."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import collect, on_a_gpu, raw

import rollout

T, B, GAMMA, LAM = 64, 16, 0.9, 0.7
# float32 sums of at most 64 terms are compared with float64.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def make_trajectory(seed=0, mask_rate=0.0):
    """Returns random rewards and values for a trajectory with both ending flags."""
    rng = np.random.default_rng(seed)
    trajectory = jax.device_get(raw(collect("count")[1]))
    # The last row of an episode is never masked.
    mask = (rng.random((T, B)) >= mask_rate) | trajectory.done
    reward, value, next_value = rng.normal(size=(3, T, B)).astype(np.float32)
    # Ignored values may be NaN.
    is_ignored = trajectory.terminated | ~mask
    next_value = np.where(is_ignored, np.float32(np.nan), next_value)
    changes = {"reward": reward, "mask": mask, "extras": {"value": value}}
    return jax.tree.map(jnp.asarray, (trajectory.replace(**changes), next_value))


def find_next_rows(trajectory):
    """Returns the next valid row of the same episode, or None, for every row."""
    mask, episode = np.asarray(trajectory.mask), np.asarray(trajectory.episode_id)

    def next_row(t, lane):
        candidates = np.flatnonzero(mask[t + 1 :, lane]) + t + 1
        match = candidates[:1][episode[candidates[:1], lane] == episode[t, lane]]
        return match[0] if match.size else None

    return [[next_row(t, lane) for lane in range(B)] for t in range(T)]


def plain_lambda_returns(trajectory, next_value, gamma, lambda_):
    x = jax.tree.map(lambda x: np.asarray(x, np.float64), trajectory.replace(info=()))
    bootstrap = np.where(x.terminated, 0.0, np.asarray(next_value, np.float64))
    returns, following = np.zeros((T, B)), find_next_rows(trajectory)
    for lane in range(B):
        for t in reversed(range(T)):
            if not x.mask[t, lane]:
                continue
            successor = bootstrap[t, lane]
            if following[t][lane] is not None:
                successor = (1 - lambda_) * successor + lambda_ * returns[
                    following[t][lane], lane
                ]
            returns[t, lane] = x.reward[t, lane] + gamma * successor
    return returns


def plain_vtrace(trajectory, next_value, log_rhos, gamma, lambda_, clips):
    """Computes the sum of the paper's equation 1 for every row."""
    x = jax.tree.map(lambda x: np.asarray(x, np.float64), trajectory.replace(info=()))
    ratio, value = np.exp(np.asarray(log_rhos, np.float64)), x.extras["value"]
    bootstrap = np.where(x.terminated, 0.0, np.asarray(next_value, np.float64))
    rho, error = np.minimum(ratio, clips[0]), x.reward + gamma * bootstrap - value
    target, advantage = np.zeros((2, T, B))
    following = find_next_rows(trajectory)
    for t, lane in np.ndindex(T, B):
        row, factor = t, 1.0
        if not x.mask[t, lane]:
            continue
        target[t, lane] = value[t, lane]
        while row is not None:
            target[t, lane] += factor * rho[row, lane] * error[row, lane]
            factor *= gamma * lambda_ * min(clips[1], ratio[row, lane])
            row = following[row][lane]
    for t, lane in np.ndindex(T, B):
        if not x.mask[t, lane]:
            continue
        successor, next_row = bootstrap[t, lane], following[t][lane]
        if next_row is not None:
            successor += target[next_row, lane] - value[next_row, lane]
        error_sum = x.reward[t, lane] + gamma * successor - value[t, lane]
        advantage[t, lane] = rho[t, lane] * error_sum
    return advantage, target


def target_args(trajectory, next_value, *, with_value=True):
    """Returns the array arguments of a target function."""
    t = trajectory
    value = (t.extras["value"],) if with_value else ()
    args = t.reward, *value, next_value, t.terminated, t.truncated
    return args, {"mask": t.mask}


def gae(trajectory, next_value, **options):
    args, mask = target_args(trajectory, next_value)
    return rollout.gae(*args, **options, **mask)


@pytest.mark.parametrize("mask_rate", [0.0, 0.2])
@pytest.mark.parametrize(
    ("gamma", "lambda_"), [(GAMMA, LAM), (1.0, 1.0), (0.9, 0.0), (-1.0, LAM)]
)
def test_gae_and_lambda_returns_equal_plain_loops(gamma, lambda_, mask_rate):
    trajectory, next_value = make_trajectory(mask_rate=mask_rate)
    assert trajectory.terminated.any()
    assert trajectory.truncated.any()
    options = {"gamma": gamma, "lambda_": lambda_}
    advantage = gae(trajectory, next_value, **options)
    on_policy = np.zeros((T, B)), gamma, lambda_, (1.0, 1.0)  # ratios are 1
    _, target = plain_vtrace(trajectory, next_value, *on_policy)
    expected = np.where(trajectory.mask, target - trajectory.extras["value"], 0.0)
    np.testing.assert_allclose(advantage, expected, **CLOSE)
    args, mask = target_args(trajectory, next_value, with_value=False)
    returns = rollout.lambda_returns(*args, **options, **mask)
    expected = plain_lambda_returns(trajectory, next_value, gamma, lambda_)
    np.testing.assert_allclose(returns, expected, **CLOSE)


@pytest.mark.parametrize("mask_rate", [0.0, 0.2])
@pytest.mark.parametrize(
    ("lambda_", "clips"), [(1.0, (1.0, 1.0)), (LAM, (2.0, 1.0)), (LAM, (1.5, 0.7))]
)
def test_vtrace_equals_the_sums_of_the_paper(lambda_, clips, mask_rate):
    trajectory, next_value = make_trajectory(mask_rate=mask_rate)
    log_rhos = np.random.default_rng(1).normal(size=(T, B)).astype(np.float32)
    args, options = target_args(trajectory, next_value)
    options = {**options, "gamma": GAMMA, "lambda_": lambda_, "log_rhos": log_rhos}
    options |= {"clip_rho_threshold": clips[0], "clip_c_threshold": clips[1]}
    got = rollout.vtrace(*args, **options)
    want = plain_vtrace(trajectory, next_value, log_rhos, GAMMA, lambda_, clips)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_gpu_branch_has_the_same_bits():
    """The GPU branch processes blocks of rows. 41 is not a multiple of a block."""
    trajectory, next_value = make_trajectory(mask_rate=0.2)
    next_value = jnp.nan_to_num(next_value)

    for rows in (T, 41):
        window = jax.tree.map(operator.itemgetter(slice(rows)), trajectory)
        compute = functools.partial(gae, gamma=GAMMA, lambda_=0.9)
        expected = compute(window, next_value[:rows])
        jax.clear_caches()  # force a new trace
        with on_a_gpu():
            got = compute(window, next_value[:rows])
        np.testing.assert_array_equal(got, expected)
    jax.clear_caches()


def test_rewards_may_be_integers():
    trajectory, next_value = make_trajectory()
    float_reward = jnp.round(3 * trajectory.reward)
    options = {"gamma": GAMMA, "lambda_": LAM}
    want, got = (
        gae(trajectory.replace(reward=x), next_value, **options)
        for x in (float_reward, float_reward.astype(jnp.int32))
    )
    np.testing.assert_array_equal(got, want)
    assert float(jnp.abs(want).max()) > 1
    rewards, flags = jnp.full((3, 1), 2), 2 * (jnp.zeros((3, 1), bool),)
    returns = rollout.discounted_returns(rewards, *flags, gamma=0.5)
    np.testing.assert_array_equal(returns[:, 0], [3.5, 3.0, 2.0])


def test_rows_without_lanes_equal_one_lane():
    trajectory, next_value = make_trajectory()
    with_axis, without_axis = (
        gae(jax.tree.map(take, trajectory), take(next_value), gamma=GAMMA, lambda_=LAM)
        for take in (lambda x: x[:, 3:4], lambda x: x[:, 3])
    )
    np.testing.assert_array_equal(with_axis[:, 0], without_axis)


def test_discounted_returns_equal_a_plain_loop():
    trajectory, next_value = make_trajectory()
    for optional_value in (None, next_value):
        values = jnp.zeros((T, B)) if optional_value is None else optional_value
        expected = plain_lambda_returns(trajectory, values, GAMMA, 1.0)
        t, options = trajectory, {"gamma": GAMMA, "next_value": optional_value}
        returns = rollout.discounted_returns(
            t.reward, t.terminated, t.truncated, **options
        )
        np.testing.assert_allclose(returns, expected, **CLOSE)


def test_targets_are_differentiable_inside_jit():
    trajectory, next_value = make_trajectory()
    next_value = jnp.nan_to_num(next_value)

    def total(next_value, gamma):
        options = {"gamma": gamma, "lambda_": LAM}
        return gae(trajectory, next_value, **options).sum()

    jitted_total, gradient = jax.jit(jax.value_and_grad(total))(
        next_value, jnp.float32(GAMMA)
    )
    np.testing.assert_allclose(jitted_total, total(next_value, GAMMA), rtol=1e-5)
    gradient, terminated = np.asarray(gradient), np.asarray(trajectory.terminated)
    assert not gradient[terminated].any()
    assert gradient[-1][~terminated[-1]].all()
