"""Tests of the error messages of `rollout.agents`."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import ChanceEnv, OneAgent, schedule
from cases import CountEnv

import rollout
from rollout import agents, envs

KEY = jax.random.key(11)
TABLE, TWO = (schedule(np.ones((4, n)), np.zeros((3, n))) for n in (3, 2))
SINGLE = envs.vectorize(CountEnv(), 4)
static_mapping, MAPPING = agents.static_mapping, agents.static_mapping("x")


def make_lanes(env=TABLE):
    return envs.vectorize(env, 4)


def sample_mapping(key, names):
    return jax.random.randint(key, (len(names),), 0, 2)


def policy(action=lambda obs: obs.astype(jnp.int32), extras=lambda obs: ()):
    """Returns a policy with functions of the observations."""
    return rollout.stateless_policy(lambda p, obs, k: (action(obs), extras(obs)))


def value(size):
    return policy(extras=lambda obs: {"value": jnp.zeros((len(obs), size))})


def step_policy_map(mapping=MAPPING, *, params=None, env=None, groups=None, **policies):
    """Traces the first step with a policy map."""
    policies = policies or {"x": policy()}
    map_ = agents.policy_map(policies, mapping, TABLE, groups=groups)
    collector = rollout.Collector(env=env or make_lanes(), policy=map_)
    params = dict.fromkeys(policies) if params is None else params
    return jax.eval_shape(lambda: collector.step(collector.init(KEY), params))


def step_population(members):
    return step_policy_map(
        sample_mapping, x=agents.Population(policy(), 5), params={"x": members}
    )


def evaluate(collector):
    return agents.evaluate_agents(collector, None, KEY, 2)


def make_normalized_collector():
    env = envs.NormalizeObs(make_lanes(OneAgent(CountEnv())))
    return rollout.Collector(env=env, policy=policy())


@functools.cache
def collect():
    """Returns the initial `Pending` and a trajectory."""
    env = make_lanes(ChanceEnv())
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    carry = collector.init(KEY)
    pending = agents.Pending.init(collector, carry)
    return jax.device_get((pending, collector.collect_steps(carry, None, 2)[1]))


def agent_transitions(pending=None, *, lanes=4, info=None):
    """Traces `agent_transitions` with invalid arguments."""
    initial_pending, trajectory = collect()
    pending = initial_pending if pending is None else pending
    trajectory = trajectory if info is None else trajectory.replace(info=info)
    selected = jax.tree.map(lambda x: x[:, :lanes], trajectory)
    return jax.eval_shape(agents.agent_transitions, pending, selected)


SHAPE = "of shape (3,), got int32 of shape ()"
ACTIONS = "policy 'x', which controls the group 'all', must return actions as int32"
EXTRAS = "The extras of the policy 'x' must be () or a dict"
GROUPS = "(x, y) to groups (all), each with a policy, got {'x': [], 'y': []}"
CASES = [
    # policy_map
    (lambda: static_mapping(lambda agent: "x"), "`policies` must be a dict by agent"),
    (lambda: static_mapping(lambda agent: "x"), "{agent: fn(agent) for agent in"),
    (
        lambda: step_policy_map(lambda name, episode: name.startswith("a")),
        "{agent: fn(agent) for agent in",
    ),
    (lambda: step_policy_map(lambda name: "x"), "{agent: fn(agent) for agent in"),
    (lambda: agents.policy_map(3, MAPPING, TABLE), "`policies` must be a dict by name"),
    (
        lambda: step_policy_map(static_mapping({"a": "x"})),
        "must map the agents a, b, c, or the groups all, to the",
    ),
    (lambda: step_policy_map(lambda key, names: jnp.int32(0)), SHAPE),
    (lambda: step_policy_map(x=policy(lambda obs: obs)), ACTIONS),
    (lambda: step_policy_map(x=policy(extras=lambda obs: obs)), EXTRAS),
    (lambda: step_policy_map(x=agents.Population(policy(), 2)), "policies (none), got"),
    (
        lambda: step_policy_map(sample_mapping, x=value(1), y=value(2)),
        "the same kind of `value`",
    ),
    (
        lambda: step_policy_map(
            sample_mapping, groups={"x": [], "y": []}, x=policy(), y=policy()
        ),
        GROUPS,
    ),
    (lambda: step_policy_map(sample_mapping, x=policy()), "from 0 to 0, got 1"),
    (
        lambda: step_policy_map(lambda key, names: sample_mapping(key, names) - 1),
        "from 0 to 0, got -1",
    ),
    (
        lambda: step_policy_map(lambda key, names: "x"),
        "got str 'x'. For names of policies, pass",
    ),
    (
        lambda: step_policy_map(params={"y": None}),
        "entry for each policy of the map, got none",
    ),
    (
        lambda: step_policy_map(env=SINGLE),
        "with several agents, got float32 of shape (4, 1)",
    ),
    # population
    (lambda: step_population(np.zeros(6)), "with the leading axes (5,), got float32"),
    # agent_transitions
    (
        lambda: agent_transitions((), info={}),
        "must have several agents, for example lanes of a",
    ),
    (
        lambda: agent_transitions(lanes=2),
        "`pending` must be from `Pending.init` or an earlier",
    ),
    # evaluate_agents
    (
        lambda: evaluate(make_normalized_collector()),
        "fixed normalization statistics, got a NormalizeObs",
    ),
    (lambda: evaluate(3), "must be a `Collector` or a `HostCollector`, got"),
]


@pytest.mark.parametrize(("call", "message"), CASES)
def test_invalid_call_raises(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
