"""Tests of error messages of `rollout` and `rollout.envs` for invalid arguments.

`buffers/test_messages.py` tests messages of buffers.
"""

import functools
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, make_collector
from flax import struct
from host_count import HostCount, on_host
from refusals import check_refused, pairs

import rollout
from rollout import checkpoint, envs, recommendation

B = 4
KEY = jax.random.key(0)
COUNT, DISCRETE = CountEnv(), envs.Discrete(3)
BOX, INFINITE = envs.Box(-1.0, 1.0, (2,)), envs.Box(-np.inf, 1.0, ())
COUNT_ACCUMULATOR = rollout.Accumulator(jnp.zeros, lambda count, t: count + 1)
VECTOR_ENV = envs.vectorize(COUNT, B)
ZEROS, VALUES = jnp.zeros((B,), jnp.int32), jnp.zeros((5, B))
FLAGS = 2 * (jnp.zeros((5, B), bool),)
GYMNAX = ("reset_env", "step_env", "action_space", "observation_space")


@functools.cache
def collector():
    return make_collector("count", B)


@functools.cache
def carry():
    return collector().init(KEY)


@functools.cache
def trajectory():
    """Creates a trajectory of ones with valid shapes and dtypes."""
    shapes = jax.eval_shape(lambda x: collector().collect_steps(x, None, 5)[1], carry())
    return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)


def batch():
    return rollout.stream.StreamBatch(
        trajectory=trajectory(), stats=(), steps=5, params_version=0
    )


def scan_minibatches(tree, num_minibatches, **options):
    options["num_minibatches"] = num_minibatches
    return rollout.scan_minibatches(lambda *x: x, (), KEY, tree, **options)


def one_step():
    return jax.tree.map(lambda x: x[0], trajectory())


def mesh():
    return jax.make_mesh((2,), ("lanes",))


def stream(**options):
    options = {"key": KEY, "steps_per_batch": 8, **options}
    return rollout.Stream(collector(), **options)


def policy(fn=lambda params, obs, key: ZEROS):
    return rollout.stateless_policy(fn)


def step_with(**parts):
    """Takes a step of a collector with an invalid part."""
    made_collector = rollout.Collector(
        **{"env": VECTOR_ENV, "policy": policy(), **parts}
    )
    return made_collector.step(made_collector.init(KEY), None)


def act(action):
    return step_with(policy=policy(lambda params, obs, key: action))


def accumulate(accumulators):
    return step_with(accumulators=accumulators)


def record(**changes):
    return step_with(record_fn=lambda t: t.replace(**changes))


@struct.dataclass
class InvalidEnv(CountEnv):
    """A `CountEnv` with changed results of `reset` or `step`."""

    reset_fn: Callable = struct.field(pytree_node=False, default=lambda *result: result)
    step_fn: Callable = struct.field(pytree_node=False, default=lambda result: result)

    def reset(self, key):
        return self.reset_fn(*super().reset(key))

    def step(self, key, state, action):
        return self.step_fn(super().step(key, state, action))


@struct.dataclass
class Pair(CountEnv):
    """A `CountEnv` whose action has two parts."""

    action_space = envs.spaces.Tuple((DISCRETE, DISCRETE))


def step_invalid_env(**parts):
    return step_with(env=envs.vectorize(InvalidEnv(**parts), B))


def step_returns(**changes):
    return step_invalid_env(step_fn=lambda result: result.replace(**changes))


def plain_class():
    return type("Plain", (), {"reset": lambda s, k: 0, "step": lambda s, k, x, a: 0})()


COUNTS = {
    "num_steps": [
        lambda n: collector().collect_steps(carry(), None, n),
        lambda n: collector().fold_steps(carry(), None, max, 0, num_steps=n),
    ],
    "num_minibatches": [lambda n: scan_minibatches(VALUES, n)],
    "num_episodes": [
        lambda n: collector().collect_episodes(carry(), None, n, max_episode_steps=9),
    ],
    "max_episode_steps": [
        lambda n: collector().collect_episodes(carry(), None, 2, max_episode_steps=n),
        lambda n: collector().collect_episodes(
            carry(), None, 2, max_episode_steps=n, return_trajectory=True
        ),
        lambda n: stream(max_episode_steps=n),
    ],
    "min_steps": [
        lambda n: collector().collect_episodes(
            carry(), None, 2, max_episode_steps=9, min_steps=n
        )
    ],
    "num_repeats": [lambda n: envs.ActionRepeat(COUNT, n)],
    "num_epochs": [lambda n: scan_minibatches(jnp.zeros((2, 2)), 2, num_epochs=n)],
    "every": [lambda n: checkpoint.save("nowhere", {"n": 1}, step=1, every=n)],
    "keep": [lambda n: checkpoint.save("nowhere", {"n": 1}, keep=n)],
    "steps_per_batch": [lambda n: stream(steps_per_batch=n)],
    "total_steps": [lambda n: stream(total_steps=n)],
    "num_envs": [lambda n: envs.vectorize(COUNT, n)],
    "n": [lambda n: envs.Discrete(n)],
}
FRACTIONS = {
    "gamma": [lambda x: envs.NormalizeReward(VECTOR_ENV, x)],
    "lambda_": [
        lambda x: rollout.lambda_returns(VALUES, VALUES, *FLAGS, gamma=1.0, lambda_=x)
    ],
}


def vtrace(threshold=1.0, **options):
    options |= {"gamma": 1.0, "clip_rho_threshold": threshold, "log_rhos": VALUES}
    return rollout.vtrace(VALUES, VALUES, VALUES, *FLAGS, **options)


MESSAGES = {
    # Parts of a collector.
    "`policy` ... `Policy`": [
        lambda: step_with(policy=lambda *args: 0),
        lambda: rollout.policies.Greedy(3),
    ],
    "`accumulators` ... `Accumulator`": [
        lambda: accumulate({"a": max}),
        lambda: accumulate(COUNT_ACCUMULATOR),
    ],
    "`record_fn`": [lambda: record(extras=jnp.zeros(()))],
    "`Transition`": [lambda: step_with(record_fn=lambda t: {})],
    # Keys and carries.
    "`key` ... `jax.random.key(seed)`": [
        lambda: collector().init(jax.random.PRNGKey(0)),
        lambda: collector().init(jax.random.split(KEY)),
        lambda: stream(key=0),
    ],
    "`max_episode_steps` ... `return_trajectory=True`": [
        lambda: collector().collect_episodes(carry(), None, 2, return_trajectory=True),
        lambda: on_host().collect_episodes(None, None, 2, return_trajectory=True),
    ],
    "`carry` ... `Carry` ... `init`": [
        lambda: collector().collect_steps(None, carry(), 2),
        lambda: collector().fold_episodes(
            None, None, max, 0, num_episodes=2, max_episode_steps=3
        ),
        lambda: collector().step(carry().env_state, None),
    ],
    "`min_steps` ... `per_env=True`": [
        lambda: collector().collect_episodes(
            carry(), None, 2, max_episode_steps=3, min_steps=5, per_env=True
        )
    ],
    "`carry.env_state` ... `init`": [
        lambda: make_collector("count", 8).step(carry(), None),
    ],
    # Results of policies.
    "`fn` ... 2 ... 3": [lambda: act((ZEROS, ZEROS, {}))],
    "must return actions as int32 of shape (4,), got list": [lambda: act([ZEROS, {}])],
    "a tuple as (action, extras): int32 of shape (4,) at [0], got": [
        lambda: step_with(
            env=envs.vectorize(Pair(), B), policy=policy(lambda *x: (ZEROS, ZEROS))
        )
    ],
    "must be a function of (": [
        lambda: rollout.stateless_policy(lambda params, obs: ZEROS),
        lambda: step_with(record_fn=lambda: None),
    ],
    # Environments.
    "`env` ... `reset` ... `step`": [lambda: envs.vectorize(3, B)],
    "`env` must be a pytree, such as": [lambda: envs.vectorize(plain_class(), B)],
    "`env` must be a single environment, got parallel environments": [
        lambda: envs.vectorize(VECTOR_ENV, B),
        lambda: rollout.check_env(VECTOR_ENV),
    ],
    "`env` ... `VectorEnv`": [
        lambda: step_with(env=COUNT),
        lambda: envs.NormalizeObs(COUNT),
    ],
    "got HostCount. For an environment in JAX, call": [
        lambda: envs.NormalizeObs(HostCount(2)),
    ],
    "`epsilon` ... 0": [
        lambda x=x: envs.NormalizeObs(VECTOR_ENV, epsilon=x)
        for x in (0.0, np.nan, "1e-8")
    ],
    '`auto_reset` ... "auto" ... "compact" ... "select"': [
        lambda: envs.vectorize(COUNT, B, auto_reset=["select"]),
        lambda: envs.vectorize(COUNT, B, auto_reset="never"),
    ],
    "`env.reset` must return (state, obs), got": [
        lambda: step_invalid_env(reset_fn=lambda state, obs: (state, obs, {})),
    ],
    "`rollout.envs.EnvStep`": [lambda: step_invalid_env(step_fn=lambda r: (r, 0))],
    "`env.step` ... `reward` ... (4,)": [
        lambda: step_returns(reward=jnp.zeros(2)),
    ],
    "`terminated`": [
        lambda: step_returns(terminated=jnp.ones(2)),
        lambda: step_returns(terminated=None),
    ],
    "`reward`": [lambda: step_returns(reward=1j)],
    "`env.step` ... `obs` ... `env.reset`": [
        lambda: step_returns(obs=jnp.zeros(1, jnp.int32)),
        lambda: step_returns(obs=jnp.zeros(3)),
    ],
    "the state as `env.reset`": [lambda: step_returns(state={"n": jnp.int32(0)})],
    "must return the shape": [
        lambda: envs.TransformObs(COUNT, jnp.abs, INFINITE).reset(KEY)
    ],
    "`env` must have reset_env, step_env": [lambda: envs.from_gymnax(object(), {})],
    "`limit_field` ... `env_params`": [
        lambda: envs.from_gymnax(
            types.SimpleNamespace(**dict.fromkeys(GYMNAX, max)), {}, limit_field="limit"
        )
    ],
    "`max_episode_steps` limits": [
        lambda: envs.make("CartPole-v1", episode_length=200),
    ],
    "`gravity`": [lambda: envs.make("CartPole-v1", gravity="high")],
    "`env_id` ... `rollout.envs.env_ids()`": [lambda: envs.make(COUNT)],
    # Spaces.
    "`low` ... `high`": [
        lambda: envs.Box(1, 0, ()),
        lambda: envs.Box(0.0, np.nan, ()),
    ],
    "`dtype`": [
        lambda: envs.Discrete(3, start=-1, dtype=jnp.uint8),
        lambda: envs.spaces.MultiDiscrete([2, 300], dtype=jnp.uint8),
    ],
    "`spaces`": [lambda: envs.spaces.Dict({})],
    "`spaces[1]` ... Box ... Discrete": [lambda: envs.spaces.Tuple((DISCRETE, 3))],
    # Policies.
    "`action_space` ... Box ... Discrete": [lambda: rollout.random_policy(VECTOR_ENV)],
    "`action_mask`": [lambda: recommendation.choose_items([[1.0]], [[1, 0]])],
    # Statistics, targets, trajectories.
    "`data`": [lambda: rollout.summarize(batch())],
    "`trajectory` ... `[T, B, ...]`": [
        lambda: rollout.stats.ended_episodes(one_step()),
    ],
    "`trajectory` ... `Transition`": [
        lambda: rollout.stats.ended_episodes(trajectory().reward),
    ],
    "`gamma` ... [-1, 1]": [
        lambda: rollout.discounted_returns(VALUES, *FLAGS, gamma=-1.1),
    ],
    "`clip_c_threshold` ... [0, inf]": [lambda: vtrace(clip_c_threshold=-0.1)],
    "`clip_rho_threshold` ... [0, inf]": [
        lambda: vtrace(float("nan")),
        lambda: vtrace(VALUES),
    ],
    "`tree`": [lambda: scan_minibatches(jnp.zeros((0, 4)), 2)],
    "`axis`": [lambda: scan_minibatches(trajectory(), 2, axis=2)],
    "`policy_map`": [lambda: rollout.agents.select_policy({"a": trajectory()}, "a")],
    # Streams.
    "`steps_per_batch` ... `episodes_per_batch`": [
        lambda: stream(steps_per_batch=None),
        lambda: stream(episodes_per_batch=3),
    ],
    "`max_episode_steps` must be given": [
        lambda: stream(episodes_per_batch=3, steps_per_batch=None),
    ],
    '`at_batch_end` ... "continue"': [lambda: next(stream(at_batch_end="stop"))],
    "`params`": [lambda: stream(params=ZEROS).set_params(ZEROS[0])],
    "`jit`": [lambda: jax.jit(lambda: next(stream()).trajectory)()],
    "`state`": [lambda: stream().restore({"carry": 3})],
    "`HostCollector`": [lambda: rollout.Stream(VECTOR_ENV, key=KEY, steps_per_batch=8)],
    # Devices and checkpoints.
    "whose environments are in JAX": [lambda: rollout.shard(VECTOR_ENV, mesh())],
    "`jax.sharding.Mesh`": [lambda: rollout.shard(collector(), "lanes")],
    "`step` ... 0": [
        lambda: checkpoint.save("nowhere", {"n": 1}, step=-1),
        lambda: checkpoint.restore("nowhere", {"n": 1}, step="0"),
    ],
    "`every` ... 1": [lambda: checkpoint.save("nowhere", {"n": 1}, every=2)],
    "`path`": [lambda: checkpoint.restore("nowhere", {"n": 1})],
}


@pytest.mark.usefixtures("key_reuse")
@pytest.mark.parametrize(("message", "call"), pairs(MESSAGES, COUNTS, FRACTIONS))
def test_invalid_argument_raises(message, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(message, call)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [np.float32(0.5), jnp.float32(0.5), 1, np.int32(0)])
def test_fraction_accepts_any_number_type(value):
    got = rollout.discounted_returns(VALUES + 1.0, *FLAGS, gamma=value)
    want = rollout.discounted_returns(VALUES + 1.0, *FLAGS, gamma=float(value))
    np.testing.assert_array_equal(got, want)


def test_mask_and_scores_may_be_lists():
    scores, mask = [[0.0, 2.0, 1.0]], [[True, False, True]]
    assert recommendation.choose_items(scores, mask)[0].tolist() == [2]
