"""What is told to be finite without being looked at, and what must not be."""

import jax
import jax.numpy as jnp
import pytest
from cases import CountEnv, make_collector, make_env
from flax import struct

import envs
import rollout
from rollout.stream import _finite

X = jnp.ones((3, 2))  # finite, in the cases below
Y = jnp.ones((3, 2))  # not known to be
BITS = jnp.ones((3, 2), bool)
BYTES = jnp.ones((3, 2), jnp.uint8)
INDEX = jnp.array([0, 2])


@jax.jit
def inner(x):
    return jnp.tanh(x)


FINITE = {
    "flags": lambda x, y: BITS.astype(jnp.float32),
    "an image": lambda x, y: BYTES.astype(jnp.float32) / 255,
    "the size of a NaN, as a flag": lambda x, y: (y > 0).astype(jnp.float32),
    "another place": lambda x, y: jnp.concatenate([x.T, x.T])[::-1].reshape(-1),
    "a choice": lambda x, y: jnp.where(y > 0, x, -1.0),
    "written over": lambda x, y: x.at[1].set(2.0),
    "a row, clipped": lambda x, y: x.at[INDEX].get(mode="clip"),
    "a smaller one": lambda x, y: 0.5 * x,
    "one into more digits": lambda x, y: BYTES.astype(jnp.bfloat16).astype(jnp.float32),
    "a function that was jitted": lambda x, y: inner(x),
    "one of two behind a barrier": lambda x, y: jax.lax.optimization_barrier((x, y))[0],
    "two branches": lambda x, y: jax.lax.cond(
        y[0, 0] > 0, lambda x: x, lambda x: -x, x
    ),
    "a loop": lambda x, y: jax.lax.fori_loop(0, 3, lambda i, x: jnp.maximum(x, i), x),
    "a scan": lambda x, y: jax.lax.scan(lambda c, row: (-c, -row), 1.0, x)[1],
}
UNKNOWN = {
    "unknown": lambda x, y: y,
    "a NaN": lambda x, y: jnp.full((2,), jnp.nan),
    "a sum": lambda x, y: x + x,
    "a larger one": lambda x, y: 2.0 * x,
    "a quotient": lambda x, y: x / x,
    "by less than one": lambda x, y: x / 0.5,
    "a logarithm": lambda x, y: jnp.log(x),
    "a row that may be missing": lambda x, y: x.at[INDEX].get(mode="fill"),
    "one into fewer digits": lambda x, y: x.astype(jnp.float16),
    "large numbers into few digits": lambda x, y: INDEX.astype(jnp.float16),
    "a choice": lambda x, y: jnp.where(BITS, x, y),
    "written over by it": lambda x, y: x.at[0].set(y[0]),
    "one of two branches": lambda x, y: jax.lax.cond(
        BITS[0, 0], lambda x, y: x, lambda x, y: y, x, y
    ),
    "a loop that grows": lambda x, y: jax.lax.fori_loop(0, 3, lambda i, x: x * x, x),
    "a loop that passes it on": lambda x, y: jax.lax.fori_loop(
        0, 3, lambda i, pair: (pair[1], pair[1]), (x, y)
    )[0],
    "a scan that reads it": lambda x, y: jax.lax.scan(lambda c, row: (row, c), x[0], y)[
        1
    ],
}


def judge(fn):
    return _finite.finite(fn, (X, Y), (True, False))


@pytest.mark.parametrize("name", FINITE)
def test_finite_by_construction(name):
    assert judge(FINITE[name]) is True


@pytest.mark.parametrize("name", UNKNOWN)
def test_not_proven(name):
    assert judge(UNKNOWN[name]) is False


def find(collector):
    return _finite.proved(collector, collector.init(jax.random.key(0)), None)


def test_image_of_flags_need_not_be_looked_at():
    assert find(make_collector("Breakout-MinAtar", 4)) >= {"obs", "next_obs"}


def test_numbers_of_a_simulation_are_looked_at():
    names = {"obs", "next_obs", "reward"}
    assert find(make_collector("CartPole-v1", 4)).isdisjoint(names)


def test_what_a_state_keeps_is_followed_from_step_to_step():
    """The frames before lie in the state, and come from there."""
    stacked = envs.vectorize(envs.FrameStack(make_env("Breakout-MinAtar"), 2), 4)
    policy = rollout.random_policy(stacked.action_space)
    collector = rollout.Collector(env=stacked, policy=policy)
    assert find(collector) >= {"obs", "next_obs"}


@struct.dataclass(kw_only=True)
class FlagEnv(CountEnv):
    """Observes `shown` at odd steps."""

    shown: jax.Array

    def step(self, key, state, action):
        result = super().step(key, state, action)
        is_odd = result.state["n"] % 2 == 1
        return result.replace(obs=jnp.where(is_odd, self.shown, 0.0)[None])


def test_array_of_an_environment_is_looked_at_whatever_it_holds_at_first():
    """Two environments of one kind run the same program."""

    def make_stream(shown):
        env = envs.vectorize(FlagEnv(shown=jnp.float32(shown)), 4)
        policy = rollout.random_policy(env.action_space)
        collector = rollout.Collector(env=env, policy=policy)
        return rollout.Stream(
            collector, key=jax.random.key(0), steps_per_batch=8, check_finite=True
        )

    assert next(make_stream(1.0)).steps == 8
    with pytest.raises(FloatingPointError, match="`next_obs` must be finite"):
        next(make_stream(jnp.nan))
