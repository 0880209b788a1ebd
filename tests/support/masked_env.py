"""An environment with action masks, for Q-learning."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from rollout import envs
from rollout.envs import spaces


@struct.dataclass
class MaskedEnv:
    """Masks out one of three actions at every step.

    The actions are -2, -1 and 0. The reward is the action plus 0.5, times a random
    factor. An episode terminates with probability 0.15 per step, and is truncated after
    `limit` steps.
    """

    limit: int = 5
    action_space: Any = envs.Discrete(3, start=-2)
    observation_space: Any = spaces.Dict(
        {
            "action_mask": envs.Box(0, 1, (3,), jnp.dtype("int8")),
            "x": envs.Box(-1.0, 1.0, (2,)),
        }
    )

    def reset(self, key):
        return jnp.int32(0), self.observe(key)

    def step(self, key, state, action):
        obs_key, reward_key, end_key = jax.random.split(key, 3)
        return envs.EnvStep(
            state=state + 1,
            obs=self.observe(obs_key),
            reward=3 * (action + 0.5) * jax.random.uniform(reward_key),
            terminated=jax.random.uniform(end_key) < 0.15,
            truncated=state + 1 == self.limit,
            info={},
        )

    def observe(self, key):
        mask_key, x_key = jax.random.split(key)
        action_mask = jnp.arange(3) != jax.random.randint(mask_key, (), 0, 3)
        x = jax.random.uniform(x_key, (2,), minval=-1.0)
        return {"action_mask": action_mask.astype(jnp.int8), "x": x}
