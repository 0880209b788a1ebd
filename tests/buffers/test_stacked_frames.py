"""Stacks of a buffer of single frames are the stacks that the policy saw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit
from flax import struct

import rollout
from rollout import buffers, envs
from rollout.envs.spaces import Dict

NUM_ENVS, NUM_STEPS, NUM_SLOTS, NUM_FRAMES = 3, 60, 40, 4


@struct.dataclass(kw_only=True)
class Drawn(CountEnv):
    """Draws frames and masks; an episode has 1 to 7 steps."""

    min_length: int = 1
    observation_space = Dict(
        {
            "frame": envs.Box(0.0, 1.0, (2,)),
            "action_mask": envs.Box(False, True, (2,), jnp.dtype(bool)),
        }
    )

    def reset(self, key):
        return super().reset(key)[0], self.draw(key)

    def step(self, key, state, action):
        return super().step(key, state, action).replace(obs=self.draw(key))

    def draw(self, key):
        frame_key, mask_key = jax.random.split(key)
        mask = jnp.array([True, False]) | jax.random.bernoulli(mask_key)
        return {"frame": jax.random.uniform(frame_key, (2,)), "action_mask": mask}


def newest(obs):
    return obs | {"frame": obs["frame"][:, -1]}


def keep_newest(t):
    seen = {"obs": t.obs, "next_obs": t.next_obs}
    return t.replace(obs=newest(t.obs), next_obs=newest(t.next_obs), info=seen)


@pytest.mark.usefixtures("key_reuse")
@pytest.mark.parametrize("next_obs", ["stored", "shared"])
def test_sampled_stacks_are_those_that_the_policy_saw(next_obs):
    env = envs.vectorize(envs.FrameStack(Drawn(), NUM_FRAMES), NUM_ENVS)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy, record_fn=keep_newest)
    buffer = buffers.ReplayBuffer(
        NUM_ENVS * NUM_SLOTS, NUM_ENVS, next_obs=next_obs, stack=NUM_FRAMES
    )

    @quick_jit
    def sample(key):
        init_key, sample_key = jax.random.split(key)
        carry = collector.init(init_key)
        _, rows = collector.collect_steps(carry, None, NUM_STEPS)
        state = buffer.add(buffer.init(collector), rows)
        return buffer.sample(state, sample_key, 2000)

    batch = jax.device_get(sample(jax.random.key(5)))
    experience, seen = batch.experience, batch.experience.info
    assert experience.mask.all()
    jax.tree.map(np.testing.assert_array_equal, experience.obs, seen["obs"])
    jax.tree.map(np.testing.assert_array_equal, experience.next_obs, seen["next_obs"])
    assert experience.terminated.any()
    assert experience.truncated.any()
