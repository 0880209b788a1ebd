"""Shared by tests: a counting environment, four cases, and cached trajectories."""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from compiles import QUICK_OPTIONS
from flax import struct

import rollout
from rollout import envs

NUM_STEPS = 64  # each case ends several episodes per lane within them
ENVS = ("count", "CartPole-v1", "Pendulum-v1", "Breakout-MinAtar")
PARAMS = {
    "CartPole-v1": {"max_steps_in_episode": 20},  # terminates and truncates
    "Pendulum-v1": {"max_steps_in_episode": 25},  # only truncates
    "Breakout-MinAtar": {"max_steps_in_episode": 12},  # terminates and truncates
}


def last_word(key) -> jax.Array:
    """31 bits of a key, evenly distributed over keys that were folded."""
    return (jax.random.key_data(key)[-1] >> 1).astype(jnp.int32)


@struct.dataclass(kw_only=True)
class CountEnv:
    """Counts its steps; every value is known in closed form.

    An episode has its length from the words of the key of its reset, which costs
    less to compile than a draw. Step n (from 1) has reward n, successor observation n,
    and draws `info["noise"]` from its own key. It terminates at the length and
    truncates at `limit`, so both may be set.
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
    """Counts like `CountEnv`; an episode lasts `min_length` or `max_length` steps.

    Each with chance 1/2, so with 2 and 20 the mean is 11 and the deviation 9.
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
    """The trajectory of a case from seed 7; do not change what it returns."""
    collector = make_collector(name, num_envs, auto_reset)
    carry = collector.init(jax.random.key(7, impl=impl))
    return collector.collect_steps(carry, None, num_steps)


def of_episodes(returns, **fields):
    """Episodes of these returns that all terminated after 5 steps."""
    returns = jnp.asarray(returns, jnp.float32)
    every = jnp.ones(returns.shape, bool)
    given = {
        "episode_return": returns,
        "episode_length": jnp.full(returns.shape, 5),
        "terminated": every,
        "truncated": ~every,
        "finished": every,
        "lane": jnp.zeros(returns.shape, jnp.int32),
        "num_steps": jnp.int32(5 * returns.size),
    }
    return rollout.types.Episodes(**(given | fields))


def raw(tree):
    """Typed keys as their words, so that trees compare with NumPy."""

    def data(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key_data(x)
        return x

    return jax.tree.map(data, tree)


def on_a_gpu():
    """Takes the branches that `lax.platform_dependent` has for a GPU."""

    def choose(*args, default=None, cuda=None, **others):
        del others  # of other platforms
        return (cuda or default)(*args)

    return mock.patch.object(jax.lax, "platform_dependent", choose)


def in_one_program(fn, cases):
    """Calls `fn(case, key)` for every case by name, each with a key of its own."""

    @quick_jit
    def run(keys):
        pairs = zip(cases.items(), keys, strict=True)
        return {name: fn(case, key) for (name, case), key in pairs}

    return jax.device_get(run(jax.random.split(jax.random.key(0), len(cases))))


# For large programs whose results alone count; see `QUICK_OPTIONS`.
quick_jit = functools.partial(jax.jit, compiler_options=QUICK_OPTIONS)


class WithCritic(rollout.policies.PolicyWrapper):
    """A policy with another critic, `(params, obs, state)` to values, or None."""

    value_fn: Any = struct.field(pytree_node=False)

    def value(self, params, obs, state):
        return self.value_fn(params, obs, state)

    @property
    def has_value(self):
        return self.value_fn is not None


class PlainPolicy(rollout.Policy):
    """A policy that calls functions with the arguments of its methods."""

    init_fn: Any = struct.field(pytree_node=False)
    apply_fn: Any = struct.field(pytree_node=False)

    def init(self, num_envs):
        return self.init_fn(num_envs)

    def apply(self, params, obs, state, key):
        return self.apply_fn(params, obs, state, key)
