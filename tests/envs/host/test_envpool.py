"""EnvPool with the host contracts: steps, resets and asynchronous batches."""

import warnings

import jax
import numpy as np
import pytest

from rollout import envs
from rollout.envs.host.envpool import from_envpool
from rollout.envs.host.types import AsyncHostVectorEnv

B, R = 16, 6
ALL = np.ones(B, bool)
SEEDS = np.zeros(B, np.uint32)


def make_env(name="CartPole-v1", num_envs=B, **options):
    pytest.importorskip("envpool")
    return from_envpool(name, num_envs, **options)


def make_reference(**options):
    envpool = pytest.importorskip("envpool")
    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=B, **options)
    with warnings.catch_warnings(action="ignore"):  # gymnasium warns about bounds
        _ = pool.observation_space
    return pool


def sample_actions(rng, num):
    return rng.integers(0, 2, num, dtype=np.int32)


def mask_of(*numbers):
    return np.isin(np.arange(B), numbers)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_pool_satisfies_the_contract():
    env = make_env()
    assert isinstance(env, AsyncHostVectorEnv)
    assert not {"rebuild", "save"} & set(dir(env))
    assert env.num_envs == B
    assert env.action_space == envs.Discrete(2)
    assert env.observation_space.shape == (4,)
    assert env.observation_space.dtype == np.float32


def test_steps_equal_envpool_and_mask_resets(rng):
    env, reference = make_env(seed=3), make_reference(seed=3)
    obs, _ = reference.reset()
    np.testing.assert_array_equal(env.reset(SEEDS, ALL), obs)
    num_resets = 0
    for _ in range(100):
        action = sample_actions(rng, B)
        step = env.step(action)
        obs, reward, terminated, truncated, info = reference.step(action)
        mask = info["elapsed_step"] > 0
        want = obs, reward * mask, terminated, truncated, mask
        got = step.obs, step.reward, step.terminated, step.truncated, step.mask
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert [x.dtype for x in got] == [x.dtype for x in want]
        assert not step.faulty.any()
        assert not (step.terminated | step.truncated)[~mask].any()
        num_resets += np.count_nonzero(~mask)
        done = terminated | truncated
        if done.any():  # no effect: EnvPool resets in its next step
            np.testing.assert_array_equal(env.reset(SEEDS, done), obs)
    assert num_resets > B


def test_time_limit_truncates(rng):
    env = make_env(max_episode_steps=3)
    env.reset(SEEDS, ALL)
    steps = [env.step(sample_actions(rng, B)) for _ in range(8)]
    truncated_steps = [False, False, True, False, False, False, True, False]
    for step, truncated in zip(steps, truncated_steps, strict=True):
        assert (step.truncated == truncated).all()
        assert not step.terminated.any()
    assert [step.mask.all() for step in steps] == [i not in (3, 7) for i in range(8)]


def test_reset_affects_masked_environments_only(rng):
    env = make_env(record_info=["elapsed_step"])
    env.reset(SEEDS, ALL)
    for _ in range(3):
        previous_obs = env.step(sample_actions(rng, B)).obs
    mask = mask_of(1, 5)
    previous_copy = previous_obs.copy()
    obs = env.reset(SEEDS, mask)
    np.testing.assert_array_equal(previous_obs, previous_copy)
    np.testing.assert_array_equal(obs[~mask], previous_obs[~mask])
    assert (obs[mask] != previous_obs[mask]).any(axis=1).all()
    step = env.step(sample_actions(rng, B))
    assert step.mask.all()
    np.testing.assert_array_equal(step.info["elapsed_step"], np.where(mask, 1, 4))


@pytest.mark.parametrize("chunk", [B, 5])
def test_batches_return_every_step_once(rng, chunk):
    env = make_env(batch_size=R, record_info=["elapsed_step"])
    obs = env.reset(SEEDS, ALL)
    assert obs.shape == (B, 4)
    assert (np.abs(obs) <= 0.05).all()  # CartPole's initial states
    order = rng.permutation(B)
    for start in range(0, B, chunk):
        numbers = order[start : start + chunk]
        env.send(sample_actions(rng, len(numbers)), numbers)
    elapsed, num_received_by_env = np.zeros(B, int), np.zeros(B, int)
    was_done = np.zeros(B, bool)
    for _ in range(1000):
        step, number = env.receive(R)
        assert number.dtype == np.int32
        assert len(set(number)) == R
        elapsed[number] = np.where(was_done[number], 0, elapsed[number] + 1)
        np.testing.assert_array_equal(step.info["elapsed_step"], elapsed[number])
        np.testing.assert_array_equal(step.mask, ~was_done[number])
        np.testing.assert_array_equal(step.reward, step.mask.astype(np.float32))
        done = step.terminated | step.truncated
        was_done[number] = done
        num_received_by_env[number] += 1
        if done.any():
            obs = env.reset(SEEDS, mask_of(*number[done]))
            np.testing.assert_array_equal(obs[number], step.obs)
        env.send(sample_actions(rng, R), number)
    assert num_received_by_env.sum() == 1000 * R
    assert num_received_by_env.min() > 0
    env.close()  # while steps are pending
    env.close()


@pytest.mark.parametrize(
    ("batch_size", "num_received"), [(R, 0), (R, 1), (R, 2), (B, 0)]
)
def test_full_reset_waits_for_pending_steps(rng, batch_size, num_received):
    env = make_env(batch_size=batch_size, record_info=["elapsed_step"])
    env.reset(SEEDS, ALL)
    env.send(sample_actions(rng, B), np.arange(B))
    for _ in range(num_received):
        env.receive(R)
    obs = env.reset(SEEDS, ALL)
    assert (np.abs(obs) <= 0.05).all()
    env.send(sample_actions(rng, B), np.arange(B))
    for _ in range(B // batch_size):
        step, _ = env.receive(batch_size)
        assert step.mask.all()
        assert (step.info["elapsed_step"] == 1).all()


def test_arrays_have_32_bits_and_info_is_recorded():
    env = make_env("HalfCheetah-v4", 2, record_info=("x_velocity", "elapsed_step"))
    obs = env.reset(SEEDS[:2], ALL[:2])
    step = env.step(np.zeros((2, 6), np.float32))
    assert obs.dtype == step.obs.dtype == step.reward.dtype == np.float32
    assert env.observation_space.dtype == env.action_space.dtype == np.float32
    assert step.info["x_velocity"].dtype == np.float32
    assert list(step.info) == ["x_velocity", "elapsed_step"]
    info_specs = [
        {x: (y.shape, y.dtype) for x, y in z.info.items()} for z in (env, step)
    ]
    assert info_specs[0] == info_specs[1]  # `row_shape` reads `env.info`


def test_lost_life_ends_the_episode(rng):
    info = ["lives", "elapsed_step"]
    env = make_env("Breakout-v5", 2, episodic_life=True, record_info=info, seed=3)
    env.reset(SEEDS[:2], ALL[:2])
    was_done = np.zeros(2, bool)
    num_lives_lost = 0
    for _ in range(60):
        step = env.step(rng.integers(0, 4, 2))
        assert step.obs.dtype == np.uint8
        np.testing.assert_array_equal(step.mask, ~was_done)
        num_lives_lost += np.count_nonzero(~step.mask & (step.info["elapsed_step"] > 0))
        was_done = step.terminated | step.truncated
    assert num_lives_lost
