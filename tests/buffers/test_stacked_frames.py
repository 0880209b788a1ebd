"""Stacks of a buffer of single frames are the stacks that the policy saw."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import rollout
from rollout import buffers, envs
from rollout.envs.spaces import Dict

NUM_ENVS, NUM_STEPS, NUM_SLOTS, NUM_FRAMES = 3, 60, 40, 4


@struct.dataclass
class Uneven:
    """Episodes of 1 to 7 steps; the last step terminates or truncates."""

    observation_space = Dict(
        {
            "frame": envs.Box(0.0, 1.0, (2,)),
            "action_mask": envs.Box(False, True, (2,), jnp.dtype(bool)),
        }
    )
    action_space = envs.Discrete(2)

    def reset(self, key):
        length_key, obs_key = jax.random.split(key)
        length = jax.random.randint(length_key, (), 1, 8)
        return (length, jnp.int32(0)), self._obs(obs_key)

    def step(self, key, state, action):
        length, count = state[0], state[1] + 1
        is_last, is_odd = count == length, length % 2 == 1
        return envs.EnvStep(
            state=(length, count),
            obs=self._obs(key),
            reward=0.0,
            terminated=is_last & is_odd,
            truncated=is_last & ~is_odd,
        )

    def _obs(self, key):
        frame_key, mask_key = jax.random.split(key)
        mask = jnp.array([True, False]) | jax.random.bernoulli(mask_key)
        return {"frame": jax.random.uniform(frame_key, (2,)), "action_mask": mask}


def newest(obs):
    return obs | {"frame": obs["frame"][:, -1]}


def keep_newest(t):
    seen = {"obs": t.obs, "next_obs": t.next_obs}
    return t.replace(obs=newest(t.obs), next_obs=newest(t.next_obs), info=seen)


def stacks_of(rows):
    """Stacks the frames of a trajectory in a plain loop: `[T, B, K, 2]` each."""
    stacks, next_stacks = [], []
    for lane in range(NUM_ENVS):
        window = collections.deque(maxlen=NUM_FRAMES)
        for t in range(NUM_STEPS):
            frame = rows.obs["frame"][t, lane]
            window.extend([frame] * (1 if window else NUM_FRAMES))
            stacks.append(list(window))
            next_frame = rows.next_obs["frame"][t, lane]
            next_stacks.append([*list(window)[1:], next_frame])
            if rows.terminated[t, lane] or rows.truncated[t, lane]:
                window.clear()
    shape = NUM_ENVS, NUM_STEPS, NUM_FRAMES, 2
    return [np.reshape(x, shape).swapaxes(0, 1) for x in (stacks, next_stacks)]


@pytest.mark.parametrize("next_obs", ["stored", "shared"])
def test_sampled_stacks_are_those_that_the_policy_saw(next_obs):
    env = envs.vectorize(envs.FrameStack(Uneven(), NUM_FRAMES), NUM_ENVS)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy, record_fn=keep_newest)
    buffer = buffers.ReplayBuffer(
        NUM_ENVS * NUM_SLOTS, NUM_ENVS, next_obs=next_obs, stack=NUM_FRAMES
    )

    @jax.jit
    def sample(key):
        init_key, sample_key = jax.random.split(key)
        carry = collector.init(init_key)
        _, rows = collector.collect_steps(carry, None, NUM_STEPS)
        state = buffer.add(buffer.init(collector), rows)
        return rows, buffer.sample(state, sample_key, 2000)

    rows, batch = jax.device_get(sample(jax.random.key(5)))
    experience, seen = batch.experience, batch.experience.info
    assert experience.mask.all()
    jax.tree.map(np.testing.assert_array_equal, experience.obs, seen["obs"])
    jax.tree.map(np.testing.assert_array_equal, experience.next_obs, seen["next_obs"])
    assert experience.terminated.any()
    assert experience.truncated.any()
    stacks, next_stacks = stacks_of(rows)
    np.testing.assert_array_equal(rows.info["obs"]["frame"], stacks)
    np.testing.assert_array_equal(rows.info["next_obs"]["frame"], next_stacks)
