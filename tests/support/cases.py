"""A counting environment, four test cases and cached trajectories for all tests."""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from compiles import QUICK_OPTIONS
from flax import struct

import rollout
from rollout import envs

NUM_STEPS = 64  # enough steps for several episodes per lane in every case
ENVS = ("count", "CartPole-v1", "Pendulum-v1", "Breakout-MinAtar")
PARAMS = {
    "CartPole-v1": {"max_steps_in_episode": 20},  # terminates and truncates
    "Pendulum-v1": {"max_steps_in_episode": 25},  # only truncates
    "Breakout-MinAtar": {"max_steps_in_episode": 12},  # terminates and truncates
}


def last_word(key) -> jax.Array:
    """Returns 31 bits of a key, uniformly distributed over the results of `fold_in`."""
    return (jax.random.key_data(key)[-1] >> 1).astype(jnp.int32)


@struct.dataclass(kw_only=True)
class CountEnv:
    """Counts its steps, so that every value has a closed form.

    The length of an episode comes from the words of the reset key, which compiles
    faster than a sampled length. Step n (from 1) has reward n and successor observation
    n, and samples `info["noise"]` with the key of the step. An episode terminates at
    its length and is truncated at `limit`, so both flags may be set.
    """

    min_length: int = 2
    max_length: int = 9
    limit: int = 7

    @property
    def observation_space(self) -> envs.Box:
        return envs.Box(0.0, 1e6, (1,))

    @property
    def action_space(self) -> envs.Discrete:
        return envs.Discrete(3)

    def reset(self, key):
        number = last_word(key) % (self.max_length - self.min_length + 1)
        length = jnp.int32(self.min_length + number)
        return {"n": jnp.int32(0), "length": length, "key": key}, jnp.zeros(
            (1,), jnp.float32
        )

    def step(self, key, state, action):
        n = state["n"] + 1
        return envs.EnvStep(
            state={**state, "n": n},
            obs=jnp.full((1,), n, jnp.float32),
            reward=n,  # int32 on purpose: `vectorize` casts it
            terminated=n == state["length"],
            truncated=n == self.limit,
            info={"noise": jax.random.uniform(key), "action": action},
        )


@struct.dataclass(kw_only=True)
class TwoLengthEnv(CountEnv):
    """A `CountEnv` whose episodes have `min_length` or `max_length` steps.

    Both lengths have probability 1/2. For 2 and 20 steps, the mean is 11 and the
    standard deviation is 9.
    """

    min_length: int = 2
    max_length: int = 20
    limit: int = 1000

    def reset(self, key):
        state, obs = super().reset(key)
        is_long = last_word(key) % 2 == 0
        length = jnp.where(is_long, self.max_length, self.min_length)
        return {**state, "length": length.astype(jnp.int32)}, obs


def make_env(name: str, **params) -> envs.types.Env:
    if name == "count":
        return CountEnv(**params)
    return envs.make(name, **{**PARAMS[name], **params})


@functools.cache
def make_collector(
    name: str, num_envs: int = 16, auto_reset: str = "compact"
) -> rollout.Collector:
    env = envs.vectorize(make_env(name), num_envs, auto_reset=auto_reset)
    return rollout.Collector(env=env, policy=rollout.random_policy(env.action_space))


@functools.cache
def collect(
    name: str,
    num_envs: int = 16,
    auto_reset: str = "compact",
    num_steps: int = NUM_STEPS,
    impl: str = "threefry2x32",
) -> tuple[rollout.Carry, rollout.Transition]:
    """Collects a trajectory of a case with seed 7. Callers must not modify it."""
    collector = make_collector(name, num_envs, auto_reset)
    carry = collector.init(jax.random.key(7, impl=impl))
    return collector.collect_steps(carry, None, num_steps)


def make_episodes(returns, **fields):
    """Returns episodes with these returns that terminated after 5 steps."""
    returns = jnp.asarray(returns, jnp.float32)
    all_true = jnp.ones(returns.shape, bool)
    defaults = {
        "episode_return": returns,
        "episode_length": jnp.full(returns.shape, 5),
        "terminated": all_true,
        "truncated": ~all_true,
        "finished": all_true,
        "lane": jnp.zeros(returns.shape, jnp.int32),
        "num_steps": jnp.int32(5 * returns.size),
    }
    return rollout.types.Episodes(**(defaults | fields))


def raw(tree):
    """Replaces typed keys with their words, so that NumPy can compare trees."""

    def data(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key_data(x)
        return x

    return jax.tree.map(data, tree)


def on_a_gpu():
    """Makes `lax.platform_dependent` select its GPU branch in a `with` block."""

    def choose(*args, default, cuda=None, **platforms):
        del platforms  # unused
        return (cuda or default)(*args)

    return mock.patch.object(jax.lax, "platform_dependent", choose)


def in_one_program(fn, cases):
    """Calls `fn(case, key)` for every case by name, each with a separate key."""

    @quick_jit
    def run(keys):
        pairs = zip(cases.items(), keys, strict=True)
        return {name: fn(case, key) for (name, case), key in pairs}

    return jax.device_get(run(jax.random.split(jax.random.key(0), len(cases))))


# Use it for large programs whose speed does not matter; see `QUICK_OPTIONS`.
quick_jit = functools.partial(jax.jit, compiler_options=QUICK_OPTIONS)


class WithCritic(rollout.policies.PolicyWrapper):
    """A policy with another critic, which maps `(params, obs, state)` to values."""

    value_fn: Any = struct.field(pytree_node=False)

    def value(self, params, obs, state):
        return self.value_fn(params, obs, state)

    @property
    def has_value(self):
        return self.value_fn is not None


class PlainPolicy(rollout.Policy):
    """A policy whose methods call the functions `init_fn` and `apply_fn`."""

    init_fn: Any = struct.field(pytree_node=False)
    apply_fn: Any = struct.field(pytree_node=False)

    def init(self, num_envs):
        return self.init_fn(num_envs)

    def apply(self, params, obs, state, key):
        return self.apply_fn(params, obs, state, key)
