"""Tests of populations, in which each agent uses the parameters of one member."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import Walk, schedule
from cases import quick_jit

import rollout
from rollout import envs
from rollout.agents.population import apply_members

KEY = jax.random.key(2)
P = 5


def act(params, obs, state, key):
    """Depends on every input: parameters, observation, state and key."""
    noise = jax.random.randint(key, obs.shape[:1], 0, 1000)
    score = (obs @ params["w"]).astype(jnp.int32)
    return score + noise, state + score, {"noise": noise, "old": state}


POLICY = rollout.recurrent_policy(act, lambda num: jnp.zeros((num,), jnp.int32))


@functools.partial(quick_jit, static_argnames="size")
def apply(size, member, params, obs, state):
    """Applies the population and, for comparison, each member separately."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(member.shape[0]))

    def apply_member(member, obs, state, key):
        member_params = jax.tree.map(lambda x: x[member], params)
        decision = POLICY.apply(member_params, obs[None], state[None], key)
        return jax.tree.map(lambda x: x[0], decision)

    got = apply_members(POLICY.apply, size, member, params, obs, state, KEY)
    return got, jax.vmap(apply_member)(member, obs, state, keys)


@pytest.mark.parametrize(("num_agents", "size"), [(1, 40), (24, 5), (100, 3)])
def test_population_gathers_parameters_per_agent(num_agents, size):
    rng = np.random.default_rng(0)
    params = {"w": rng.integers(-9, 9, (size, 3)).astype(np.float32)}
    obs = rng.integers(-9, 9, (num_agents, 3)).astype(np.float32)
    state = rng.integers(0, 99, num_agents).astype(np.int32)
    for member in (
        rng.integers(0, size, num_agents),
        rng.integers(0, size, num_agents) // 2,
        np.full(num_agents, size - 1),
        np.arange(num_agents) % size,
    ):
        got, want = apply(size, member.astype(np.int32), params, obs, state)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def mapping(key, agents):
    return jax.random.randint(key, (len(agents),), 0, P + 1)


def make_collector(num_envs):
    def fixed(params, obs, key):
        del params, key
        return jnp.full(obs.shape, 7, jnp.int32), {}

    def member(params, obs, key):
        del key
        return jnp.full(obs.shape, 100, jnp.int32) * params, {}

    env = schedule(np.ones((4, 2)), np.ones((3, 2)))
    env = envs.vectorize(env, num_envs)
    policies = {
        "fixed": rollout.stateless_policy(fixed),
        "league": rollout.agents.Population(rollout.stateless_policy(member), P),
    }
    policy = rollout.agents.policy_map(policies, mapping, env)
    return rollout.Collector(env=env, policy=policy)


def logits_of(params, obs):
    return obs @ params["w"] + params["b"][None]


def choose(params, obs, key):
    del key
    return logits_of(params, obs).argmax(-1).astype(jnp.int32), {}


def surrogate(params, obs, action, reward, weight):
    log_probs = jax.nn.log_softmax(logits_of(params, obs))
    log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=1)[:, 0]
    return -(weight * log_prob * reward).sum() / 20


@jax.jit
def descend(params, *rows):
    grads = jax.grad(surrogate)(params, *rows)
    return jax.tree.map(lambda x, y: x - 0.1 * y, params, grads)


def play_alone(params, member, trajectory):
    """Plays the episodes of a member in a plain loop; returns padded rows."""
    obs = jax.device_get(trajectory.obs["agents"])
    ids = jax.device_get(trajectory.extras.policy_id)
    position, rows = obs[0, ..., 0].copy(), []
    for t, lane, agent in np.ndindex(ids.shape):
        number = obs[t, lane, agent, 1]
        if number == 0:
            position[lane, agent] = obs[t, lane, agent, 0]  # sampled by the reset
        if ids[t, lane, agent] != 1 + member or number >= 4 + agent:
            continue
        row = np.array([position[lane, agent], number], np.float32)
        action = np.argmax(row @ params["w"] + params["b"])
        position[lane, agent] += 2 * action - 1
        rows.append((row, action, -abs(position[lane, agent]), 1.0))
    padding = ids.size - len(rows)
    arrays = [np.array(x) for x in zip(*rows, strict=True)]
    return [np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in arrays]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_members_trained_together_equal_members_trained_alone():
    env = envs.vectorize(Walk(), 4)
    policy = rollout.stateless_policy(choose)
    policies = {"fixed": policy, "league": rollout.agents.Population(policy, P)}
    policy = rollout.agents.policy_map(policies, mapping, env)
    collector = rollout.Collector(env=env, policy=policy)
    rng = np.random.default_rng(0)
    shapes = {"w": (P, 2, 2), "b": (P, 2)}
    params = {x: np.float32(rng.normal(size=y)) for x, y in shapes.items()}
    fixed = {"w": np.zeros((2, 2), np.float32), "b": np.zeros(2, np.float32)}
    alone = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(P)]

    @quick_jit
    def update(carry, params):
        weights = {"fixed": fixed, "league": params}
        carry, t = collector.collect_steps(carry, weights, 24)
        rows = rollout.agents.agent_transitions((), t)[1]["agents"]
        flat = [x.reshape(-1, *x.shape[2:]) for x in (rows.obs, rows.action)]

        def train(params, member):
            weight = rows.mask & (rows.policy_id == 1 + member)
            return descend(params, *flat, rows.reward.ravel(), 1.0 * weight.ravel())

        return carry, jax.vmap(train)(params, jnp.arange(P)), t

    carry, moved = quick_jit(collector.init)(KEY), False
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    for _ in range(3):
        carry, new_params, t = update(carry, params)
        for member in range(P):
            rows = play_alone(alone[member], member, t)
            assert rows[3].sum() > 5
            alone[member] = jax.device_get(descend(alone[member], *rows))
            got = jax.tree.map(lambda x, i=member: x[i], new_params)
            jax.tree.map(close, got, alone[member])
        moved |= np.abs(new_params["w"] - params["w"]).max() > 0.1
        params = new_params
    assert moved


LEAGUE = {"fixed": None, "league": jnp.arange(P, dtype=jnp.int32)}


@pytest.mark.slow
def test_member_indices_follow_earlier_policies():
    collector = make_collector(16)
    _, got = collector.collect_steps(collector.init(KEY), LEAGUE, 6)
    policy_id = got.extras.policy_id
    assert set(np.unique(policy_id)) == set(range(P + 1))
    want = jnp.where(policy_id == 0, 7, 100 * (policy_id - 1))
    np.testing.assert_array_equal(got.action["all"], want)
    stats = rollout.agents.summarize_agents(got)
    counts = [stats.policies[name].returns.count for name in ("fixed", "league")]
    final_id = np.asarray(policy_id)[np.asarray(got.done)]
    # An episode counts once per policy.
    assert counts == [np.sum((final_id == 0).any(1)), np.sum((final_id > 0).any(1))]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_sharded_population_needs_no_collectives():
    types = {"axis_types": (jax.sharding.AxisType.Auto,)}
    mesh = jax.make_mesh((4,), ("lanes",), devices=jax.devices()[:4], **types)
    collector = make_collector(16)
    sharded = rollout.shard(collector, mesh)
    carry = sharded.init(KEY)
    run = jax.jit(lambda c, carry: c.collect_steps(carry, LEAGUE, 6)[1])
    got, want = run(sharded, carry), run(collector, collector.init(KEY))
    np.testing.assert_array_equal(got.action["all"], want.action["all"])
    text = run.lower(sharded, carry).compile().as_text()
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    assert not re.findall(rf" ({names})(?:-start)?\(", text)
