"""Trials compared with a plain loop over episodes of one task."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit
from flax import struct
from suite_checks import KEY, play

import rollout
from rollout import envs
from rollout.envs.wrappers import History, ObservePrevious, Trials

NUM_EPISODES, NUM_STEPS, B = 3, 60, 4


def test_trial_rows_equal_consecutive_episodes():
    _, rows = play(envs.vectorize(Trials(CountEnv(), NUM_EPISODES), B), NUM_STEPS)
    for lane in range(B):
        lane_rows = jax.tree.map(lambda x, lane=lane: x[:, lane], rows)
        t, lengths = 0, []
        while t < NUM_STEPS:  # a trial
            length, num_ended, count = None, 0, 0
            previous = 0, np.float32(0)
            is_first = True
            while num_ended < NUM_EPISODES and t < NUM_STEPS:
                assert lane_rows.obs["obs"][t] == count
                assert (
                    lane_rows.obs["action"][t],
                    lane_rows.obs["reward"][t],
                ) == previous
                assert lane_rows.obs["first"][t] == is_first
                count, is_first = count + 1, False
                assert lane_rows.reward[t] == count
                previous = lane_rows.action[t], lane_rows.reward[t]
                flags = lane_rows.terminated[t] or lane_rows.truncated[t]
                next_obs = lane_rows.next_obs
                if next_obs["first"][t]:  # the next episode of the trial
                    assert not flags
                    assert next_obs["obs"][t] == 0
                    num_ended, is_first = num_ended + 1, True
                    assert length in (None, count)  # one task per trial
                    length, count = count, 0
                elif flags:
                    num_ended += 1
                    assert num_ended == NUM_EPISODES
                    assert next_obs["obs"][t] == count == length
                assert (next_obs["action"][t], next_obs["reward"][t]) == previous
                t += 1
            lengths.append(length)
        assert len(set(lengths)) > 1  # trials have different tasks
    assert rows.terminated.any()
    assert rows.truncated.any()


@struct.dataclass
class LevelEnv(CountEnv):
    """Returns the number of its level in `info`."""

    number: jax.Array = struct.field(default_factory=lambda: jnp.int32(-1))

    def at_episode(self, number):
        return self.replace(number=number)

    def reset(self, key):
        state, obs = super().reset(key)
        return {**state, "level": self.number}, obs

    def step(self, key, state, action):
        return super().step(key, state, action).replace(info=state["level"])


def test_episodes_of_a_trial_have_its_level():
    env = envs.vectorize(Trials(LevelEnv(), NUM_EPISODES), B)
    collector = rollout.Collector(
        env=env, policy=rollout.random_policy(env.action_space)
    )

    @quick_jit
    def collect_levels(key):
        carry, options = collector.init(key), {"max_episode_steps": 30}
        _, episodes = collector.collect_episodes(
            carry, None, 9, return_trajectory=True, **options
        )
        t = episodes.trajectory
        return t.info, t.mask

    level, mask = jax.device_get(collect_levels(KEY))
    assert mask.sum(axis=0).min() > 2
    np.testing.assert_array_equal(level, np.where(mask, np.arange(9), 0))


@pytest.mark.slow
def test_check_env_accepts_zero_observations():
    env = Trials(History(ObservePrevious(CountEnv()), 2), 2)
    assert rollout.check_env(env, num_steps=100) == ()
