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
    # An episode is masked out with its end, or not at all.
    mask = (rng.random((T, B)) >= void) | trajectory.done
    reward, value, next_value = rng.normal(size=(3, T, B)).astype(np.float32)
    # A value that counts nowhere may be anything.
    counts_nowhere = trajectory.terminated | ~mask
    next_value = np.where(counts_nowhere, np.float32(np.nan), next_value)
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


def plain_lambda_returns(trajectory, next_value, gamma, lambda_):
    x = jax.tree.map(lambda x: np.asarray(x, np.float64), trajectory.replace(info=()))
    after = np.where(x.terminated, 0.0, np.asarray(next_value, np.float64))
    returns, following = np.zeros((T, B)), find_next(trajectory)
    for lane in range(B):
        for t in reversed(range(T)):
            if not x.mask[t, lane]:
                continue
            later = after[t, lane]
            if following[t][lane] is not None:
                later = (1 - lambda_) * later + lambda_ * returns[
                    following[t][lane], lane
                ]
            returns[t, lane] = x.reward[t, lane] + gamma * later
    return returns


def plain_vtrace(trajectory, next_value, log_rhos, gamma, lambda_, clips):
    """By the sum of the paper's equation 1, from every row on."""
    x = jax.tree.map(lambda x: np.asarray(x, np.float64), trajectory.replace(info=()))
    ratio, value = np.exp(np.asarray(log_rhos, np.float64)), x.extras["value"]
    after = np.where(x.terminated, 0.0, np.asarray(next_value, np.float64))
    rho, error = np.minimum(ratio, clips[0]), x.reward + gamma * after - value
    target, advantage = np.zeros((2, T, B))
    following = find_next(trajectory)
    for t, lane in np.ndindex(T, B):
        at, factor = t, 1.0
        if not x.mask[t, lane]:
            continue
        target[t, lane] = value[t, lane]
        while at is not None:
            target[t, lane] += factor * rho[at, lane] * error[at, lane]
            factor *= gamma * lambda_ * min(clips[1], ratio[at, lane])
            at = following[at][lane]
    for t, lane in np.ndindex(T, B):
        if not x.mask[t, lane]:
            continue
        later, then = after[t, lane], following[t][lane]
        if then is not None:
            later += target[then, lane] - value[then, lane]
        gain = x.reward[t, lane] + gamma * later - value[t, lane]
        advantage[t, lane] = rho[t, lane] * gain
    return advantage, target


def arrays(trajectory, next_value, *, with_value=True):
    """The arguments of a target."""
    t = trajectory
    value = (t.extras["value"],) if with_value else ()
    args = t.reward, *value, next_value, t.terminated, t.truncated
    return args, {"mask": t.mask}


def gae(trajectory, next_value, **options):
    args, mask = arrays(trajectory, next_value)
    return rollout.gae(*args, **options, **mask)


@pytest.mark.parametrize("void", [0.0, 0.2])
@pytest.mark.parametrize(
    ("gamma", "lambda_"), [(GAMMA, LAM), (1.0, 1.0), (0.9, 0.0), (-1.0, LAM)]
)
def test_targets_agree_with_plain_loops(gamma, lambda_, void):
    trajectory, next_value = make_trajectory(void=void)
    assert trajectory.terminated.any()
    assert trajectory.truncated.any()
    options = {"gamma": gamma, "lambda_": lambda_}
    advantage = gae(trajectory, next_value, **options)
    acted = np.zeros((T, B)), gamma, lambda_, (1.0, 1.0)  # the policy that learns
    _, target = plain_vtrace(trajectory, next_value, *acted)
    expected = np.where(trajectory.mask, target - trajectory.extras["value"], 0.0)
    np.testing.assert_allclose(advantage, expected, **CLOSE)
    args, mask = arrays(trajectory, next_value, with_value=False)
    returns = rollout.lambda_returns(*args, **options, **mask)
    expected = plain_lambda_returns(trajectory, next_value, gamma, lambda_)
    np.testing.assert_allclose(returns, expected, **CLOSE)


@pytest.mark.parametrize("void", [0.0, 0.2])
@pytest.mark.parametrize(
    ("lambda_", "clips"), [(1.0, (1.0, 1.0)), (LAM, (2.0, 1.0)), (LAM, (1.5, 0.7))]
)
def test_vtrace_agrees_with_the_sums_of_the_paper(lambda_, clips, void):
    trajectory, next_value = make_trajectory(void=void)
    log_rhos = np.random.default_rng(1).normal(size=(T, B)).astype(np.float32)
    args, options = arrays(trajectory, next_value)
    options = {**options, "gamma": GAMMA, "lambda_": lambda_, "log_rhos": log_rhos}
    options |= {"clip_rho_threshold": clips[0], "clip_c_threshold": clips[1]}
    got = rollout.vtrace(*args, **options)
    want = plain_vtrace(trajectory, next_value, log_rhos, GAMMA, lambda_, clips)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_rows_of_one_iteration_have_the_bits_of_those_one_by_one():
    """As compiled for an accelerator, run here; 64 rows, and 41."""
    trajectory, next_value = make_trajectory(void=0.2)
    next_value = jnp.nan_to_num(next_value)

    for rows in (T, 41):
        some = jax.tree.map(operator.itemgetter(slice(rows)), trajectory)
        compute = functools.partial(gae, gamma=GAMMA, lambda_=0.9)
        expected = compute(some, next_value[:rows])
        jax.clear_caches()  # so that it is traced again
        with on_a_gpu():
            got = compute(some, next_value[:rows])
        np.testing.assert_array_equal(got, expected)
    jax.clear_caches()


def test_rewards_may_be_integers():
    trajectory, next_value = make_trajectory()
    whole = jnp.round(3 * trajectory.reward)
    options = {"gamma": GAMMA, "lambda_": LAM}
    want, got = (
        gae(trajectory.replace(reward=x), next_value, **options)
        for x in (whole, whole.astype(jnp.int32))
    )
    np.testing.assert_array_equal(got, want)
    assert float(jnp.abs(want).max()) > 1
    rewards, flags = jnp.full((3, 1), 2), 2 * (jnp.zeros((3, 1), bool),)
    returns = rollout.discounted_returns(rewards, *flags, gamma=0.5)
    np.testing.assert_array_equal(returns[:, 0], [3.5, 3.0, 2.0])


def test_rows_without_lanes_are_those_of_one_lane():
    trajectory, next_value = make_trajectory()
    whole, one = (
        gae(jax.tree.map(take, trajectory), take(next_value), gamma=GAMMA, lambda_=LAM)
        for take in (lambda x: x[:, 3:4], lambda x: x[:, 3])
    )
    np.testing.assert_array_equal(whole[:, 0], one)


def test_discounted_returns_agree_with_a_plain_loop():
    trajectory, next_value = make_trajectory()
    for after in (None, next_value):
        values = jnp.zeros((T, B)) if after is None else after
        expected = plain_lambda_returns(trajectory, values, GAMMA, 1.0)
        t, options = trajectory, {"gamma": GAMMA, "next_value": after}
        returns = rollout.discounted_returns(
            t.reward, t.terminated, t.truncated, **options
        )
        np.testing.assert_allclose(returns, expected, **CLOSE)


def test_targets_are_the_same_within_jit_and_are_differentiated():
    trajectory, next_value = make_trajectory()
    next_value = jnp.nan_to_num(next_value)

    def total(next_value, gamma):
        options = {"gamma": gamma, "lambda_": LAM}
        return gae(trajectory, next_value, **options).sum()

    inside, gradient = jax.jit(jax.value_and_grad(total))(
        next_value, jnp.float32(GAMMA)
    )
    np.testing.assert_allclose(inside, total(next_value, GAMMA), rtol=1e-5)
    gradient, terminated = np.asarray(gradient), np.asarray(trajectory.terminated)
    assert not gradient[terminated].any()
    assert gradient[-1][~terminated[-1]].all()
