"""EnvPool through our contracts: steps, resets, and the order of answers."""

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


def make(name="CartPole-v1", num_envs=B, **options):
    pytest.importorskip("envpool")
    return from_envpool(name, num_envs, **options)


def make_raw(**options):
    envpool = pytest.importorskip("envpool")
    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=B, **options)
    with warnings.catch_warnings(action="ignore"):  # gymnasium's, of the bounds
        _ = pool.observation_space
    return pool


def draw(rng, num):
    return rng.integers(0, 2, num, dtype=np.int32)


def only(*numbers):
    return np.isin(np.arange(B), numbers)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_a_pool_fills_the_contract():
    env = make()
    assert isinstance(env, AsyncHostVectorEnv)
    assert not {"rebuild", "save"} & set(dir(env))
    assert env.num_envs == B
    assert env.action_space == envs.Discrete(2)
    assert env.observation_space.shape == (4,)
    assert env.observation_space.dtype == np.float32


def test_rows_are_those_of_envpool_and_resets_are_masked(rng):
    env, raw = make(seed=3), make_raw(seed=3)
    obs, _ = raw.reset()
    np.testing.assert_array_equal(env.reset(SEEDS, ALL), obs)
    num_resets = 0
    for _ in range(100):
        action = draw(rng, B)
        step = env.step(action)
        obs, reward, terminated, truncated, info = raw.step(action)
        mask = info["elapsed_step"] > 0
        want = obs, reward * mask, terminated, truncated, mask
        got = step.obs, step.reward, step.terminated, step.truncated, step.mask
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert [x.dtype for x in got] == [x.dtype for x in want]
        assert not step.faulty.any()
        assert not (step.terminated | step.truncated)[~mask].any()
        num_resets += np.count_nonzero(~mask)
        done = terminated | truncated
        if done.any():  # does nothing: EnvPool resets them in the next row
            np.testing.assert_array_equal(env.reset(SEEDS, done), obs)
    assert num_resets > B


def test_the_time_limit_truncates(rng):
    env = make(max_episode_steps=3)
    env.reset(SEEDS, ALL)
    flags = [env.step(draw(rng, B)) for _ in range(8)]
    want = [False, False, True, False, False, False, True, False]
    for step, truncated in zip(flags, want, strict=True):
        assert (step.truncated == truncated).all()
        assert not step.terminated.any()
    assert [step.mask.all() for step in flags] == [i not in (3, 7) for i in range(8)]


def test_a_restart_within_an_episode_starts_those_and_no_other(rng):
    env = make(record_info=["elapsed_step"])
    env.reset(SEEDS, ALL)
    for _ in range(3):
        before = env.step(draw(rng, B)).obs
    mask = only(1, 5)
    old = before.copy()
    obs = env.reset(SEEDS, mask)
    np.testing.assert_array_equal(before, old)
    np.testing.assert_array_equal(obs[~mask], before[~mask])
    assert (obs[mask] != before[mask]).any(axis=1).all()
    step = env.step(draw(rng, B))
    assert step.mask.all()
    np.testing.assert_array_equal(step.info["elapsed_step"], np.where(mask, 1, 4))


@pytest.mark.parametrize("chunk", [B, 5])
def test_none_is_lost_or_doubled_in_batches(rng, chunk):
    env = make(batch_size=R, record_info=["elapsed_step"])
    obs = env.reset(SEEDS, ALL)
    assert obs.shape == (B, 4)
    assert (np.abs(obs) <= 0.05).all()  # CartPole starts there
    order = rng.permutation(B)
    for start in range(0, B, chunk):
        numbers = order[start : start + chunk]
        env.send(draw(rng, len(numbers)), numbers)
    elapsed, served = np.zeros(B, int), np.zeros(B, int)
    ended = np.zeros(B, bool)
    for _ in range(1000):
        step, number = env.receive(R)
        assert number.dtype == np.int32
        assert len(set(number)) == R
        elapsed[number] = np.where(ended[number], 0, elapsed[number] + 1)
        np.testing.assert_array_equal(step.info["elapsed_step"], elapsed[number])
        np.testing.assert_array_equal(step.mask, ~ended[number])
        np.testing.assert_array_equal(step.reward, step.mask.astype(np.float32))
        done = step.terminated | step.truncated
        ended[number] = done
        served[number] += 1
        if done.any():
            obs = env.reset(SEEDS, only(*number[done]))
            np.testing.assert_array_equal(obs[number], step.obs)
        env.send(draw(rng, R), number)
    assert served.sum() == 1000 * R
    assert served.min() > 0
    env.close()  # while all are in flight
    env.close()


@pytest.mark.parametrize(
    ("batch_size", "num_received"), [(R, 0), (R, 1), (R, 2), (B, 0)]
)
def test_a_restart_of_all_waits_for_those_in_flight(rng, batch_size, num_received):
    env = make(batch_size=batch_size, record_info=["elapsed_step"])
    env.reset(SEEDS, ALL)
    env.send(draw(rng, B), np.arange(B))
    for _ in range(num_received):
        env.receive(R)
    obs = env.reset(SEEDS, ALL)
    assert (np.abs(obs) <= 0.05).all()
    env.send(draw(rng, B), np.arange(B))
    for _ in range(B // batch_size):
        step, _ = env.receive(batch_size)
        assert step.mask.all()
        assert (step.info["elapsed_step"] == 1).all()


def test_64_bits_become_32_and_info_is_recorded():
    env = make("HalfCheetah-v4", 2, record_info=("x_velocity", "elapsed_step"))
    obs = env.reset(SEEDS[:2], ALL[:2])
    step = env.step(np.zeros((2, 6), np.float32))
    assert obs.dtype == step.obs.dtype == step.reward.dtype == np.float32
    assert env.observation_space.dtype == env.action_space.dtype == np.float32
    assert step.info["x_velocity"].dtype == np.float32
    assert list(step.info) == ["x_velocity", "elapsed_step"]
    kinds = [{x: (y.shape, y.dtype) for x, y in z.info.items()} for z in (env, step)]
    assert kinds[0] == kinds[1]  # `row_shape` reads the first


def test_a_life_lost_is_an_ending_though_the_game_goes_on(rng):
    info = ["lives", "elapsed_step"]
    env = make("Breakout-v5", 2, episodic_life=True, record_info=info, seed=3)
    env.reset(SEEDS[:2], ALL[:2])
    ended = np.zeros(2, bool)
    num_lost = 0
    for _ in range(60):
        step = env.step(rng.integers(0, 4, 2))
        assert step.obs.dtype == np.uint8
        np.testing.assert_array_equal(step.mask, ~ended)
        num_lost += np.count_nonzero(~step.mask & (step.info["elapsed_step"] > 0))
        ended = step.terminated | step.truncated
    assert num_lost
