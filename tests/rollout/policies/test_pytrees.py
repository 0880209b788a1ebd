"""Tests of policies as pytrees and of custom policy classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import OneAgent
from cases import CountEnv, WithCritic, quick_jit
from flax import struct
from host_count import HostCount

import rollout
from rollout import envs
from rollout.agents import policy_map, static_mapping
from rollout.policies import (
    EpsilonGreedy,
    GaussianNoise,
    Greedy,
    OrnsteinUhlenbeck,
    PolicyWrapper,
    RandomWarmup,
)
from rollout.recommendation import item_policy
from rollout.types import Persistent

B, T = 4, 12
KEY = jax.random.key(0)
SPACE = envs.Discrete(3)
BOX = envs.Box(-np.ones(20, np.float32), np.ones(20, np.float32), (20,))


class Threshold(rollout.Policy):
    """A custom policy with a leaf, a static option, a state and a critic."""

    threshold: float = 0.5
    largest: int = struct.field(pytree_node=False, default=2)

    def init(self, num_envs):
        return Persistent(jnp.zeros(num_envs, jnp.int32))

    def apply(self, params, obs, state, key):
        TRACES.append("apply")
        sample = jax.random.uniform(key, obs.shape[:1])
        action = jnp.where(sample < self.threshold, self.largest, 0)
        extras = {"sample": sample, "count": state.value}
        return rollout.PolicyStep(action, Persistent(state.value + 1), extras)

    def mode(self, params, obs, state, key):
        action = jnp.full(obs.shape[:1], self.largest, jnp.int32)
        step = self.apply(params, obs, state, key)
        return step._replace(action=action)

    def value(self, params, obs, state):
        return params * obs[:, 0] + self.threshold


TRACES = []


def act(params, obs, key):
    return jnp.zeros(obs.shape[:1], jnp.int32)


def decay(step):
    return 1 / (1 + step)


ZERO_POLICY = rollout.stateless_policy(act, mode_fn=act)


def make_collector(policy, **options):
    env = envs.TimeLimit(CountEnv(), 5)
    return rollout.Collector(envs.vectorize(env, B), policy, **options)


def make_host(policy):
    return rollout.HostCollector(HostCount(B), policy)


def collect(collector, params=1.0):
    return collector.collect_steps(collector.init(KEY), params, T)[1]


REPRS = {
    "StatelessPolicy(fn=act, mode_fn=act)": ZERO_POLICY,
    "ItemPolicy(fn=act, items=float32[3, 3])": item_policy(act, items=np.eye(3)),
    "EpsilonGreedy(policy=Threshold(), action_space=Discrete(n=3, "
    "dtype=dtype('int32'), start=0), epsilon=decay)": EpsilonGreedy(
        Threshold(), SPACE, decay
    ),
}


@pytest.mark.parametrize("text", REPRS)
def test_policy_has_a_short_repr(text):
    assert str(REPRS[text]) == text


def test_policies_compare_by_value():
    assert EpsilonGreedy(ZERO_POLICY, SPACE, 0.1) == EpsilonGreedy(
        ZERO_POLICY, SPACE, 0.1
    )
    assert EpsilonGreedy(ZERO_POLICY, SPACE, 0.1) != EpsilonGreedy(
        ZERO_POLICY, SPACE, 0.2
    )
    assert hash(Threshold(0.1)) == hash(Threshold(0.1))
    assert Threshold(0.1) != Threshold(0.1, largest=1)
    masked = rollout.random_policy(SPACE, action_mask_fn=lambda obs: obs)
    assert masked != rollout.random_policy(SPACE)


@pytest.mark.parametrize("make", [make_collector, make_host])
def test_numbers_share_one_trace(make):
    counts = []
    for epsilon in np.linspace(0, 1, 10).tolist():
        policy = EpsilonGreedy(Threshold(epsilon), SPACE, epsilon)
        collector = make(policy)
        carry = collector.init(KEY)
        num_traces = len(TRACES)
        rows = collector.collect_steps(carry, 1.0, T)[1]
        counts.append(len(TRACES) - num_traces)
        assert rows.action.shape == (T, B)
    assert counts[0] > 0
    assert not any(counts[1:])


def test_vmap_over_numbers_equals_a_loop():
    collector = make_collector(EpsilonGreedy(Threshold(), SPACE, 0.0))
    epsilons = jnp.asarray([0.0, 0.3, 1.0])

    def run(epsilon):
        policy = collector.policy.replace(epsilon=epsilon)
        policy = policy.replace(policy=Threshold(epsilon / 2))
        return collect(collector.replace(policy=policy))

    mapped = jax.jit(jax.vmap(run))(epsilons)
    looped = [run(float(epsilon)) for epsilon in epsilons]
    jax.tree.map(
        np.testing.assert_array_equal,
        mapped,
        jax.tree.map(lambda *x: jnp.stack(x), *looped),
    )
    assert len({np.asarray(x.action).tobytes() for x in looped}) == 3


def test_scale_may_be_traced():
    zero_policy = rollout.stateless_policy(lambda *_: jnp.zeros((B, 20)))
    policy, obs = OrnsteinUhlenbeck(zero_policy, BOX, 1.0), jnp.zeros((B, 1))

    def explore(scale):
        noisy = policy.replace(scale=scale)
        return noisy.apply(None, obs, noisy.init(B), KEY).action

    constant = np.asarray(quick_jit(lambda: explore(0.25))())
    # XLA folds a constant scale: results are equal up to rounding.
    np.testing.assert_allclose(quick_jit(explore)(0.25), constant, rtol=1e-6)
    assert (constant != 0).any()


def test_warmup_length_may_be_mapped():
    def run(num_steps):
        return collect(
            make_collector(RandomWarmup(ZERO_POLICY, SPACE, num_steps))
        ).action

    # `vmap` converts the condition to a selection, which reads the key twice.
    with jax.debug_key_reuse(False):
        actions = quick_jit(jax.vmap(run))(jnp.asarray([0, 3, T]))
    assert not actions[0].any()
    assert actions[1, :3].any()
    assert not actions[1, 3:].any()
    np.testing.assert_array_equal(actions[1, :3], actions[2, :3])
    assert actions[2, 3:].any()


def test_array_of_numbers_needs_vmap():
    policy = EpsilonGreedy(ZERO_POLICY, SPACE, jnp.zeros(3))
    with pytest.raises(ValueError, match=r"got .* of shape \(3,\). Use `jax"):
        collect(make_collector(policy))


def test_custom_policy_equals_its_formula():
    rows = collect(make_collector(Threshold(0.4)))
    sample = np.asarray(rows.extras["sample"])
    np.testing.assert_array_equal(rows.action, np.where(sample < 0.4, 2, 0))
    count = np.broadcast_to(np.arange(T)[:, None], (T, B))
    np.testing.assert_array_equal(rows.extras["count"], count)
    bootstraps = np.asarray(rows.truncated & ~rows.terminated)
    expected = np.where(bootstraps, np.asarray(rows.next_obs[..., 0]) + 0.4, 0.0)
    np.testing.assert_allclose(rows.final_value, expected, rtol=1e-6)
    assert bootstraps.any()
    greedy = Greedy(Threshold(0.4))
    step = quick_jit(greedy.apply)(1.0, rows.obs[0], greedy.init(B), KEY)
    np.testing.assert_array_equal(step.action, 2)


def test_custom_policy_is_equal_on_a_host():
    rows = collect(make_host(Threshold(0.4)))
    sample = np.asarray(rows.extras["sample"])
    np.testing.assert_array_equal(rows.action, np.where(sample < 0.4, 2, 0))
    kernel = collect(make_collector(Threshold(0.4)))
    np.testing.assert_array_equal(sample, kernel.extras["sample"])


def test_custom_policy_in_a_policy_map():
    env = envs.vectorize(OneAgent(CountEnv()), B)
    policy = policy_map({"user": Threshold(0.4)}, static_mapping("user"), env)
    assert policy.has_mode
    assert policy.has_value
    rows = rollout.Collector(env, policy)
    rows = rows.collect_steps(rows.init(KEY), {"user": 1.0}, T)[1]
    (extras,) = rows.extras.agents.values()
    (action,) = rows.action.values()
    np.testing.assert_array_equal(action, np.where(extras["sample"] < 0.4, 2, 0))


class Clipped(PolicyWrapper):
    """A custom wrapper that adds a critic."""

    highest: int = 1

    def apply(self, params, obs, state, key):
        step = self.policy.apply(params, obs, state, key)
        return step._replace(action=jnp.minimum(step.action, self.highest))

    def value(self, params, obs, state):
        return obs[:, 0]


def test_custom_wrapper_forwards_methods():
    policy = Clipped(rollout.stateless_policy(act))
    assert policy.has_value
    assert not policy.has_mode
    rows = collect(make_collector(Clipped(Threshold(0.4))))
    assert set(np.unique(rows.action)) == {0, 1}
    exploring = EpsilonGreedy(policy, SPACE, 0.5)
    assert exploring.has_value
    no_critic = WithCritic(Threshold(), None)
    collectors = make_collector(exploring), make_collector(no_critic)
    with_value, without_value = jax.eval_shape(lambda: [*map(collect, collectors)])
    assert with_value.final_value.shape == (T, B)
    assert without_value.final_value == ()


def test_policy_classes_have_different_structures():
    class Other(Threshold):
        pass

    structure = jax.tree.structure(make_collector(Threshold()))
    assert jax.tree.structure(make_collector(Threshold())) == structure
    assert jax.tree.structure(make_collector(Other())) != structure


def test_missing_methods_raise():
    class Empty(rollout.Policy):
        pass

    with pytest.raises(NotImplementedError, match="`Empty` must define `apply`"):
        collect(make_collector(Empty()))
    with pytest.raises(ValueError, match="`policy` must be a `Policy`, for example"):
        make_collector(Empty)
    for name, args in (("mode", (KEY,)), ("value", ())):
        with pytest.raises(ValueError, match=f"or define `{name}`"):
            getattr(Empty(), name)(None, None, (), *args)


def test_action_bounds_may_be_traced():
    env = envs.make_vec("Pendulum-v1", B)
    zero_policy = rollout.stateless_policy(
        lambda params, obs, key: jnp.zeros((len(obs), 1))
    )

    def run(env):
        random = rollout.random_policy(env.action_space)
        noisy = GaussianNoise(zero_policy, env.action_space, 9.0)
        policies = random, noisy
        return jnp.stack([collect(rollout.Collector(env, x)).action for x in policies])

    # The torque limits of the two environments are their action bounds.
    stacked = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), env)
    params = stacked.env.env_params
    params = params.replace(max_torque=jnp.asarray([2.0, 0.5]))
    stacked = stacked.replace(env=stacked.env.replace(env_params=params))
    # `vmap` converts conditions to selections, which read a key twice.
    with jax.debug_key_reuse(False):
        actions = quick_jit(jax.vmap(run))(stacked)
    largest = abs(np.asarray(actions)).max(axis=(2, 3, 4))
    assert (largest[0] > 0.5).all()
    assert (largest[0] <= 2.0).all()
    assert (largest[1] > 0.25).all()
    assert (largest[1] <= 0.5).all()
