"""Collectors of Gymnasium environments: rows, processes and memory."""

import functools
import gc
import os
import pathlib

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from host_count import assert_same

import rollout
from rollout import envs
from rollout.kernel import keys

KEY = jax.random.key(2)
NUM_ENVS, NUM_STEPS = 4, 200
LIMITS = {"CartPole-v1": 60, "Pendulum-v1": 70}


def make_fns(env_id):
    options = {"max_episode_steps": LIMITS[env_id]}
    return [functools.partial(gymnasium.make, env_id, **options)] * NUM_ENVS


def make_adapter(vector_type, **options):
    """Returns a function that creates and adapts a vector environment by id."""
    options["autoreset_mode"] = AutoresetMode.DISABLED
    return lambda env_id: envs.from_gymnasium(vector_type(make_fns(env_id), **options))


MAKE_ENV_FNS = {
    "local": lambda env_id: envs.from_gymnasium(make_fns(env_id)[0], NUM_ENVS),
    "workers": lambda env_id: envs.make_worker_envs(make_fns(env_id), num_workers=2),
    "sync": make_adapter(SyncVectorEnv),
    "async": make_adapter(AsyncVectorEnv, context="forkserver"),
}


def collect(env):
    collector = rollout.HostCollector(
        env=env, policy=rollout.random_policy(env.action_space)
    )
    _, rows = collector.collect_steps(collector.init(KEY), None, NUM_STEPS)
    collector.close()
    return jax.device_get(rows)


@functools.cache
def local_rows(env_id):
    return collect(MAKE_ENV_FNS["local"](env_id))


@functools.cache
def seeds():
    """Returns the seed of the n-th episode of each lane, `[N, B]`."""

    @jax.jit
    @jax.vmap
    def compute_seeds(number):
        episode_id = jax.numpy.arange(NUM_ENVS) + number * NUM_ENVS
        return keys.seeds(keys.keys_of(KEY, episode_id))

    return np.asarray(compute_seeds(np.arange(NUM_STEPS)))


@pytest.mark.parametrize("env_id", LIMITS)
def test_rows_equal_a_plain_gymnasium_loop(env_id):
    rows = local_rows(env_id)
    assert rows.done.any()
    for lane in range(NUM_ENVS):
        env, number, episode_return, length = make_fns(env_id)[lane](), 0, 0.0, 0
        obs, _ = env.reset(seed=int(seeds()[number, lane]))
        for t in range(NUM_STEPS):
            action = rows.action[t, lane]
            next_obs, reward, terminated, truncated, _ = env.step(action)
            reward, length = np.float32(reward), length + 1
            episode_return = np.float32(episode_return + reward)
            expected = {
                "obs": obs,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
                "next_obs": next_obs,
                "mask": True,
                "episode_id": lane + number * NUM_ENVS,
                "episode_return": episode_return,
                "episode_length": length,
            }
            for name, value in expected.items():
                assert np.array_equal(getattr(rows, name)[t, lane], value), (name, t)
            obs = next_obs
            if terminated or truncated:
                number, episode_return, length = number + 1, 0.0, 0
                obs, _ = env.reset(seed=int(seeds()[number, lane]))


@pytest.mark.parametrize(
    ("env_id", "name"),
    [("Pendulum-v1", "workers"), ("CartPole-v1", "sync"), ("CartPole-v1", "async")],
)
def test_processes_and_vector_environments_equal_local_environments(env_id, name):
    assert_same(collect(MAKE_ENV_FNS[name](env_id)), local_rows(env_id))


def resident_memory():
    """Returns the resident memory of this process in bytes."""
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="no /proc")
def test_memory_is_constant_over_many_steps():
    env = envs.from_gymnasium(
        gymnasium.make_vec(
            "CartPole-v1", num_envs=16, vectorization_mode="vector_entry_point"
        )
    )
    policy = rollout.random_policy(env.action_space)
    collector = rollout.HostCollector(env=env, policy=policy)
    carry, sizes = collector.init(KEY), []
    for count in (50_000, 250_000):
        for _ in range(count // (16 * 125)):
            carry, _ = collector.collect_steps(carry, None, 125)
        gc.collect()
        sizes.append(resident_memory())
    assert sizes[1] <= 1.02 * sizes[0]


@pytest.mark.parametrize("on_fault", ["raise", "restart"])
def test_closed_environment_raises(on_fault):
    env = envs.from_gymnasium("CartPole-v1", 2)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.HostCollector(env=env, policy=policy, on_fault=on_fault)
    carry = collector.init(KEY)
    env.close()
    calls = lambda: collector.collect_steps(carry, None, 3), lambda: collector.init(KEY)
    for call in calls:
        with pytest.raises(ValueError, match="`env` must be open, got a closed"):
            call()
