import jax
import jax.numpy as jnp
import pytest
from cases import CountEnv, make_collector
from flax import struct

import envs
import rollout


def test_parts_and_the_rest_add_up_to_the_whole():
    collector = make_collector("count", 16)
    profile = rollout.profile(collector, None, 16, num_repeats=2)
    parts = profile.policy + profile.env_step + profile.auto_reset + profile.recording
    assert min(profile[:5]) > 0
    assert profile.unexplained == pytest.approx(profile.whole - parts)


def slow(x, num_products):
    """Some milliseconds of work that XLA cannot drop; adds zero."""
    matrix = jnp.full((64, 64), 1 / 64) + x.sum() * 0
    for _ in range(num_products):
        matrix = matrix @ matrix
    return matrix[0, 0] - 1 / 64


@struct.dataclass(kw_only=True)
class SlowEnv(CountEnv):
    def step(self, key, state, action):
        result = super().step(key, state, action)
        return result.replace(obs=result.obs + slow(result.obs, 40))


@pytest.mark.slow
def test_slow_environment_shows_as_env_step():
    env = envs.vectorize(SlowEnv(), 4)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    profile = rollout.profile(collector, None, 16, num_repeats=3)
    others = profile.policy + profile.auto_reset + profile.recording
    assert profile.env_step > 2 * others


@pytest.mark.slow
def test_slow_policy_shows_as_policy():
    def act(params, obs, key):
        value = slow(obs, 40)
        return jnp.zeros(obs.shape[0], jnp.int32), {"value": obs[:, 0] + value}

    env = envs.vectorize(CountEnv(), 4)
    collector = rollout.Collector(env=env, policy=rollout.stateless_policy(act))
    profile = rollout.profile(collector, None, 16, key=jax.random.key(1), num_repeats=3)
    others = profile.env_step + profile.auto_reset + profile.recording
    assert profile.policy > 2 * others


@pytest.mark.parametrize("name", ["num_steps", "num_repeats"])
def test_wrong_count_is_refused(name):
    counts = {"num_steps": 4, name: 0}
    with pytest.raises(ValueError, match=f"`{name}` must be an int of at least 1"):
        rollout.profile(make_collector("count", 16), None, **counts)
