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


def test_host_step_time_is_measured():
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


def multiply_matrices(x):
    """Returns 0 after matrix products that XLA cannot eliminate."""
    matrix = jnp.full((64, 64), 1 / 64) + x.sum() * 0
    for _ in range(40):
        matrix = matrix @ matrix
    return matrix[0, 0] - 1 / 64


@pytest.fixture
def count_operations(monkeypatch):
    """Measures floating-point operations instead of noisy times."""

    def count(program, args):
        return jax.jit(program).lower(args).compile().cost_analysis().get("flops", 0)

    monkeypatch.setattr(profiling, "_time", count)


@struct.dataclass(kw_only=True)
class CostlyEnv(CountEnv):
    def step(self, key, state, action):
        result = super().step(key, state, action)
        return result.replace(obs=result.obs + multiply_matrices(result.obs))


@rollout.stateless_policy
def costly_policy(params, obs, key):
    return jnp.zeros(obs.shape[0], jnp.int32), {
        "value": obs[:, 0] + multiply_matrices(obs)
    }


@pytest.mark.slow
@pytest.mark.parametrize("part", ["env_step", "policy"])
def test_cost_is_assigned_to_its_part(part, count_operations):
    is_env = part == "env_step"
    env = envs.vectorize(CostlyEnv() if is_env else CountEnv(), 4)
    policy = make_collector("count").policy if is_env else costly_policy
    collector = rollout.Collector(env=env, policy=policy)
    profile = rollout.profile(collector, None, KEY, 16)
    total_of_parts = (
        profile.policy + profile.env_step + profile.auto_reset + profile.recording
    )
    expensive_part = getattr(profile, part)
    assert expensive_part > 100 * (total_of_parts - expensive_part)
    assert profile.total > 100 * (total_of_parts - expensive_part)
