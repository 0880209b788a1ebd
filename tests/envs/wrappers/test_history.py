"""Wrappers that remember the actions of an episode."""

import functools

import jax
import numpy as np
import pytest
import suite_checks

from rollout import envs

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def play(env, num_steps=40):
    return suite_checks.collect(envs.vectorize(env, 4), num_steps=num_steps)


@pytest.mark.parametrize("env_id", ["CartPole-v1", slow("Pendulum-v1")])
@pytest.mark.parametrize("window", [slow(1), 3])
def test_history_is_that_of_a_plain_list(env_id, window):
    env = envs.wrappers.History(envs.TimeLimit(envs.make(env_id), 7), window)
    rows = play(env)
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
    assert env.observation_space.contains(jax.tree.map(lambda x: x[3, 0], rows.obs))


def test_no_repeat_masks_the_actions_of_the_episode():
    env = envs.wrappers.NoRepeat(envs.TimeLimit(envs.make("Acrobot-v1"), 5))
    rows = play(env)
    assert rows.obs["obs"].shape == (40, 4, 6)
    for lane in range(4):
        taken = set()
        for row in range(40):
            if rows.first[row, lane]:
                taken = set()
            mask = rows.obs["mask"][row, lane]
            assert mask.tolist() == [x not in taken for x in range(3)]
            taken.add(int(rows.action[row, lane]))
            mask = rows.next_obs["mask"][row, lane]
            assert mask.tolist() == [x not in taken for x in range(3)]
    assert env.observation_space.contains(jax.tree.map(lambda x: x[3, 0], rows.obs))


@pytest.mark.slow
def test_forced_length_goes_on_after_the_end():
    env = envs.wrappers.ForceLength(envs.TimeLimit(envs.make("CartPole-v1"), 4), 6)
    rows = play(env, 24)
    assert not rows.terminated.any()
    assert rows.truncated[:, 0].tolist() == 4 * [*5 * [False], True]
    assert rows.info["left"][:, 0].tolist() == 4 * [*3 * [False], *3 * [True]]
