"""Every space through host collectors, buffers, checkpoints and `check_env`."""

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
PAIR = envs.spaces.Dict({"one": envs.Discrete(3), "two": envs.Box(0.0, 1.0, (2,))})
SPACES = {
    # Of Gymnasium.
    "multi": gym.Tuple(
        [gym.MultiDiscrete([2, 5], start=[1, -2]), gym.MultiBinary([2, 3])]
    ),
    "nested": gym.Dict(
        {"b": gym.Tuple([gym.Dict({"c": BOX}), gym.Discrete(2)]), "a": gym.Discrete(4)}
    ),
    # As a `HostVectorEnv` of one's own may have them.
    "repeated": envs.spaces.Dict(
        {
            "a": envs.spaces.Repeated(envs.Box(0, 1, (2,)), 3),
            "b": envs.spaces.Repeated(PAIR, 2),
        }
    ),
    "plain": {"a": gym.Discrete(3), "b": (BOX, envs.spaces.MultiBinary((2,)))},
}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def make(how, space):
    if how == "own":
        return SampledVectorEnv(space)
    fn = functools.partial(Sampled, space)
    if how == "workers":
        return envs.make_worker_envs([fn] * 3, num_workers=2)
    return envs.from_gymnasium(fn, 3)


def assert_of(space, contains, tree, lead):
    """Checks that a tree has `lead` leading axes, and elements of a space."""
    leaves = jax.tree.leaves(tree)
    assert [x.shape[len(lead) :] for x in leaves] == [x.shape for x in space.leaves()]
    assert all(x.shape[: len(lead)] == lead for x in leaves)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(lead) :]), tree)
    assert np.all(contains(flat))


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("gymnasium", "nested"),
        ("workers", "nested"),
        ("asynchronous", "nested"),
        slow("gymnasium", "multi"),
        slow("own", "repeated"),
        slow("own", "plain"),
    ],
)
def test_space_goes_through_collector_buffer_and_checkpoint(how, name, tmp_path):
    space = as_space(SPACES[name])
    num_ready = 1 if how == "asynchronous" else None
    env = make("workers" if num_ready else how, SPACES[name])
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
    kept = jax.tree.map(lambda x: x[rows.mask], rows)
    assert kept.reward.sum() == kept.mask.size == 9 * (num_ready or 3)
    contains = jax.jit(jax.vmap(space.contains))
    for tree in (kept.obs, kept.next_obs, kept.action):
        assert_of(space, contains, tree, kept.mask.shape)
    state = rollout.buffers.ReplayBuffer(64, 3).init(jax.tree.map(lambda x: x[0], rows))
    rollout.checkpoint.save(tmp_path, {"buffer": state, "rows": rows}, step=0)
    like = jax.tree.map(np.zeros_like, jax.device_get({"buffer": state, "rows": rows}))
    saved = rollout.checkpoint.restore(tmp_path, like)
    jax.tree.map(np.testing.assert_array_equal, saved["rows"], rows)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    ("how", "name"),
    [("gymnasium", "nested"), slow("own", "repeated"), slow("own", "plain")],
)
def test_probe_finds_nothing_wrong_with_a_space(how, name):
    found = rollout.check_env(make(how, SPACES[name]), num_steps=20)
    assert found == ()


ARRAYS, PARTS = "must be a Box, Discrete", "must have at least one part"


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (3, ARRAYS),
        (gym.Dict({"a": gym.Text(3)}), ARRAYS),
        (gym.Tuple((gym.Discrete(2), gym.Dict({}))), PARTS),
    ],
)
def test_space_without_arrays_is_rejected(space, message):
    own, policy = (
        SampledVectorEnv(envs.Discrete(2)),
        rollout.random_policy(envs.Discrete(2)),
    )
    own.observation_space = space
    calls = {
        "`action_space` ": lambda: rollout.random_policy(space),
        "`env.observation_space` ": lambda: rollout.HostCollector(own, policy),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=name + message):
            call()
    (issue,) = rollout.check_env(own)
    assert issue.name == "contract"
    assert message in issue.message


def test_names_of_one_dict_are_of_one_type():
    for name in (1, None):
        with pytest.raises(ValueError, match="`spaces` must have names of one type"):
            envs.spaces.Dict({"a": envs.Discrete(2), name: envs.Discrete(2)})


def test_normalised_host_observations_keep_masks_and_numbers():
    space = gym.Dict(
        mask=gym.Box(0, 1, (3,), np.int8),
        binary=gym.MultiBinary(3),
        place=gym.Discrete(500),
        speed=gym.Box(0.0, 9.0, (2,)),
    )
    raw, env = SampledVectorEnv(space), envs.NormalizeHostEnv(SampledVectorEnv(space))
    seeds, every = np.arange(3, dtype=np.uint32), np.ones(3, bool)
    want, got = (dict(x.reset(seeds, every)) for x in (raw, env))
    assert not np.array_equal(got.pop("speed"), want.pop("speed"))
    chex.assert_trees_all_equal(got, want)
    own, normalised = (as_space(x.observation_space).spaces for x in (raw, env))
    want = dict(own, speed=envs.Box(-np.inf, np.inf, (2,)))
    assert normalised.keys() == want.keys()
    assert all(repr(normalised[name]) == repr(want[name]) for name in want)
