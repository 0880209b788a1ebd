"""Messages of `rollout.agents`: what must hold, and what was got."""

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
by_name, MAPPING = agents.static_mapping, agents.static_mapping("x")


def lanes(env=TABLE):
    return envs.vectorize(env, 4)


def drawn(key, names):
    return jax.random.randint(key, (len(names),), 0, 2)


def policy(action=lambda obs: obs.astype(jnp.int32), extras=lambda obs: ()):
    """Acts by a function of the observations."""
    return rollout.stateless_policy(lambda p, obs, k: (action(obs), extras(obs)))


def value(size):
    return policy(extras=lambda obs: {"value": jnp.zeros((len(obs), size))})


def mapped(mapping=MAPPING, *, params=None, env=None, groups=None, **policies):
    """Traces the first step of a map."""
    policies = policies or {"x": policy()}
    made = agents.policy_map(policies, mapping, TABLE, groups=groups)
    collector = rollout.Collector(env=env or lanes(), policy=made)
    params = dict.fromkeys(policies) if params is None else params
    return jax.eval_shape(lambda: collector.step(collector.init(KEY), params))


def league(members):
    return mapped(drawn, x=agents.Population(policy(), 5), params={"x": members})


def evaluate(collector):
    return agents.evaluate_agents(collector, None, KEY, 2)


def learning():
    env = envs.NormalizeObs(lanes(OneAgent(CountEnv())))
    return rollout.Collector(env=env, policy=policy())


@functools.cache
def collected():
    """Nothing pending, and a trajectory after it."""
    env = lanes(ChanceEnv())
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    carry = collector.init(KEY)
    pending = agents.Pending.init(collector, carry)
    return jax.device_get((pending, collector.collect_steps(carry, None, 2)[1]))


def answer(pending=None, *, lanes=4, info=None):
    """The transitions where `pending` or the trajectory is another's."""
    made, trajectory = collected()
    pending = made if pending is None else pending
    trajectory = trajectory if info is None else trajectory.replace(info=info)
    few = jax.tree.map(lambda x: x[:, :lanes], trajectory)
    return jax.eval_shape(agents.agent_transitions, pending, few)


SHAPE = "of shape (3,), got int32 of shape ()"
ACTIONS = "policy 'x', which controls the group 'all', must return actions as int32"
EXTRAS = "The extras of the policy 'x' must be () or a dict"
GROUPS = "(x, y) to groups (all), each with a policy, got {'x': [], 'y': []}"
CASES = [
    # policy_map
    (lambda: agents.policy_map(3, MAPPING, TABLE), "`policies` must be a dict by name"),
    (lambda: mapped(by_name({"a": "x"})), "must map the agents a, b, c to the"),
    (lambda: mapped(lambda key, names: jnp.int32(0)), SHAPE),
    (lambda: mapped(x=policy(lambda obs: obs)), ACTIONS),
    (lambda: mapped(x=policy(extras=lambda obs: obs)), EXTRAS),
    (lambda: mapped(x=agents.Population(policy(), 2)), "policies (none), got"),
    (lambda: mapped(drawn, x=value(1), y=value(2)), "the same kind of `value`"),
    (lambda: mapped(drawn, groups={"x": [], "y": []}, x=policy(), y=policy()), GROUPS),
    (lambda: mapped(drawn, x=policy()), "from 0 to 0, got 1"),
    (lambda: mapped(lambda key, names: drawn(key, names) - 1), "from 0 to 0, got -1"),
    (
        lambda: mapped(lambda key, names: "x"),
        "got str 'x'. For names of policies, pass",
    ),
    (lambda: mapped(params={"y": None}), "entry for each policy of the map, got none"),
    (lambda: mapped(env=SINGLE), "with several agents, got float32 of shape (4, 1)"),
    # population
    (lambda: league(np.zeros(6)), "with the leading axes (5,), got float32"),
    # agent_transitions
    (lambda: answer((), info={}), "must have several agents, for example lanes of a"),
    (lambda: answer(lanes=2), "`pending` must be from `Pending.init` or an earlier"),
    # evaluate_agents
    (
        lambda: evaluate(learning()),
        "fixed normalization statistics, got a NormalizeObs",
    ),
    (lambda: evaluate(3), "must be a `Collector`, whose environments are in JAX, got"),
]


@pytest.mark.parametrize(("call", "message"), CASES)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
