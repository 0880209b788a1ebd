"""Gymnasium environments: all adapters return the same steps and infos."""

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
ALL = np.ones(B, bool)
SEEDS = np.arange(B, dtype=np.uint32)
DISABLED = {"autoreset_mode": AutoresetMode.DISABLED}
NEXT_STEP = {"autoreset_mode": AutoresetMode.NEXT_STEP}
SAME_STEP = {"autoreset_mode": AutoresetMode.SAME_STEP}


def make_fns(env_id):
    """Returns factories of environments with short episodes."""
    steps = 40 if env_id == "Pendulum-v1" else None
    return [functools.partial(gymnasium.make, env_id, max_episode_steps=steps)] * B


ADAPTERS = {
    "local": LocalEnvs,
    "workers": lambda fns: envs.make_worker_envs(fns, 2),
    "sync": lambda fns: envs.from_gymnasium(SyncVectorEnv(fns, copy=False, **DISABLED)),
    "async": lambda fns: envs.from_gymnasium(
        AsyncVectorEnv(fns, context="forkserver", **DISABLED)
    ),
}


def actions(env_id):
    rng = np.random.default_rng(0)
    if env_id == "CartPole-v1":
        return rng.integers(0, 2, (T, B)).astype(np.int32)
    return rng.uniform(-2, 2, (T, B, 1)).astype(np.float32)


@functools.cache
def reference(env_id):
    """Returns the arrays of Gymnasium's `SyncVectorEnv` with increasing seeds."""
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


@pytest.mark.parametrize(
    ("adapter", "env_id"),
    [
        *((adapter, "CartPole-v1") for adapter in ADAPTERS),
        ("local", "Pendulum-v1"),
        ("sync", "Pendulum-v1"),
        pytest.param("workers", "Pendulum-v1", marks=pytest.mark.slow),
        pytest.param("async", "Pendulum-v1", marks=pytest.mark.slow),
    ],
)
def test_adapter_returns_gymnasium_steps(adapter, env_id):
    env = ADAPTERS[adapter](make_fns(env_id))
    assert isinstance(env, envs.host.types.HostVectorEnv)
    rows = iter(reference(env_id))
    np.testing.assert_array_equal(env.reset(SEEDS, ALL), next(rows))
    seeds = SEEDS
    for action in actions(env_id):
        step = env.step(action)
        assert not step.faulty.any()
        assert (step.mask, step.info, step.causes) == (None, {}, {})
        assert step.obs.dtype == step.reward.dtype == np.float32
        for array in (step.obs, step.reward, step.terminated, step.truncated):
            np.testing.assert_array_equal(array, next(rows))
        done = step.terminated | step.truncated
        if done.any():
            seeds = seeds + np.uint32(B)
            np.testing.assert_array_equal(env.reset(seeds, done), next(rows))
    env.close()
    env.close()


def test_factory_may_make_single_or_vector_environment():
    pair = envs.from_gymnasium(Count, 2, length=7)
    pair.reset(np.zeros(2, np.uint32), np.ones(2, bool))
    ends = [pair.step(np.ones(2, np.int32)).truncated.tolist() for _ in range(7)]
    assert ends == [[False] * 2] * 6 + [[True] * 2]
    make_vector = functools.partial(SyncVectorEnv, [Count] * 3, **DISABLED)
    assert envs.from_gymnasium(make_vector).num_envs == 3


@pytest.mark.parametrize("mode", ["sync", "vector_entry_point"])
def test_next_step_mode_masks_resets(mode):
    options = {"vector_kwargs": NEXT_STEP} if mode == "sync" else {}
    options["max_episode_steps"] = 20
    make = functools.partial(gymnasium.make_vec, "CartPole-v1", B, mode, **options)
    adapted_source, reference_env = make(), make()
    env = envs.from_gymnasium(adapted_source)
    seed = SEEDS.tolist() if mode == "sync" else int(SEEDS[0])
    np.testing.assert_array_equal(
        env.reset(SEEDS, ALL), reference_env.reset(seed=seed)[0]
    )
    was_done, num_masked, num_truncated = np.zeros(B, bool), 0, 0
    if mode == "sync":  # NEXT_STEP resets take no seed, so seed both copies alike
        for env_copy, reference_copy in zip(
            adapted_source.envs, reference_env.envs, strict=True
        ):
            env_copy.reset(seed=7), reference_copy.reset(seed=7)
    for action in actions("CartPole-v1"):
        step = env.step(action)
        obs, reward, terminated, truncated, _ = reference_env.step(
            action.astype(np.int64)
        )
        np.testing.assert_array_equal(step.obs, obs)
        np.testing.assert_array_equal(step.reward, reward)
        np.testing.assert_array_equal(step.terminated, terminated)
        mask = ALL if step.mask is None else step.mask
        np.testing.assert_array_equal(mask, ~was_done)
        num_masked += int((~mask).sum())
        was_done = terminated | truncated
        num_truncated += truncated.sum()
        if was_done.any() and not was_done.all():
            reset_obs = env.reset(SEEDS, was_done)
            # The reset follows in the next step.
            np.testing.assert_array_equal(reset_obs, obs)
    assert min(num_masked, num_truncated) > 10


class NamedLimit(host_envs.Faultless):
    """An environment whose own argument is its limit."""

    def __init__(self, max_episode_steps):
        super().__init__(length=max_episode_steps)


@pytest.mark.parametrize(
    ("make", "length"),
    [
        ("CartPole-v1", 2),
        (functools.partial(gymnasium.make, "CartPole-v1"), 2),
        (host_envs.Faultless, 3),  # an odd length truncates
        (lambda length=9: host_envs.Faultless(length), 3),
        (NamedLimit, 3),
    ],
    ids=["id", "make", "class", "function", "argument"],
)
def test_max_episode_steps_truncates(make, length):
    env = envs.from_gymnasium(make, 2, max_episode_steps=length)
    env.reset(SEEDS[:2], ALL[:2])
    ends = [env.step(np.ones(2, np.int32)).truncated.tolist() for _ in range(length)]
    assert ends == [[False] * 2] * (length - 1) + [[True] * 2]


def test_max_episode_steps_is_checked():
    make_vector = functools.partial(SyncVectorEnv, [Count] * 3, **DISABLED)
    for make, num_envs, limit, message in (
        (Count, 2, 0, "`max_episode_steps` must be"),
        (make_vector, None, 5, "`max_episode_steps` must be omitted"),
        (make_vector(), None, 5, "must be omitted"),
    ):
        with pytest.raises(ValueError, match=message):
            envs.from_gymnasium(make, num_envs, max_episode_steps=limit)


LENGTHS = np.array([2, 3, 4, 5])


class BatchedEnv(gymnasium.vector.VectorEnv):
    """Counts like `Count`, but resets itself and returns batched final observations."""

    num_envs, metadata = B, SAME_STEP
    single_action_space = gymnasium.spaces.Discrete(3)
    single_observation_space = gymnasium.spaces.Dict(
        {"count": gymnasium.spaces.Box(0, 100, (1,), np.float32)}
    )

    def reset(self, *, seed=None, options=None):
        self.count = np.zeros(B, np.int32)
        return self.observe()

    def observe(self):
        obs = {"count": self.count[:, None].astype(np.float32)}
        return obs, {"even": self.count % 2 == 0}

    def step(self, action):
        self.count += 1
        done = self.count >= LENGTHS
        obs, info = self.observe()
        self.count = np.where(done, 0, self.count)
        if done.any():
            final = {"final_observation": obs, "final_info": info}
            obs, info = self.observe()
            info |= final
        return (
            obs,
            np.ones(B),
            done & (LENGTHS % 2 == 0),
            done & (LENGTHS % 2 == 1),
            info,
        )


@pytest.mark.parametrize("kind", ["sync", "custom"])
def test_same_step_mode_returns_true_successors(kind):
    """A loop over counters is the reference."""
    fns = [functools.partial(host_envs.Faultless, int(length)) for length in LENGTHS]
    vector = SyncVectorEnv(fns, **SAME_STEP) if kind == "sync" else BatchedEnv()
    info = {"even": np.bool_(0)}
    env = envs.from_gymnasium(vector, observe_info=info, record_info=info)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.HostCollector(env=env, policy=policy)
    rows = collector.collect_steps(collector.init(jax.random.key(0)), None, 13)[1]
    rows, count = jax.device_get(rows), np.zeros(B, np.int32)
    for t in range(13):
        for tree, number in ((rows.obs, count), (rows.next_obs, count + 1)):
            leaf = jax.tree.leaves(tree["obs"])[0]
            np.testing.assert_array_equal(leaf[t, :, 0], number)
            np.testing.assert_array_equal(tree["info"]["even"][t], number % 2 == 0)
        count = count + 1
        np.testing.assert_array_equal(rows.info["even"][t], count % 2 == 0)
        done, is_even = count == LENGTHS, LENGTHS % 2 == 0
        np.testing.assert_array_equal(rows.terminated[t], done & is_even)
        np.testing.assert_array_equal(rows.truncated[t], done & ~is_even)
        count = np.where(done, 0, count)
    assert rows.mask.all()


def test_same_step_mode_without_final_observation_raises():
    class Lossy(BatchedEnv):
        def step(self, action):
            *result, info = super().step(action)
            return *result, {"even": info["even"]}

    env = envs.from_gymnasium(Lossy())
    env.reset(SEEDS, ALL)
    env.step(np.zeros(B, np.int32))
    with pytest.raises(
        ValueError, match=r"`info` must have `final_obs` .* got only even"
    ):
        env.step(np.zeros(B, np.int32))


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_automatic_resets_reject_partial_reset(mode):
    env = envs.from_gymnasium(SyncVectorEnv([Count] * 2, **mode))
    env.reset(SEEDS[:2], ALL[:2])
    env.step(np.int32([1, 1]))
    with pytest.raises(ValueError, match="`mask` must be True"):
        env.reset(SEEDS[:2], np.bool_([True, False]))
    np.testing.assert_array_equal(env.reset(SEEDS[:2], ALL[:2]), np.zeros((2, 2)))


def test_same_step_mode_resets_ended_environments_one_by_one():
    fns = [functools.partial(host_envs.Faultless, 2)] * 2
    env = envs.from_gymnasium(SyncVectorEnv(fns, **SAME_STEP))
    env.reset(SEEDS[:2], ALL[:2])
    for _ in range(2):
        step = env.step(np.int32([1, 1]))
    assert (step.terminated | step.truncated).all()
    for index in (0, 1):
        obs = env.reset(SEEDS[:2], np.arange(2) == index)
        assert obs[index, 0] == 0
    with pytest.raises(ValueError, match="`mask` must be True"):
        env.reset(SEEDS[:2], np.bool_([True, False]))


def test_num_workers_starts_processes():
    env = envs.from_gymnasium("CartPole-v1", B, num_workers=2, max_episode_steps=9)
    assert len({*env.pids, os.getpid()}) == 3
    env.reset(SEEDS, ALL)
    assert env.step(actions("CartPole-v1")[0]).reward.tolist() == [1.0] * B
    env.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda fns, **info: envs.from_gymnasium(SyncVectorEnv(fns, **DISABLED), **info),
        functools.partial(envs.make_worker_envs, num_workers=1),
        functools.partial(envs.make_worker_envs, num_workers=3),
    ],
    ids=["vector", "one_worker", "three_workers"],
)
def test_info_equals_local_environments(make):
    info = {
        "observe_info": {"even": np.bool_(0)},
        "record_info": {"third": np.int32(0), "none": np.zeros(2, np.float32)},
    }
    fns = [functools.partial(Count, length) for length in (2, 3, 4, 5)]
    candidate, local = make(fns, **info), LocalEnvs(fns, **info)
    for env in (candidate, local):
        obs = env.reset(SEEDS, ALL)
        np.testing.assert_array_equal(obs["info"]["even"], ALL)
        assert env.observation_space.spaces.keys() == {"obs", "info"}
        assert env.observation_space.spaces["info"].spaces["even"].dtype == bool
    for number in range(7):
        candidate_step, local_step = (
            candidate.step(np.int32([1, 2, 3, 1])),
            local.step(np.int32([1, 2, 3, 1])),
        )
        if number == 0:
            np.testing.assert_array_equal(local_step.obs["obs"], np.ones((B, 2)))
            assert not local_step.obs["info"]["even"].any()
        jax.tree.map(np.testing.assert_array_equal, candidate_step, local_step)
        np.testing.assert_array_equal(candidate_step.info["none"], np.zeros((B, 2)))
        assert not candidate_step.faulty.any()
        done = local_step.terminated | local_step.truncated
        if done.any():
            reset_rows = candidate.reset(SEEDS, done), local.reset(SEEDS, done)
            jax.tree.map(np.testing.assert_array_equal, *reset_rows)
    candidate.close()


def test_nested_info_is_recorded():
    """Gymnasium's statistics wrapper adds an entry to the last step only."""
    record = {"episode": {"r": np.float32(0), "l": np.int32(0)}}
    fns = [lambda: gymnasium.wrappers.RecordEpisodeStatistics(Count(2))] * 2
    vector = envs.from_gymnasium(SyncVectorEnv(fns, **DISABLED), record_info=record)
    for env in (vector, LocalEnvs(fns, record_info=record)):
        env.reset(SEEDS[:2], ALL[:2])
        first_info = env.step(np.int32([1, 2])).info["episode"]
        np.testing.assert_array_equal(first_info["l"], [0, 0])
        last_info = env.step(np.int32([1, 2])).info["episode"]
        np.testing.assert_array_equal(last_info["l"], [2, 2])
        np.testing.assert_array_equal(last_info["r"], [2, 4])


class RecordingEnv(host_envs.Faultless):
    """Logs all observations; the first observation of an episode is 100."""

    def __init__(self, length, log):
        super().__init__(length)
        self.log = log

    def _obs(self):
        self.log.append(self.count or 100.0)
        return np.full(2, self.log[-1])


@pytest.mark.parametrize("mode", ["DISABLED", "NEXT_STEP", "SAME_STEP"])
def test_observations_update_statistics_once(mode):
    log = []
    env = SyncVectorEnv(
        [functools.partial(RecordingEnv, length, log) for length in (3, 4, 6)],
        autoreset_mode=AutoresetMode[mode],
    )
    env = envs.NormalizeHostEnv(envs.from_gymnasium(env))
    policy = rollout.random_policy(env.action_space)
    collector = rollout.HostCollector(env=env, policy=policy)
    # In fewer than 12 steps, the episodes never end all at once.
    collector.collect_steps(collector.init(jax.random.key(0)), None, 11)
    statistics = env.shared.statistics.value[0]
    assert round(float(statistics.count)) == len(log)
    np.testing.assert_allclose(statistics.mean, np.mean(log), rtol=1e-3)
