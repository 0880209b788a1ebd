"""Tests that equal objects share compiled programs."""

import dataclasses
import functools
import gc
import itertools
import weakref
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import OneAgent
from cases import CountEnv
from compiles import count_compiles
from flax import struct
from host_count import HostCount

import rollout
from rollout import buffers, envs
from rollout.agents import policy_map, static_mapping
from rollout.base import programs
from rollout.envs import spaces
from rollout.policies import (
    EpsilonGreedy,
    GaussianNoise,
    Greedy,
    OrnsteinUhlenbeck,
    RandomWarmup,
)
from rollout.recommendation import item_policy
from rollout.training import Agent, jit_on_host

B, T = 4, 16
KEY = jax.random.key(0)


LIMITS = itertools.count(7)


def act(params, obs, key):
    return jax.random.randint(key, obs.shape[:1], 0, 3) + 0 * params


def make_collector(**options):
    """Creates a collector that differs only in a number of its environments."""
    env = envs.vectorize(CountEnv(limit=next(LIMITS)), B)
    policy = rollout.stateless_policy(act)
    policy = EpsilonGreedy(policy, env.action_space, 0.1)
    return rollout.Collector(env=env, policy=policy, **options)


def make_host(**options):
    policy = rollout.stateless_policy(act)
    policy = RandomWarmup(policy, HostCount.action_space, 3)
    return rollout.HostCollector(env=HostCount(B), policy=policy, **options)


def add_reward(acc, row):
    return acc + row.reward.sum()


def is_even(row):
    return row.replace(extras={"even": row.episode_length % 2 == 0})


def make_collect_call(make):
    def call():
        collector = make()
        carry = collector.init(KEY)
        zero, counts = jnp.float32(0), {"num_episodes": 2, "max_episode_steps": 9}
        carry, _ = collector.step(carry, 0)
        carry, _ = collector.collect_steps(carry, 0, T)
        carry, _ = collector.fold_steps(carry, 0, add_reward, zero, num_steps=T)
        collector.fold_episodes(carry, 0, add_reward, zero, **counts)

    return call


def make_stream_call(make, **options):
    def call():
        options.setdefault("steps_per_batch", B * T)
        stream = rollout.Stream(make(), key=KEY, params=0, **options)
        with stream:
            next(stream), next(stream)

    return call


def make_evaluate_call(make):
    return lambda: rollout.evaluate(make(), 0, KEY, 3)


def evaluate_frozen():
    collector = make_collector()
    collector = collector.replace(env=envs.NormalizeObs(collector.env))
    rollout.evaluate(collector.freeze(collector.init(KEY)), 0, KEY, 3)


def evaluate_frozen_host():
    collector = make_host()
    env = rollout.envs.NormalizeHostEnv(collector.env)
    collector = collector.replace(env=env)
    rollout.evaluate(collector.freeze(collector.init(KEY)), 0, KEY, 3)


def fold_into_buffer():
    buffer, collector = buffers.ReplayBuffer(64, B), make_collector()
    carry = collector.init(KEY)
    row = jax.eval_shape(collector.step, carry, 0)[1]
    collector.fold_steps(carry, 0, buffer.add, buffer.init(row), num_steps=T)


def update(carry, batch):
    return carry + batch["x"].sum(), batch["x"].mean()


def scan_minibatches():
    tree = {"x": np.ones((T, B), np.float32)}
    for axis in (None, 0, 1):
        rollout.scan_minibatches(
            update, jnp.float32(0), KEY, tree, num_minibatches=2, axis=axis
        )


def make_can_sample_call():
    first = itertools.count(1)  # each call has new sizes

    def call():
        buffer = buffers.ReplayBuffer(64, B)
        state = buffer.init({"x": np.zeros(B, np.float32)})
        for size in range(next(first), 100, 3):
            assert not buffer.can_sample(state, size)

    return call


CALLS = {
    "collector": make_collect_call(make_collector),
    "host collector": make_collect_call(make_host),
    "recording host collector": make_collect_call(
        functools.partial(make_host, record_fn=is_even)
    ),
    "stream": make_stream_call(make_collector),
    "recycling stream": make_stream_call(make_collector, reuse_memory=True),
    "stream of episodes": make_stream_call(
        make_collector, steps_per_batch=None, episodes_per_batch=3, max_episode_steps=9
    ),
    "stream of hosts": make_stream_call(make_host),
    "evaluate": make_evaluate_call(make_collector),
    "evaluate hosts": make_evaluate_call(make_host),
    "evaluate frozen": evaluate_frozen,
    "evaluate frozen hosts": evaluate_frozen_host,
    "fold into a buffer": fold_into_buffer,
    "scan_minibatches": scan_minibatches,
    "can_sample": make_can_sample_call(),
}


@pytest.mark.compiles(50)
@pytest.mark.parametrize("name", CALLS)
def test_equal_objects_share_programs(name, key_reuse):
    CALLS[name]()
    with count_compiles() as events:
        CALLS[name]()
    # `eval_shape` traces functions.
    assert set(events) <= {"/jax/core/compile/jaxpr_trace_duration"}


def test_equal_streams_do_not_share_memory():
    options = {"key": KEY, "params": 0, "steps_per_batch": B * T, "reuse_memory": True}
    streams = [rollout.Stream(make_collector(), **options) for _ in range(2)]
    for _ in range(4):  # copy the rows: a view would prevent the reuse of memory
        rows = [jax.tree.map(np.array, next(x).trajectory) for x in streams]
        jax.tree.map(np.testing.assert_array_equal, *rows)


def act_recurrent(params, obs, state, key):
    return act(params, obs, key), state + 1


def init_state(num_envs):
    return jnp.zeros(num_envs)


def allow_all(obs):
    return jnp.ones((*obs.shape[:1], 3), bool)


def decay(step):
    return 1 / (1 + step)


POLICY = rollout.stateless_policy(act, mode_fn=act)
BOX = functools.partial(envs.Box, -np.ones(2, np.float32), np.ones(2, np.float32), (2,))
POLICIES = {
    "random": lambda: rollout.random_policy(BOX()),
    "masked": lambda: rollout.random_policy(envs.Discrete(3), action_mask_fn=allow_all),
    "greedy": lambda: Greedy(rollout.stateless_policy(act, mode_fn=act)),
    "recurrent": lambda: rollout.recurrent_policy(
        act_recurrent, init_state, mode_fn=act_recurrent
    ),
    "epsilon": lambda: EpsilonGreedy(POLICY, envs.Discrete(3), decay),
    "warmup": lambda: RandomWarmup(POLICY, envs.Discrete(3), 5),
    "gaussian": lambda: GaussianNoise(POLICY, BOX(), 0.5),
    "correlated": lambda: OrnsteinUhlenbeck(POLICY, BOX(), 0.5, dt=0.1),
    "items": lambda: item_policy(act, items=np.eye(3)),
    "map": lambda: policy_map(
        {"b": POLICY, "a": rollout.random_policy(envs.Discrete(2))},
        static_mapping("b"),
        OneAgent(CountEnv()),
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_equal_arguments_make_equal_policies(name):
    structures = [jax.tree.structure(POLICIES[name]()) for _ in range(2)]
    assert structures[0] == structures[1]
    assert hash(structures[0]) == hash(structures[1])
    if name != "items":  # arrays have no truth value
        assert POLICIES[name]() == POLICIES[name]()
        assert hash(POLICIES[name]()) == hash(POLICIES[name]())


def test_shared_objects_depend_on_argument_values():
    make_object = programs.shared(lambda *args, **options: object())
    distinct = [
        (1,), (1.0,), (True,), (0.0,), (-0.0,), (np.float32(1),), (np.ones(1),),
        (np.ones(1, np.float32),), (jnp.ones(1),), (np.ones((1, 1)),), ((1,),), ([1],),
        ({"a": 1},), (envs.Box(0, 1, (2,)),), (envs.Box(0, 2, (2,)),), (act,),
        (envs.Discrete(2),), (envs.Discrete(2, start=1),), (1, 2), (2, 1),
        (envs.Box(0, 1, (2,), np.int32),), (spaces.MultiBinary((2,)),), (None,), (),
    ]  # fmt: skip
    distinct.append((jax.device_put(np.ones(1), jax.devices()[1]),))
    objects = {id(make_object(*args)) for args in distinct}
    assert len(objects) == len(distinct)
    copies = jax.tree.map(lambda x: x, distinct)
    assert {id(make_object(*args)) for args in copies} == objects
    assert make_object(a=1) is make_object(a=1) is not make_object(b=1)


def test_objects_are_not_shared_while_tracing():
    make_object, pairs = programs.shared(lambda x: object()), []
    for _ in range(2):
        jax.make_jaxpr(lambda x: pairs.append((make_object(x), make_object(1))))(1.0)
    assert len({id(x) for pair in pairs for x in pair}) == 4


def test_cache_of_shared_objects_is_limited():
    make_object, alive = programs.shared(lambda x: WeightedSum(x)), weakref.WeakSet()
    for number in range(1000):
        alive.add(make_object(number))
    gc.collect()
    assert len(alive) == 256
    assert make_object(999) in alive


class WeightedSum:
    """An object with a method that reads an attribute."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, acc, row):
        return acc + self.factor * row.reward.sum()

    def add(self, acc, row):
        return self(acc, row)


def test_static_accepts_functions_without_tracers():
    buffer = buffers.ReplayBuffer(64, B)
    assert programs.static(act) is act
    assert programs.static(buffer.add) == programs.static(
        buffers.ReplayBuffer(64, B).add
    )
    assert programs.static(buffer.add) != programs.static(
        buffers.ReplayBuffer(128, B).add
    )
    first, second = WeightedSum(1), WeightedSum(2)
    assert programs.static(first.add) != programs.static(second.add)
    mapping = {}
    assert programs.static(mapping.get).value == mapping.get  # a dict has no hash
    jax.make_jaxpr(lambda x: np.testing.assert_equal(programs.static(act), None))(1.0)
    first.__class__ = type("Unhashable", (WeightedSum,), {"__hash__": None})
    assert programs.static(first) is None


@pytest.mark.parametrize(
    "name", ["window", "summarize", "ended", "permutation", "gae", "vtrace"]
)
def test_eager_functions_compile_few_programs(name):
    collector = make_collector()
    _, trajectory = collector.collect_steps(collector.init(KEY), 0, T)
    window = rollout.EpisodeWindow.init(10)
    flags = trajectory.terminated, trajectory.truncated
    value = jnp.zeros((T, B))
    rows = trajectory.reward, value, value, *flags
    calls = {
        "window": lambda: window.add(trajectory),
        "summarize": lambda: rollout.summarize(trajectory),
        "ended": lambda: rollout.stats.ended_episodes(trajectory),
        "permutation": lambda: rollout.permutation(KEY, 64),
        "gae": lambda: rollout.gae(*rows, gamma=0.9, lambda_=0.9),
        "vtrace": lambda: rollout.vtrace(*rows, log_rhos=value, gamma=0.9),
    }
    with count_compiles() as events:
        calls[name]()
    assert events.count("/jax/core/compile/backend_compile_duration") <= 5
    with count_compiles() as events:
        calls[name]()
    assert not events


class FillPolicy(rollout.Policy):
    """Records a static number, which may be inside another object."""

    value: Any = struct.field(pytree_node=False)

    def apply(self, params, obs, state, key):
        value = self.value.features if isinstance(self.value, nn.Dense) else self.value
        x = jnp.full(obs.shape[:1], value)
        return rollout.PolicyStep(jnp.zeros(obs.shape[:1], int), state, {"x": x})

    def __call__(self):
        return self.value


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters, of which one is a number of any type."""

    value: Any
    num_steps: int = 4


@dataclasses.dataclass(frozen=True)
class FillAgent(Agent):
    """An agent with a function that jit compiles."""

    @jit_on_host
    def learn(self):
        return jnp.full((), self.config.value)


def test_types_of_static_numbers_separate_programs():
    """1, True and 1.0 are equal in Python."""
    collector, host = make_collector(), make_host()
    carry = jax.eval_shape(collector.init, KEY)
    dtypes = []
    for number in (1, True, 1.0):
        for value in (number, nn.Dense(number)):
            filled = collector.replace(policy=FillPolicy(value))
            # Nested programs share the traces of the jit cache.
            _, row = jax.eval_shape(filled.step, carry, 0)
            dtypes.append(row.extras["x"].dtype)
        filled = host.replace(policy=FillPolicy(number))
        _, row = filled.step(filled.init(KEY), 0)
        dtypes.append(row.extras["x"].dtype)
    expected = [np.dtype(x) for x in (np.int32, bool, np.float32) for _ in range(3)]
    assert dtypes == expected


def test_types_of_hyperparameters_separate_programs():
    values = [
        FillAgent(HostCount(B), Config(value)).learn() for value in (1, True, 1.0)
    ]
    assert [x.dtype for x in values] == [np.int32, bool, np.float32]
    policies = FillPolicy(0.0), FillPolicy(-0.0), FillPolicy(0), FillPolicy(False)
    assert len({programs.hash_of_types(x) for x in policies}) == 4
    assert len({programs.static(x.apply) for x in policies}) == 4
    assert len({programs.static(x) for x in policies}) == 4
    assert len({id(make_object(x)) for x in policies}) == 4
    assert make_object(FillPolicy(1)) is make_object(FillPolicy(1))


@programs.shared
def make_object(policy):
    return [policy]
