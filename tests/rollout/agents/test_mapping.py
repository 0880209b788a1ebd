"""Tests of policy mappings: static and sampled mappings, states, extras and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import ChanceEnv, OneAgent
from agents import schedule as make_table
from cases import CountEnv, quick_jit

import rollout
from rollout import envs

KEY = jax.random.key(11)
pytestmark = [
    pytest.mark.slow,  # each test compiles separate programs
    pytest.mark.usefixtures("quick_compile"),
]
B, T = 4, 12


def constant(number, **extras):
    """Returns a policy with a constant action that records its observations."""

    def act(params, obs, key):
        del params, key
        action = jnp.full(obs.shape, number, jnp.int32)
        return action, {name: obs * x for name, x in extras.items()}

    return rollout.stateless_policy(act)


def counting():
    """Returns a policy whose action is the number of its earlier actions."""
    return rollout.recurrent_policy(
        lambda params, obs, state, key: (state, state + 1),
        lambda num_envs: jnp.zeros((num_envs,), jnp.int32),
    )


def table(num_agents=3, num_steps=3, acting=None):
    acting = np.ones((num_steps + 1, num_agents)) if acting is None else acting
    reward = np.arange(num_steps * num_agents).reshape(num_steps, num_agents)
    return make_table(acting, reward)


def collect(env, policies, mapping, *, num_envs=B, num_steps=T, groups=None):
    env = envs.vectorize(env, num_envs)
    policy = rollout.agents.policy_map(policies, mapping, env, groups=groups)
    collector = rollout.Collector(env=env, policy=policy)
    params = dict.fromkeys(policies)

    @quick_jit
    def run(key):
        return collector.collect_steps(collector.init(key), params, num_steps)[1]

    return run(KEY)


def test_static_mapping_batches_agents_by_policy():
    shapes = []

    def act(params, obs, key):
        del params, key
        shapes.append(obs.shape)
        return jnp.full(obs.shape, 2, jnp.int32)

    policies = {"two": rollout.stateless_policy(act), "one": constant(1)}
    for order in ([1, 2, 1], [1, 2, 2]):
        shapes.clear()
        names = {
            agent: ("one", "two")[x - 1] for agent, x in zip("abc", order, strict=True)
        }
        trajectory = collect(table(), policies, rollout.agents.static_mapping(names))
        np.testing.assert_array_equal(trajectory.action["all"][3, 1], order)
        policy_id = trajectory.extras.policy_id[3, 1]
        np.testing.assert_array_equal(policy_id, 2 - np.array(order))
        assert set(shapes) == {(order.count(2) * B,)}


def test_single_agent_has_the_bits_of_the_kernel():
    env = envs.vectorize(CountEnv(), B)
    policy = rollout.random_policy(env.action_space)
    plain = rollout.Collector(env=env, policy=policy)
    _, want = plain.collect_steps(plain.init(KEY), None, T)
    mapping = rollout.agents.static_mapping("only")
    got = collect(OneAgent(CountEnv()), {"only": policy}, mapping)
    np.testing.assert_array_equal(got.action["all"][..., 0], want.action)
    np.testing.assert_array_equal(got.obs["all"][:, :, 0], want.obs)
    np.testing.assert_array_equal(got.next_obs["all"][:, :, 0], want.next_obs)
    for name in ("reward", "terminated", "truncated", "episode_return", "episode_id"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    np.testing.assert_array_equal(got.info.env["noise"], want.info["noise"])
    np.testing.assert_array_equal(
        got.info.agents.agent_return[..., 0], want.episode_return
    )


def test_policy_state_changes_only_if_the_agent_acts():
    acting = [[1, 0, 1], [1, 1, 0], [0, 0, 1], [1, 1, 1]]
    env = table(acting=acting)
    got = collect(env, {"count": counting()}, rollout.agents.static_mapping("count"))
    # The action of an agent that does not act is ignored.
    want = np.cumsum([[0, 0, 0], *acting[:2]], axis=0)
    np.testing.assert_array_equal(got.action["all"][:, 1], np.tile(want, (T // 3, 1)))


@functools.cache
def random_mapping(num):
    return lambda key, agents: jax.random.randint(key, (len(agents),), 0, num)


def test_mapping_is_sampled_once_per_episode():
    """Collects 10,000 episodes of two steps."""
    num_envs, num_steps = 250, 80
    env = table(num_agents=2, num_steps=2)
    policies = {name: constant(i) for i, name in enumerate(("x", "y", "z"))}
    got = collect(
        env, policies, random_mapping(3), num_envs=num_envs, num_steps=num_steps
    )
    policy_id = np.asarray(got.extras.policy_id)
    np.testing.assert_array_equal(got.action["all"], policy_id)
    by_episode = policy_id.reshape(num_steps // 2, 2, num_envs, 2)
    np.testing.assert_array_equal(by_episode[:, 0], by_episode[:, 1])
    is_equal = by_episode[1:, 0] == by_episode[:-1, 0]
    assert abs(is_equal.mean() - 1 / 3) < 0.02  # nine standard deviations


def test_sampled_mapping_does_not_depend_on_the_number_of_lanes():
    policies = {"x": constant(0), "y": constant(1)}
    two_lanes, five_lanes = (
        collect(table(), policies, random_mapping(2), num_envs=num) for num in (2, 5)
    )
    two_lanes, five_lanes = two_lanes.extras.policy_id, five_lanes.extras.policy_id
    np.testing.assert_array_equal(two_lanes, five_lanes[:, :2])
    assert len(np.unique(five_lanes.reshape(-1, 3), axis=0)) > 2


def test_sampled_mapping_selects_the_policy_state():
    policies = {"count": counting(), "seven": constant(7)}
    got = collect(table(), policies, random_mapping(2))
    is_counting = got.extras.policy_id == 0
    steps = jnp.broadcast_to((got.episode_length - 1)[..., None], is_counting.shape)
    np.testing.assert_array_equal(got.action["all"], jnp.where(is_counting, steps, 7))


def test_extras_are_merged_by_name():
    policies = {"x": constant(0, value=2.0), "y": constant(1, value=3.0, log_prob=5.0)}
    for mapping in (
        random_mapping(2),
        rollout.agents.static_mapping({"a": "y", "b": "x", "c": "y"}),
    ):
        got = collect(table(), policies, mapping)
        is_y, obs = got.extras.policy_id == 1, got.obs["all"]
        extras = got.extras.agents["all"]
        np.testing.assert_array_equal(extras["value"], obs * jnp.where(is_y, 3.0, 2.0))
        np.testing.assert_array_equal(extras["log_prob"], obs * is_y * 5.0)


def test_groups_have_separate_policies():
    env = ChanceEnv()
    box = rollout.random_policy(env.action_spaces["one"])
    discrete = rollout.stateless_policy(
        lambda params, obs, key: jnp.full(obs.shape, 3, jnp.int32)
    )
    names = {"a": "discrete", "b": "box", "c": "discrete"}
    policies = {"box": box, "discrete": discrete}
    got = collect(env, policies, rollout.agents.static_mapping(names))
    assert np.all(np.asarray(got.action["two"]) == 3)
    assert len(np.unique(got.action["one"])) > 20

    def mapping(key, agents):
        return jnp.where(jax.random.bits(key) > 0, jnp.array([1, 0, 1]), 1)

    groups = {"box": ["one"], "discrete": ["two"]}
    sampled = collect(env, policies, mapping, groups=groups)
    np.testing.assert_array_equal(sampled.action["two"], got.action["two"])
    message = "The policy 'box', which controls the group 'two',"
    with pytest.raises(ValueError, match=message):
        collect(env, policies, mapping)


def test_error_in_a_policy_names_the_policy():
    def act(params, obs, key):
        raise TypeError("odd")

    policies = {"x": constant(0), "y": rollout.stateless_policy(act)}
    with pytest.raises(TypeError, match="odd") as caught:
        collect(table(), policies, random_mapping(2))
    note = "The policy 'y', which controls the group 'all', raised this error."
    assert note in caught.value.__notes__


def test_agent_with_a_policy_of_another_group_is_unmapped():
    env = ChanceEnv()
    boxed = rollout.random_policy(env.action_spaces["one"])
    policies = {"box": boxed, "discrete": constant(3)}
    groups = {"box": ["one"], "discrete": ["two"]}
    got = collect(env, policies, random_mapping(2), groups=groups)
    policy_id = np.asarray(got.extras.policy_id)
    assert set(np.unique(policy_id[..., [0, 2]])) == {-1, 1}
    assert set(np.unique(policy_id[..., 1])) == {-1, 0}
    is_discrete = policy_id[..., [0, 2]] == 1
    np.testing.assert_array_equal(got.action["two"], 3 * is_discrete)
    unmapped = got.info.agents.acted & (policy_id == -1)
    assert rollout.agents.summarize_agents(got).num_unmapped == unmapped.sum() > 0


def test_index_out_of_range_is_unmapped():
    """`policy_map` raises for an index that it samples; others count as unmapped."""
    policies, env = {"x": constant(3), "y": constant(4)}, envs.vectorize(table(), B)
    policy = rollout.agents.policy_map(policies, lambda *_: jnp.array([0, 1, 1]), env)
    policy = policy.replace(policy_mapping_fn=lambda *_: jnp.array([0, 2, -5]))
    collector = rollout.Collector(env=env, policy=policy)
    _, got = collector.collect_steps(collector.init(KEY), dict.fromkeys(policies), T)
    np.testing.assert_array_equal(got.extras.policy_id[2, 1], [0, -1, -1])
    np.testing.assert_array_equal(got.action["all"][2, 1], [3, 0, 0])
    assert rollout.agents.summarize_agents(got).num_unmapped == 2 * B * T


def test_greedy_uses_the_modes_of_the_policies():
    greedy = rollout.stateless_policy(
        lambda params, obs, key: jnp.full(obs.shape, 1, jnp.int32),
        mode_fn=lambda params, obs, key: jnp.full(obs.shape, 2, jnp.int32),
    )
    mapping = rollout.agents.static_mapping({"a": "greedy", "b": "x", "c": "x"})
    env = envs.vectorize(table(), B)
    policy = rollout.agents.policy_map(
        {"greedy": greedy, "x": constant(5)}, mapping, env
    )
    collector = rollout.Collector(env=env, policy=rollout.policies.Greedy(policy))
    params = {"greedy": None, "x": None}
    got = collector.step(collector.init(KEY), params)[1]
    np.testing.assert_array_equal(got.action["all"][0], [2, 5, 5])
    mapping = rollout.agents.static_mapping("x")
    assert not rollout.agents.policy_map({"x": constant(0)}, mapping, env).has_mode


def test_exploration_schedule_counts_actions_of_the_agent():
    space = envs.Discrete(1_000_000)
    noisy = rollout.policies.EpsilonGreedy(
        constant(5), space, lambda step: jnp.where(step < 2, 1.0, 0.0)
    )
    acting = [[1, 0, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]]
    got = collect(
        table(acting=acting), {"x": noisy}, rollout.agents.static_mapping("x")
    )
    # Each agent explores in its first two actions and not per episode.
    explored = np.asarray(got.action["all"])[:, 0] != 5
    acted = np.asarray(got.info.agents.acted)[:, 0]
    num_actions = np.cumsum(acted, axis=0) - acted
    np.testing.assert_array_equal(explored, num_actions < 2)
