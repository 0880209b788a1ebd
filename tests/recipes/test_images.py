"""Tests of agents in environments with images."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from flax import struct
from recipe_cases import flatten, in_ci, make_agent

from rollout import envs
from rollout.envs import Box, Discrete
from rollout.envs.spaces import Dict

IMAGE = Box(0, 255, (36, 36, 1), jnp.dtype("uint8"))


@struct.dataclass
class Camera:
    """Observes a random image and a random speed. The reward is 0."""

    action_space: Any
    observation_space = Dict({"image": IMAGE, "speed": Box(-9.0, 9.0, (2,))})

    def reset(self, key):
        return jnp.int32(0), self.observation_space.sample(key)

    def step(self, key, state, action):
        return envs.EnvStep(
            state=state + 1,
            obs=self.observation_space.sample(key),
            reward=jnp.float32(0),
            terminated=jnp.bool_(False),
            truncated=state == 2,
        )


def make_camera(name, **changes):
    """Creates an agent for two cameras with normalized speeds."""
    is_continuous = name in ("sac", "td3")
    space = Box(-1.0, 1.0, (1,)) if is_continuous else Discrete(3)
    env = envs.vectorize(Camera(space), 2)
    changes = {"normalize_observations": True, "num_steps": 2} | changes
    return make_agent(name, env, **changes)


@pytest.mark.parametrize("name", in_ci("ppo", "dqn", "sac"))
def test_networks_encode_images_and_buffers_store_bytes(name):
    agent = make_camera(name)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    kernels = [x for x in names if x.startswith(".params") and "Conv_0" in x]
    # Actor and critics share convolutions except in SAC and TD3.
    assert len(kernels) == (4 if name in ("sac", "td3") else 2)
    stats = state.params["obs_stats"]
    assert stats["mean"]["image"] is None
    assert stats["mean"]["speed"].shape == (2,)
    if agent.num_initial_steps:
        assert state.buffer_state.ring.experience.obs["image"].dtype == np.uint8


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile", "key_reuse")
@pytest.mark.parametrize("name", in_ci("ppo"))
def test_image_training_may_be_mapped_over_seeds(name):
    """Each seed of a mapped training equals a training without `vmap`."""
    agent = make_camera(name, num_updates=1)

    def train(seed):
        return agent.train(agent.init(jax.random.key(seed)))[0].params

    params = jax.device_get(jax.jit(jax.vmap(train))(np.arange(2)))
    first = jax.device_get(jax.jit(train)(0))
    got = flatten(jax.tree.map(lambda x: x[0], params))
    np.testing.assert_allclose(got, flatten(first), rtol=1e-2, atol=2e-3)
    second = flatten(jax.tree.map(lambda x: x[1], params))
    assert abs(got - second).max() > 0.1


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_predict_accepts_a_raw_image(name):
    agent = make_camera(name)

    @quick_jit
    def run(key):
        init_key, obs_key, key = jax.random.split(key, 3)
        obs = agent.spec.observation_space.sample(obs_key)
        batch = jax.tree.map(lambda x: x[None], obs)
        params = agent.init_learner(init_key, batch).params
        expected = agent.eval_policy.apply(params, batch, (), key).action[0]
        return agent.predict(params, obs), expected

    action, expected = jax.device_get(run(jax.random.key(0)))
    assert action == expected


def test_custom_networks_observe_normalized_values_and_raw_images():
    class Recorder(nn.Module):
        """Outputs the sum of the speeds as the value."""

        @nn.compact
        def __call__(self, obs):
            assert obs["image"].dtype == jnp.uint8
            value = obs["speed"].sum(-1)
            return nn.Dense(3)(obs["speed"]), value

    agent = make_camera("ppo").replace(network=Recorder())
    obs = {"image": np.zeros((1, 36, 36, 1), np.uint8), "speed": np.full((1, 2), 5.0)}

    @quick_jit
    def run(key):
        params = agent.init_learner(key, obs).params
        stats = {"mean": {"image": None, "speed": jnp.full(2, 3.0)}}
        stats |= {"var": {"image": None, "speed": jnp.full(2, 4.0)}, "count": 1.0}
        return agent.policy.value(params | {"obs_stats": stats}, obs, ())

    assert run(jax.random.key(0)) == 2.0  # (5 - 3) / 2, twice
