"""Trials against a plain loop over episodes of one task."""

import jax
import jax.numpy as jnp
import numpy as np
from cases import CountEnv, quick_jit
from flax import struct
from suite_checks import KEY, play

import rollout
from rollout import envs
from rollout.envs.wrappers import History, ObservePrevious, Trials

NUM_EPISODES, NUM_STEPS, B = 3, 60, 4


def test_rows_are_those_of_episodes_one_after_another():
    _, rows = play(envs.vectorize(Trials(CountEnv(), NUM_EPISODES), B), NUM_STEPS)
    for lane in range(B):
        at = jax.tree.map(lambda x, lane=lane: x[:, lane], rows)
        t, lengths = 0, []
        while t < NUM_STEPS:  # a trial
            length, num_ended, count = None, 0, 0
            previous = 0, np.float32(0)
            is_first = True
            while num_ended < NUM_EPISODES and t < NUM_STEPS:
                assert at.obs["obs"][t] == count
                assert (at.obs["action"][t], at.obs["reward"][t]) == previous
                assert at.obs["first"][t] == is_first
                count, is_first = count + 1, False
                assert at.reward[t] == count
                previous = at.action[t], at.reward[t]
                flags = at.terminated[t] or at.truncated[t]
                shown = at.next_obs
                if shown["first"][t]:  # the next episode of the trial
                    assert not flags
                    assert shown["obs"][t] == 0
                    num_ended, is_first = num_ended + 1, True
                    assert length in (None, count)  # of one task
                    length, count = count, 0
                elif flags:
                    num_ended += 1
                    assert num_ended == NUM_EPISODES
                    assert shown["obs"][t] == count == length
                assert (shown["action"][t], shown["reward"][t]) == previous
                t += 1
            lengths.append(length)
        assert len(set(lengths)) > 1  # other trials, other tasks
    assert rows.terminated.any()
    assert rows.truncated.any()


@struct.dataclass
class Level(CountEnv):
    """Tells the number of its level."""

    number: jax.Array = struct.field(default_factory=lambda: jnp.int32(-1))

    def at_episode(self, number):
        return self.replace(number=number)

    def reset(self, key):
        state, obs = super().reset(key)
        return {**state, "level": self.number}, obs

    def step(self, key, state, action):
        return super().step(key, state, action).replace(info=state["level"])


def test_all_episodes_of_a_trial_are_of_its_level():
    env = envs.vectorize(Trials(Level(), NUM_EPISODES), B)
    collector = rollout.Collector(
        env=env, policy=rollout.random_policy(env.action_space)
    )

    @quick_jit
    def levels(key):
        carry, options = collector.init(key), {"max_episode_steps": 30}
        _, episodes = collector.collect_episodes(
            carry, None, 9, return_trajectory=True, **options
        )
        t = episodes.trajectory
        return t.info, t.mask

    level, mask = jax.device_get(levels(KEY))
    assert mask.sum(axis=0).min() > 2
    np.testing.assert_array_equal(level, np.where(mask, np.arange(9), 0))


def test_probe_takes_no_zero_for_a_draw():
    env = Trials(History(ObservePrevious(CountEnv()), 2), 2)
    assert rollout.check_env(env, num_steps=100) == ()
