"""Wrappers that remember the actions of an episode."""

import functools

import jax
import numpy as np
import pytest
import suite_checks
from cases import CountEnv, quick_jit

import rollout
from rollout import envs

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def make(env_id):
    if env_id == "count":
        return envs.wrappers.NoRepeat(envs.TimeLimit(CountEnv(min_length=9), 5))
    return envs.TimeLimit(envs.make(env_id), 7)


@functools.cache
def play(env_id, window):
    """The trajectory with a history, and whether the space has one of its rows."""
    env = envs.wrappers.History(make(env_id), window)
    lanes = envs.vectorize(env, 4)
    collector = rollout.Collector(
        env=lanes, policy=rollout.random_policy(lanes.action_space)
    )

    @quick_jit
    def run(key):
        rows = collector.collect_steps(collector.init(key), None, 40)[1]
        obs = jax.tree.map(lambda x: x[3, 0], rows.obs)
        return rows, env.observation_space.contains(obs)

    return jax.device_get(run(suite_checks.KEY))


@pytest.mark.parametrize("env_id", ["count", slow("CartPole-v1"), slow("Pendulum-v1")])
@pytest.mark.parametrize("window", [slow(1), 3])
def test_history_is_that_of_a_plain_list(env_id, window):
    rows, is_contained = play(env_id, window)
    assert is_contained
    for lane in range(4):
        actions, rewards = [], []
        for row in range(40):
            if rows.first[row, lane]:
                actions, rewards = [], []
            length = int(rows.obs["length"][row, lane])
            assert length == min(window, len(actions))
            shown = rows.obs["actions"][row, lane]
            np.testing.assert_array_equal(
                shown[:length], actions[-window:] or shown[:0]
            )
            assert not shown[length:].any()
            shown = rows.obs["rewards"][row, lane]
            np.testing.assert_array_equal(shown[:length], rewards[-window:])
            assert not shown[length:].any()
            actions.append(rows.action[row, lane])
            rewards.append(rows.reward[row, lane])


def test_no_repeat_masks_the_actions_of_the_episode():
    rows, _ = play("count", 3)
    assert rows.obs["obs"]["obs"].shape == (40, 4, 1)
    for lane in range(4):
        taken = set()
        for row in range(40):
            if rows.first[row, lane]:
                taken = set()
            mask = rows.obs["obs"]["mask"][row, lane]
            assert mask.tolist() == [x not in taken for x in range(3)]
            taken.add(int(rows.action[row, lane]))
            mask = rows.next_obs["obs"]["mask"][row, lane]
            assert mask.tolist() == [x not in taken for x in range(3)]


@pytest.mark.slow
def test_forced_length_goes_on_after_the_end():
    env = envs.wrappers.ForceLength(envs.TimeLimit(envs.make("CartPole-v1"), 4), 6)
    rows = suite_checks.collect(envs.vectorize(env, 4), num_steps=24)
    assert not rows.terminated.any()
    assert rows.truncated[:, 0].tolist() == 4 * [*5 * [False], True]
    assert rows.info["left"][:, 0].tolist() == 4 * [*3 * [False], *3 * [True]]
