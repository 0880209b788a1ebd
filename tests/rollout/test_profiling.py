import time

import jax
import jax.numpy as jnp
import pytest
from cases import CountEnv, make_collector
from flax import struct
from host_count import HostCount

import rollout
from rollout import envs, profiling

KEY = jax.random.key(0)


class SlowCount(HostCount):
    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


def test_work_of_a_host_environment_shows_as_its_step():
    env, policy = SlowCount(4), make_collector("count").policy
    collector = rollout.HostCollector(env=env, policy=policy)
    carry = collector.init(KEY)
    profile = rollout.profile(collector, None, KEY, 5, num_repeats=2)
    with pytest.raises(ValueError, match="another collector steps these"):
        collector.step(carry, None)
    assert 5 * 0.01 <= profile.env_step < profile.total
    parts = profile.policy, profile.env_step, profile.auto_reset, profile.recording
    assert min(parts) > 0
    assert profile.unexplained == pytest.approx(profile.total - sum(parts))


def work(x):
    """Products that XLA cannot drop; adds zero."""
    matrix = jnp.full((64, 64), 1 / 64) + x.sum() * 0
    for _ in range(40):
        matrix = matrix @ matrix
    return matrix[0, 0] - 1 / 64


@pytest.fixture
def count_operations(monkeypatch):
    """A profile in floating-point operations: the clock of a busy machine is noise."""

    def count(program, given):
        return jax.jit(program).lower(given).compile().cost_analysis().get("flops", 0)

    monkeypatch.setattr(profiling, "_time", count)


@struct.dataclass(kw_only=True)
class HardEnv(CountEnv):
    def step(self, key, state, action):
        result = super().step(key, state, action)
        return result.replace(obs=result.obs + work(result.obs))


@rollout.stateless_policy
def hard_policy(params, obs, key):
    return jnp.zeros(obs.shape[0], jnp.int32), {"value": obs[:, 0] + work(obs)}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["env_step", "policy"])
def test_work_of_a_part_shows_as_that_part(part, count_operations):
    is_env = part == "env_step"
    env = envs.vectorize(HardEnv() if is_env else CountEnv(), 4)
    policy = make_collector("count").policy if is_env else hard_policy
    collector = rollout.Collector(env=env, policy=policy)
    profile = rollout.profile(collector, None, KEY, 16)
    others = profile.policy + profile.env_step + profile.auto_reset + profile.recording
    most = getattr(profile, part)
    assert most > 100 * (others - most)
    assert profile.total > 100 * (others - most)
