"""A buffer of single frames rebuilds the frame stacks that the policy observed."""

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
class SampledObsEnv(CountEnv):
    """Samples frames and masks; an episode has 1 to 7 steps."""

    min_length: int = 1
    observation_space = Dict(
        {
            "frame": envs.Box(0.0, 1.0, (2,)),
            "action_mask": envs.Box(False, True, (2,), jnp.dtype(bool)),
        }
    )

    def reset(self, key):
        return super().reset(key)[0], self.sample_obs(key)

    def step(self, key, state, action):
        return super().step(key, state, action).replace(obs=self.sample_obs(key))

    def sample_obs(self, key):
        frame_key, mask_key = jax.random.split(key)
        mask = jnp.array([True, False]) | jax.random.bernoulli(mask_key)
        return {"frame": jax.random.uniform(frame_key, (2,)), "action_mask": mask}


def newest_frame(obs):
    return obs | {"frame": obs["frame"][:, -1]}


def record_newest_frame(t):
    stacks = {"obs": t.obs, "next_obs": t.next_obs}
    return t.replace(
        obs=newest_frame(t.obs), next_obs=newest_frame(t.next_obs), info=stacks
    )


@pytest.mark.usefixtures("key_reuse")
@pytest.mark.parametrize(
    "next_obs", ["shared", pytest.param("stored", marks=pytest.mark.slow)]
)
def test_sampled_stacks_equal_policy_observations(next_obs):
    env = envs.vectorize(envs.FrameStack(SampledObsEnv(), NUM_FRAMES), NUM_ENVS)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy, record_fn=record_newest_frame)
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
    experience, policy_obs = batch.experience, batch.experience.info
    assert experience.mask.all()
    jax.tree.map(np.testing.assert_array_equal, experience.obs, policy_obs["obs"])
    jax.tree.map(
        np.testing.assert_array_equal, experience.next_obs, policy_obs["next_obs"]
    )
    assert experience.terminated.any()
    assert experience.truncated.any()
