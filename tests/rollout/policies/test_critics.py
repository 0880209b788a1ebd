"""The critic of a policy, through every wrapper and map around it."""

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
WARMUP = 4


@struct.dataclass(kw_only=True)
class PushEnv(CountEnv):
    """Counts, and takes floats as its actions."""

    @property
    def action_space(self):
        return BOX


def critic(params, obs, memory):
    """Of small integers, so that no sum is rounded."""
    return params * obs[:, 0] + 100.0 * memory


def make_policy(kind, space):
    def act(params, obs, memory, key):
        shape = obs.shape[:1] + space.shape
        extras = {"memory": memory + 1}  # with which it sees the successor
        return jnp.zeros(shape, space.dtype), memory + 1, extras

    def act_at_once(params, obs, key):
        action, _, _ = act(params, obs, jnp.zeros(len(obs)), key)
        return action, {"memory": jnp.zeros(len(obs))}

    if kind == "recurrent":
        return rollout.recurrent_policy(act, jnp.zeros, mode_fn=act, value_fn=critic)
    return rollout.stateless_policy(
        act_at_once,
        mode_fn=act_at_once,
        value_fn=lambda params, obs: critic(params, obs, 0.0),
    )


def half(step):
    return jnp.where(step < 3, 0.5, 0.25)


WRAPPERS = {
    "greedy": lambda policy, space: Greedy(policy),
    "warm-up": lambda policy, space: RandomWarmup(policy, space, WARMUP),
}
OF_INTEGERS = {
    "epsilon": lambda policy, space: EpsilonGreedy(policy, space, 0.5),
    "epsilon by steps": lambda policy, space: EpsilonGreedy(policy, space, half),
}
OF_FLOATS = {
    "noise": lambda policy, space: GaussianNoise(policy, space, 0.5),
    "noise by steps": lambda policy, space: GaussianNoise(policy, space, half),
    "correlated": lambda policy, space: OrnsteinUhlenbeck(policy, space, 0.5),
    "correlated by steps": lambda policy, space: OrnsteinUhlenbeck(policy, space, half),
}
SPACES = {
    "integers": (CountEnv(), WRAPPERS | OF_INTEGERS),
    "floats": (PushEnv(), WRAPPERS | OF_FLOATS),
}


def check(trajectory, value, carry):
    """Compares with the critic of the policy itself, at every true successor."""
    t = jax.device_get(trajectory)
    want = 3.0 * t.next_obs[..., 0] + 100.0 * t.extras["memory"]
    continues = t.truncated & ~t.terminated
    assert continues.any()
    np.testing.assert_array_equal(t.final_value, np.where(continues, want, 0.0))
    memory = np.where(t.done[-1], 0.0, t.extras["memory"][-1])
    want = 3.0 * np.asarray(carry.obs)[:, 0] + 100.0 * memory
    np.testing.assert_array_equal(value, want)


def play(collector):
    carry = collector.init(KEY)
    carry, trajectory = collector.collect_steps(carry, jnp.float32(3.0), T)
    return trajectory, collector.value(carry, jnp.float32(3.0)), carry


@pytest.mark.parametrize(
    "kind", [pytest.param("stateless", marks=pytest.mark.slow), "recurrent"]
)
@pytest.mark.parametrize("space", SPACES)
def test_wrapped_policy_has_the_critic_of_the_policy(space, kind):
    env, wrappers = SPACES[space]
    env = envs.vectorize(env, B)
    policy = make_policy(kind, env.action_space)
    policies = [policy, *(wrap(policy, env.action_space) for wrap in wrappers.values())]
    collectors = [rollout.Collector(env=env, policy=x) for x in policies]
    run = quick_jit(lambda: [play(x) for x in collectors])
    for found in run():
        check(*found)


def choose(weight, obs, key):
    return jnp.zeros(obs.shape, jnp.int32)


def remember(weight, obs, memory, key):
    """Counts its actions in the episode, in every leaf."""
    return choose(weight, obs, key), jax.tree.map(lambda x: x + 1, memory)


def two_counts(num_agents):
    return {"twice": jnp.zeros((num_agents, 2))}


# Each with the number of its counts.
MAPPED = {
    "one": rollout.recurrent_policy(
        remember, jnp.zeros, value_fn=lambda weight, obs, n: weight * obs + n
    ),
    "two": rollout.recurrent_policy(
        remember,
        two_counts,
        value_fn=lambda weight, obs, n: weight * obs + n["twice"].sum(-1),
    ),
    "none": rollout.stateless_policy(choose, value_fn=lambda weight, obs: weight * obs),
    "mute": rollout.stateless_policy(choose),
}
WEIGHTS = {"one": 2.0, "two": 3.0, "none": 5.0, "mute": 0.0}
COUNTS = {"one": 1.0, "two": 2.0, "none": 0.0, "mute": 0.0}


def draw_seats(key, names):
    return jax.random.permutation(key, len(names))


@pytest.mark.parametrize("third", ["none", "mute"])
@pytest.mark.parametrize("is_drawn", [False, True])
def test_policy_map_has_the_critics_of_its_policies_by_group(is_drawn, third):
    length, every = 5, np.ones((6, 3), bool)
    never = ~every[1:]
    env = agents.ScheduleEnv(
        acting=every,
        reward=np.zeros((length, 3), np.float32),
        terminated=never,
        truncated=never,
        episode_terminated=never[:, 0],
        episode_truncated=np.arange(length) == length - 1,
    )
    lanes = envs.vectorize(env, 4)
    names = ["one", "two", third]
    policies = {name: MAPPED[name] for name in names}
    fixed = rollout.agents.static_mapping(dict(zip("abc", names, strict=True)))
    mapping = draw_seats if is_drawn else fixed
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
    is_drawn_anew = not np.array_equal(t.extras.policy_id[0], t.extras.policy_id[5])
    assert is_drawn_anew == is_drawn
    want = weight * t.next_obs["all"] + count * t.episode_length[..., None]
    cut = t.truncated[..., None]
    assert cut.any()
    np.testing.assert_array_equal(t.final_value["all"], np.where(cut, want, 0.0))
    np.testing.assert_array_equal(value["all"], want[-1])
