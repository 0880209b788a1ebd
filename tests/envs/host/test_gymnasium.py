"""Environments of Gymnasium: all ways to step them agree, and bad options raise."""

import functools
import os

import gymnasium
import host_envs
import jax
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from host_envs import Count

import rollout
from rollout import envs
from rollout.envs.host.local_envs import LocalEnvs

B, T = 4, 200
EVERY = np.ones(B, bool)
SEEDS = np.arange(B, dtype=np.uint32)
DISABLED = {"autoreset_mode": AutoresetMode.DISABLED}
NEXT_STEP = {"autoreset_mode": AutoresetMode.NEXT_STEP}


def make_fns(env_id):
    """Short episodes, so that there are resets."""
    steps = 40 if env_id == "Pendulum-v1" else None
    return [functools.partial(gymnasium.make, env_id, max_episode_steps=steps)] * B


WAYS = {
    "local": LocalEnvs,
    "workers": lambda fns: envs.make_worker_envs(fns, 2),
    "sync": lambda fns: envs.from_gymnasium(SyncVectorEnv(fns, copy=False, **DISABLED)),
    "async": lambda fns: envs.from_gymnasium(
        AsyncVectorEnv(fns, context="forkserver", **DISABLED)
    ),
}


def actions(env_id):
    draw = np.random.default_rng(0)
    if env_id == "CartPole-v1":
        return draw.integers(0, 2, (T, B)).astype(np.int32)
    return draw.uniform(-2, 2, (T, B, 1)).astype(np.float32)


@functools.cache
def reference(env_id):
    """What gymnasium's own SyncVectorEnv does, with seeds that count up."""
    env = SyncVectorEnv(make_fns(env_id), **DISABLED)
    rows = [env.reset(seed=SEEDS.tolist())[0]]
    seeds = SEEDS
    for action in actions(env_id):
        obs, reward, terminated, truncated, _ = env.step(action)
        rows += [obs, reward.astype(np.float32), terminated, truncated]
        done = terminated | truncated
        if done.any():
            seeds = seeds + np.uint32(B)
            options = {"reset_mask": done}
            rows.append(env.reset(seed=seeds.tolist(), options=options)[0])
    env.close()
    assert len(rows) > 4 * T + 4  # there were resets
    return rows


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_returns_what_gymnasium_does(way, env_id):
    env = WAYS[way](make_fns(env_id))
    assert isinstance(env, envs.host.types.HostVectorEnv)
    rows = iter(reference(env_id))
    np.testing.assert_array_equal(env.reset(SEEDS, EVERY), next(rows))
    seeds = SEEDS
    for action in actions(env_id):
        step = env.step(action)
        assert not step.faulty.any()
        assert (step.mask, step.info, step.causes) == (None, {}, {})
        assert step.obs.dtype == step.reward.dtype == np.float32
        for ours in (step.obs, step.reward, step.terminated, step.truncated):
            np.testing.assert_array_equal(ours, next(rows))
        done = step.terminated | step.truncated
        if done.any():
            seeds = seeds + np.uint32(B)
            np.testing.assert_array_equal(env.reset(seeds, done), next(rows))
    env.close()
    env.close()


def test_function_makes_one_environment_or_a_vector():
    one = envs.from_gymnasium(Count, 2, length=7)
    one.reset(np.zeros(2, np.uint32), np.ones(2, bool))
    ends = [one.step(np.ones(2, np.int32)).truncated.tolist() for _ in range(7)]
    assert ends == [[False] * 2] * 6 + [[True] * 2]
    many = functools.partial(SyncVectorEnv, [Count] * 3, **DISABLED)
    assert envs.from_gymnasium(many).num_envs == 3


@pytest.mark.parametrize("mode", ["sync", "vector_entry_point"])
def test_next_step_marks_the_steps_that_reset(mode):
    options = {"vector_kwargs": NEXT_STEP} if mode == "sync" else {}
    options["max_episode_steps"] = 20
    make = functools.partial(gymnasium.make_vec, "CartPole-v1", B, mode, **options)
    wrapped, own = make(), make()
    env = envs.from_gymnasium(wrapped)
    seed = SEEDS.tolist() if mode == "sync" else int(SEEDS[0])
    np.testing.assert_array_equal(env.reset(SEEDS, EVERY), own.reset(seed=seed)[0])
    ended, marked, num_truncated = np.zeros(B, bool), 0, 0
    if mode == "sync":  # those resets are without a seed, so equal by this one only
        for ours, theirs in zip(wrapped.envs, own.envs, strict=True):
            ours.reset(seed=7), theirs.reset(seed=7)
    for action in actions("CartPole-v1"):
        step = env.step(action)
        obs, reward, terminated, truncated, _ = own.step(action.astype(np.int64))
        np.testing.assert_array_equal(step.obs, obs)
        np.testing.assert_array_equal(step.reward, reward)
        np.testing.assert_array_equal(step.terminated, terminated)
        mask = EVERY if step.mask is None else step.mask
        np.testing.assert_array_equal(mask, ~ended)
        marked += int((~mask).sum())
        ended, num_truncated = terminated | truncated, num_truncated + truncated.sum()
        if ended.any() and not ended.all():
            last = env.reset(SEEDS, ended)
            np.testing.assert_array_equal(last, obs)  # not reset yet
    assert min(marked, num_truncated) > 10


def test_next_step_cannot_be_cut_short():
    env = envs.from_gymnasium(SyncVectorEnv([Count] * 2, **NEXT_STEP))
    env.reset(SEEDS[:2], EVERY[:2])
    env.step(np.int32([1, 1]))
    with pytest.raises(ValueError, match="`mask` must be True only where the episode"):
        env.reset(SEEDS[:2], np.bool_([True, False]))
    np.testing.assert_array_equal(env.reset(SEEDS[:2], EVERY[:2]), np.zeros((2, 2)))


def test_num_workers_runs_them_in_processes():
    env = envs.from_gymnasium("CartPole-v1", B, num_workers=2, max_episode_steps=9)
    assert len({*env.pids, os.getpid()}) == 3
    env.reset(SEEDS, EVERY)
    assert env.step(actions("CartPole-v1")[0]).reward.tolist() == [1.0] * B
    env.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda fns, **info: envs.from_gymnasium(SyncVectorEnv(fns, **DISABLED), **info),
        functools.partial(envs.make_worker_envs, num_workers=1),
        functools.partial(envs.make_worker_envs, num_workers=3),
    ],
    ids=["vector", "one worker", "three workers"],
)
def test_info_is_that_of_environments_in_this_process(make):
    info = {
        "observe_info": {"even": np.bool_(0)},
        "record_info": {"third": np.int32(0), "none": np.zeros(2, np.float32)},
    }
    fns = [functools.partial(Count, length) for length in (2, 3, 4, 5)]
    other, local = make(fns, **info), LocalEnvs(fns, **info)
    for env in (other, local):
        obs = env.reset(SEEDS, EVERY)
        np.testing.assert_array_equal(obs["info"]["even"], EVERY)
        assert env.observation_space.spaces.keys() == {"obs", "info"}
        assert env.observation_space.spaces["info"].spaces["even"].dtype == bool
    for number in range(7):
        a, b = other.step(np.int32([1, 2, 3, 1])), local.step(np.int32([1, 2, 3, 1]))
        if number == 0:
            np.testing.assert_array_equal(b.obs["obs"], np.ones((B, 2)))
            assert not b.obs["info"]["even"].any()
        jax.tree.map(np.testing.assert_array_equal, a, b)
        np.testing.assert_array_equal(a.info["none"], np.zeros((B, 2)))
        assert not a.faulty.any()
        done = b.terminated | b.truncated
        if done.any():
            rows = other.reset(SEEDS, done), local.reset(SEEDS, done)
            jax.tree.map(np.testing.assert_array_equal, *rows)
    other.close()


def test_nested_info_is_recorded_from_both_kinds():
    """That of gymnasium's statistics wrapper, which only the last step has."""
    record = {"episode": {"r": np.float32(0), "l": np.int32(0)}}
    fns = [lambda: gymnasium.wrappers.RecordEpisodeStatistics(Count(2))] * 2
    vector = envs.from_gymnasium(SyncVectorEnv(fns, **DISABLED), record_info=record)
    for env in (vector, LocalEnvs(fns, record_info=record)):
        env.reset(SEEDS[:2], EVERY[:2])
        first = env.step(np.int32([1, 2])).info["episode"]
        np.testing.assert_array_equal(first["l"], [0, 0])
        last = env.step(np.int32([1, 2])).info["episode"]
        np.testing.assert_array_equal(last["l"], [2, 2])
        np.testing.assert_array_equal(last["r"], [2, 4])


class Recorded(host_envs.Faultless):
    """Writes down every observation that it returns; an episode starts with 100."""

    def __init__(self, length, log):
        super().__init__(length)
        self.log = log

    def _obs(self):
        self.log.append(self.count or 100.0)
        return np.full(2, self.log[-1])


@pytest.mark.parametrize("mode", ["DISABLED", "NEXT_STEP"])
def test_every_observation_updates_the_statistics_once(mode):
    """Also if environments reset themselves, each in another step."""
    log = []
    env = SyncVectorEnv(
        [functools.partial(Recorded, length, log) for length in (3, 4, 6)],
        autoreset_mode=AutoresetMode[mode],
    )
    env = envs.NormalizeHostEnv(envs.from_gymnasium(env))
    policy = rollout.random_policy(env.action_space)
    collector = rollout.HostCollector(env=env, policy=policy)
    collector.collect_steps(collector.init(jax.random.key(0)), None, 14)
    statistics = env.shared.statistics.value[0]
    assert round(float(statistics.count)) == len(log)
    np.testing.assert_allclose(statistics.mean, np.mean(log), rtol=1e-3)
