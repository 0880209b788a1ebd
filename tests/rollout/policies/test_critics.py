"""Tests of critics of policies inside wrappers and policy maps."""

import agents
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit
from flax import struct

import rollout
from rollout import envs
from rollout.policies import (
    EpsilonGreedy,
    GaussianNoise,
    Greedy,
    OrnsteinUhlenbeck,
    RandomWarmup,
)

pytestmark = pytest.mark.usefixtures("quick_compile")
KEY = jax.random.key(4)
T, B = 24, 3
BOX = envs.Box(-1.0, 1.0, (2,))


@struct.dataclass(kw_only=True)
class PushEnv(CountEnv):
    """A `CountEnv` with continuous actions."""

    @property
    def action_space(self):
        return BOX


def critic(params, obs, memory):
    """Returns sums of small integers, which are exact."""
    return params * obs[:, 0] + 100.0 * memory


def make_policy(memory_type, space):
    def act(params, obs, memory, key):
        shape = obs.shape[:1] + space.shape
        extras = {"memory": memory + 1}  # the memory at the successor
        return jnp.zeros(shape, space.dtype), memory + 1, extras

    def act_stateless(params, obs, key):
        action, _, _ = act(params, obs, jnp.zeros(len(obs)), key)
        return action, {"memory": jnp.zeros(len(obs))}

    if memory_type == "recurrent":
        return rollout.recurrent_policy(act, jnp.zeros, mode_fn=act, value_fn=critic)
    return rollout.stateless_policy(
        act_stateless,
        mode_fn=act_stateless,
        value_fn=lambda params, obs: critic(params, obs, 0.0),
    )


def decay(step):
    return jnp.where(step < 3, 0.5, 0.25)


DISCRETE_WRAPPERS = (
    lambda policy, space: policy,
    lambda policy, space: Greedy(policy),
    lambda policy, space: RandomWarmup(policy, space, 4),
    lambda policy, space: EpsilonGreedy(policy, space, 0.5),
    lambda policy, space: EpsilonGreedy(policy, space, decay),
)
BOX_WRAPPERS = (
    lambda policy, space: GaussianNoise(policy, space, 0.5),
    lambda policy, space: OrnsteinUhlenbeck(policy, space, decay),
)
# The wrappers are in one program, and each collects a trajectory.
SPACES = {
    "discrete": (CountEnv(), DISCRETE_WRAPPERS),
    "box": (PushEnv(), BOX_WRAPPERS),
}


def check_values(trajectory, value, carry):
    """Compares with the critic of the wrapped policy at every true successor."""
    rows = jax.device_get(trajectory)
    want = 3.0 * rows.next_obs[..., 0] + 100.0 * rows.extras["memory"]
    continues = rows.truncated & ~rows.terminated
    assert continues.any()
    np.testing.assert_array_equal(rows.final_value, np.where(continues, want, 0.0))
    memory = np.where(rows.done[-1], 0.0, rows.extras["memory"][-1])
    want = 3.0 * np.asarray(carry.obs)[:, 0] + 100.0 * memory
    np.testing.assert_array_equal(value, want)


def collect_values(collector):
    carry = collector.init(KEY)
    carry, trajectory = collector.collect_steps(carry, jnp.float32(3.0), T)
    return trajectory, collector.value(carry, jnp.float32(3.0)), carry


@pytest.mark.parametrize(
    "memory", [pytest.param("stateless", marks=pytest.mark.slow), "recurrent"]
)
@pytest.mark.parametrize("space", SPACES)
def test_wrappers_forward_the_critic(space, memory):
    env, wrappers = SPACES[space]
    env = envs.vectorize(env, B)
    policy = make_policy(memory, env.action_space)
    policies = [wrap(policy, env.action_space) for wrap in wrappers]
    collectors = [rollout.Collector(env=env, policy=x) for x in policies]
    run = quick_jit(lambda: [collect_values(x) for x in collectors])
    for result in run():
        check_values(*result)


def choose(weight, obs, key):
    return jnp.zeros(obs.shape, jnp.int32)


def count_actions(weight, obs, memory, key):
    """Counts the actions of the episode in every leaf of the memory."""
    return choose(weight, obs, key), jax.tree.map(lambda x: x + 1, memory)


def two_counts(num_agents):
    return {"twice": jnp.zeros((num_agents, 2))}


# The value is `WEIGHTS * obs + COUNTS * episode_length`.
AGENT_POLICIES = {
    "one": rollout.recurrent_policy(
        count_actions, jnp.zeros, value_fn=lambda weight, obs, n: weight * obs + n
    ),
    "two": rollout.recurrent_policy(
        count_actions,
        two_counts,
        value_fn=lambda weight, obs, n: weight * obs + n["twice"].sum(-1),
    ),
    "none": rollout.stateless_policy(choose, value_fn=lambda weight, obs: weight * obs),
    "no critic": rollout.stateless_policy(choose),
}
WEIGHTS = {"one": 2.0, "two": 3.0, "none": 5.0, "no critic": 0.0}
COUNTS = {"one": 1.0, "two": 2.0, "none": 0.0, "no critic": 0.0}


def sample_mapping(key, names):
    return jax.random.permutation(key, len(names))


@pytest.mark.parametrize(
    ("is_sampled", "third_policy"),
    [
        (False, "none"),
        (True, "no critic"),
        pytest.param(False, "no critic", marks=pytest.mark.slow),
        pytest.param(True, "none", marks=pytest.mark.slow),
    ],
)
def test_policy_map_evaluates_the_critic_of_each_agent(is_sampled, third_policy):
    length, all_act = 5, np.ones((6, 3), bool)
    no_end = ~all_act[1:]
    env = agents.ScheduleEnv(
        acting=all_act,
        reward=np.zeros((length, 3), np.float32),
        terminated=no_end,
        truncated=no_end,
        episode_terminated=no_end[:, 0],
        episode_truncated=np.arange(length) == length - 1,
    )
    lanes = envs.vectorize(env, 4)
    names = ["one", "two", third_policy]
    policies = {name: AGENT_POLICIES[name] for name in names}
    fixed = rollout.agents.static_mapping(dict(zip("abc", names, strict=True)))
    mapping = sample_mapping if is_sampled else fixed
    policy = rollout.agents.policy_map(policies, mapping, env)
    collector = rollout.Collector(env=lanes, policy=policy)
    params = {name: jnp.float32(WEIGHTS[name]) for name in names}

    @quick_jit
    def run():
        carry = collector.init(KEY)
        carry, t = collector.collect_steps(carry, params, 2 * length + 2)
        return t, collector.value(carry, params)

    t, value = jax.device_get(run())
    weight, count = (
        np.array([table[name] for name in names])[t.extras.policy_id]
        for table in (WEIGHTS, COUNTS)
    )
    is_resampled = not np.array_equal(t.extras.policy_id[0], t.extras.policy_id[5])
    assert is_resampled == is_sampled
    want = weight * t.next_obs["all"] + count * t.episode_length[..., None]
    truncated = t.truncated[..., None]
    assert truncated.any()
    np.testing.assert_array_equal(t.final_value["all"], np.where(truncated, want, 0.0))
    np.testing.assert_array_equal(value["all"], want[-1])
