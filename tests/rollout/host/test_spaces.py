"""Spaces in host collectors, buffers, checkpoints, `check_env` and normalization."""

import functools

import chex
import jax
import numpy as np
import pytest
from gymnasium import spaces as gym
from space_envs import Sampled, SampledVectorEnv

import rollout
from rollout import envs
from rollout.envs.spaces import as_space

BOX = gym.Box(-1.0, 2.0, (2,))
PAIR = envs.spaces.Dict({"unit": envs.Discrete(3), "move": envs.Box(0.0, 1.0, (2,))})
SPACES = {
    # Spaces of Gymnasium.
    "multi": gym.Tuple(
        [gym.MultiDiscrete([2, 5], start=[1, -2]), gym.MultiBinary([2, 3])]
    ),
    "nested": gym.Dict(
        {"b": gym.Tuple([gym.Dict({"c": BOX}), gym.Discrete(2)]), "a": gym.Discrete(4)}
    ),
    # Spaces of a custom `HostVectorEnv`.
    "repeated": envs.spaces.Dict(
        {
            "a": envs.spaces.Repeated(envs.Box(0, 1, (2,)), 3),
            "b": envs.spaces.Repeated(PAIR, 2),
        }
    ),
    "plain": {"a": gym.Discrete(3), "b": (BOX, envs.spaces.MultiBinary((2,)))},
}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def make_env(backend, space):
    if backend == "custom":
        return SampledVectorEnv(space)
    fn = functools.partial(Sampled, space)
    if backend == "workers":
        return envs.make_worker_envs([fn] * 3, num_workers=2)
    return envs.from_gymnasium(fn, 3)


def check_elements(space, contains, tree, num_rows):
    """Checks that a tree has `num_rows` elements of a space."""
    leaves = jax.tree.leaves(tree)
    assert [x.shape for x in leaves] == [(num_rows, *x.shape) for x in space.leaves()]
    assert np.all(contains(tree))


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("gymnasium", "nested"),
        ("workers", "nested"),
        ("num_ready", "nested"),
        slow("gymnasium", "multi"),
        slow("custom", "repeated"),
        slow("custom", "plain"),
    ],
)
def test_space_works_in_collector_buffer_and_checkpoint(backend, name, tmp_path):
    space = as_space(SPACES[name])
    num_ready = 1 if backend == "num_ready" else None
    env = make_env("workers" if num_ready else backend, SPACES[name])
    policy = rollout.random_policy(env.action_space)
    collector = rollout.HostCollector(env=env, policy=policy, num_ready=num_ready)
    try:
        _, rows = collector.collect_steps(collector.init(jax.random.key(0)), None, 9)
    finally:
        env.close()
    if num_ready:
        rows = jax.jit(rollout.host.regroup_by_env)(rows).replace(info=())
    rows = jax.device_get(rows)
    if not num_ready:
        assert rows.terminated.sum() == 2 * 3
    valid_rows, num_rows = jax.tree.map(lambda x: x[rows.mask], rows), rows.mask.sum()
    assert valid_rows.reward.sum() == num_rows == 9 * (num_ready or 3)
    contains = jax.jit(jax.vmap(space.contains))
    for tree in (valid_rows.obs, valid_rows.next_obs, valid_rows.action):
        check_elements(space, contains, tree, num_rows)
    state = rollout.buffers.ReplayBuffer(64, 3).init(jax.tree.map(lambda x: x[0], rows))
    rollout.checkpoint.save(tmp_path, {"buffer": state, "rows": rows}, step=0)
    tree = jax.tree.map(np.zeros_like, jax.device_get({"buffer": state, "rows": rows}))
    restored_tree = rollout.checkpoint.restore(tmp_path, tree)
    jax.tree.map(np.testing.assert_array_equal, restored_tree["rows"], rows)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    ("backend", "name"),
    [("gymnasium", "nested"), slow("custom", "repeated"), slow("custom", "plain")],
)
def test_check_env_accepts_a_space(backend, name):
    issues = rollout.check_env(make_env(backend, SPACES[name]), num_steps=20)
    assert {x.name for x in issues} <= {"ending"}  # all episodes have one length


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (3, "must be a Box, Discrete"),
        (gym.Dict({"a": gym.Text(3)}), "must be a Box, Discrete"),
        (gym.Tuple((gym.Discrete(2), gym.Dict({}))), "at least one part"),
    ],
    ids=["int", "text", "empty"],
)
def test_space_without_arrays_raises(space, message):
    env = SampledVectorEnv(envs.Discrete(2))
    policy = rollout.random_policy(env.action_space)
    env.observation_space = space
    calls = {
        "`action_space` ": lambda: rollout.random_policy(space),
        "`env.observation_space` ": lambda: rollout.HostCollector(env, policy),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name}.*{message}"):
            call()
    (issue,) = rollout.check_env(env)
    assert issue.name == "contract"
    assert message in issue.message


def test_dict_space_requires_names_of_one_type():
    for name in (1, None):
        with pytest.raises(ValueError, match=r"`spaces` must .* names"):
            envs.spaces.Dict({"a": envs.Discrete(2), name: envs.Discrete(2)})


def test_normalization_changes_continuous_observations_only():
    space = gym.Dict(
        mask=gym.Box(0, 1, (3,), np.int8),
        binary=gym.MultiBinary(3),
        position=gym.Discrete(500),
        speed=gym.Box(0.0, 9.0, (2,)),
    )
    raw_env = SampledVectorEnv(space)
    env = envs.NormalizeHostEnv(SampledVectorEnv(space))
    seeds, mask = np.arange(3, dtype=np.uint32), np.ones(3, bool)
    obs, raw_obs = (dict(x.reset(seeds, mask)) for x in (env, raw_env))
    assert not np.array_equal(obs.pop("speed"), raw_obs.pop("speed"))
    chex.assert_trees_all_equal(obs, raw_obs)
    spaces, raw_spaces = (as_space(x.observation_space).spaces for x in (env, raw_env))
    expected = dict(raw_spaces, speed=envs.Box(-np.inf, np.inf, (2,)))
    assert spaces.keys() == expected.keys()
    assert all(repr(spaces[name]) == repr(expected[name]) for name in expected)
