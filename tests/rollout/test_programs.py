"""Equal objects share programs: what was compiled once is not compiled again."""

import functools
import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import OneAgent
from cases import CountEnv
from compiles import count_compiles
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

B, T = 4, 16
KEY = jax.random.key(0)


LIMITS = itertools.count(7)


def act(params, obs, key):
    return jax.random.randint(key, obs.shape[:1], 0, 3) + 0 * params


def make_collector(**options):
    """An equal one at every call, but for a number of its environments."""
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


def collects(make):
    def call():
        collector = make()
        carry = collector.init(KEY)
        zero, counts = jnp.float32(0), {"num_episodes": 2, "max_episode_steps": 9}
        carry, _ = collector.step(carry, 0)
        carry, _ = collector.collect_steps(carry, 0, T)
        carry, _ = collector.fold_steps(carry, 0, add_reward, zero, num_steps=T)
        collector.fold_episodes(carry, 0, add_reward, zero, **counts)

    return call


def streams(make, **options):
    def call():
        options.setdefault("steps_per_batch", B * T)
        stream = rollout.Stream(make(), key=KEY, params=0, **options)
        with stream:
            next(stream), next(stream)

    return call


def evaluates(make):
    return lambda: rollout.evaluate(make(), 0, KEY, 3)


def evaluates_frozen():
    collector = make_collector()
    collector = collector.replace(env=envs.NormalizeObs(collector.env))
    rollout.evaluate(collector.freeze(collector.init(KEY)), 0, KEY, 3)


def evaluates_frozen_hosts():
    collector = make_host()
    env = rollout.envs.NormalizeHostEnv(collector.env)
    collector = collector.replace(env=env)
    rollout.evaluate(collector.freeze(collector.init(KEY)), 0, KEY, 3)


def folds_into_a_buffer():
    buffer, collector = buffers.ReplayBuffer(64, B), make_collector()
    carry = collector.init(KEY)
    row = jax.eval_shape(collector.step, carry, 0)[1]
    collector.fold_steps(carry, 0, buffer.add, buffer.init(row), num_steps=T)


def update(carry, batch):
    return carry + batch["x"].sum(), batch["x"].mean()


def scans_minibatches():
    tree = {"x": np.ones((T, B), np.float32)}
    for axis in (None, 0, 1):
        rollout.scan_minibatches(
            update, jnp.float32(0), KEY, tree, num_minibatches=2, axis=axis
        )


def asks_for_samples():
    first = itertools.count(1)  # sizes that no call before had

    def call():
        buffer = buffers.ReplayBuffer(64, B)
        state = buffer.init({"x": np.zeros(B, np.float32)})
        for size in range(next(first), 100, 3):
            assert not buffer.can_sample(state, size)

    return call


CALLS = {
    "collector": collects(make_collector),
    "host collector": collects(make_host),
    "recording host collector": collects(
        functools.partial(make_host, record_fn=is_even)
    ),
    "stream": streams(make_collector),
    "recycling stream": streams(make_collector, reuse_memory=True),
    "stream of episodes": streams(
        make_collector, steps_per_batch=None, episodes_per_batch=3, max_episode_steps=9
    ),
    "stream of hosts": streams(make_host),
    "evaluate": evaluates(make_collector),
    "evaluate hosts": evaluates(make_host),
    "evaluate frozen": evaluates_frozen,
    "evaluate frozen hosts": evaluates_frozen_hosts,
    "fold into a buffer": folds_into_a_buffer,
    "scan_minibatches": scans_minibatches,
    "can_sample": asks_for_samples(),
}


@pytest.mark.compiles(50)
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_compiled_for_equal_objects(name, key_reuse):
    CALLS[name]()
    with count_compiles() as events:
        CALLS[name]()
    assert set(events) <= {"/jax/core/compile/jaxpr_trace_duration"}  # of `eval_shape`


def test_equal_streams_in_turns_keep_their_own_memory():
    options = {"key": KEY, "params": 0, "steps_per_batch": B * T, "reuse_memory": True}
    streams = [rollout.Stream(make_collector(), **options) for _ in range(2)]
    for _ in range(4):  # copies, since a view would prevent that memory is used again
        rows = [jax.tree.map(np.array, next(x).trajectory) for x in streams]
        jax.tree.map(np.testing.assert_array_equal, *rows)


def remember(params, obs, state, key):
    return act(params, obs, key), state + 1


def start(num_envs):
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
    "recurrent": lambda: rollout.recurrent_policy(remember, start, mode_fn=remember),
    "epsilon": lambda: EpsilonGreedy(POLICY, envs.Discrete(3), decay),
    "warm": lambda: RandomWarmup(POLICY, envs.Discrete(3), 5),
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
    if name != "items":  # whose arrays have no truth value
        assert POLICIES[name]() == POLICIES[name]()
        assert hash(POLICIES[name]()) == hash(POLICIES[name]())


def test_objects_are_shared_by_the_values_of_all_arguments():
    made = programs.shared(lambda *args, **options: object())
    unlike = [
        (1,), (1.0,), (True,), (0.0,), (-0.0,), (np.float32(1),), (np.ones(1),),
        (np.ones(1, np.float32),), (jnp.ones(1),), (np.ones((1, 1)),), ((1,),), ([1],),
        ({"a": 1},), (envs.Box(0, 1, (2,)),), (envs.Box(0, 2, (2,)),), (act,),
        (envs.Discrete(2),), (envs.Discrete(2, start=1),), (1, 2), (2, 1),
        (envs.Box(0, 1, (2,), np.int32),), (spaces.MultiBinary((2,)),), (None,), (),
    ]  # fmt: skip
    unlike.append((jax.device_put(np.ones(1), jax.devices()[1]),))
    objects = {id(made(*args)) for args in unlike}
    assert len(objects) == len(unlike)
    copies = jax.tree.map(lambda x: x, unlike)
    assert {id(made(*args)) for args in copies} == objects
    assert made(a=1) is made(a=1) is not made(b=1)


def test_objects_made_while_jax_traces_are_not_shared():
    made, kept = programs.shared(lambda x: object()), []
    for _ in range(2):
        jax.make_jaxpr(lambda x: kept.append((made(x), made(1))))(1.0)
    assert len({id(x) for pair in kept for x in pair}) == 4


def test_few_objects_are_kept():
    made, alive = programs.shared(lambda x: Summing(x)), weakref.WeakSet()
    for number in range(1000):
        alive.add(made(number))
    gc.collect()
    assert len(alive) == 256
    assert made(999) in alive


class Summing:
    """An object whose sums differ, but not as Python compares."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, acc, row):
        return acc + self.factor * row.reward.sum()

    def add(self, acc, row):
        return self(acc, row)


def test_functions_of_users_are_static_unless_they_may_read_tracers():
    buffer = buffers.ReplayBuffer(64, B)
    assert programs.static(act) is act
    assert programs.static(buffer.add) is programs.static(
        buffers.ReplayBuffer(64, B).add
    )
    assert programs.static(buffer.add) != programs.static(
        buffers.ReplayBuffer(128, B).add
    )
    one, two = Summing(1), Summing(2)
    assert programs.static(one.add) != programs.static(two.add)
    dicts = {}
    assert programs.static(dicts.get) == dicts.get  # of an object without a hash
    jax.make_jaxpr(lambda x: np.testing.assert_equal(programs.static(act), None))(1.0)
    one.__class__ = type("Unhashable", (Summing,), {"__hash__": None})
    assert programs.static(one) is None


@pytest.mark.parametrize(
    "name", ["window", "summarize", "ended", "permutation", "gae", "vtrace"]
)
def test_functions_that_pages_call_from_python_are_few_programs(name):
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
