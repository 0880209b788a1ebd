"""Messages of `HostCollector`, of streams over it, and of actors."""

import re
import sys

import gymnasium
import jax
import jax.numpy as jnp
import pytest
import remote_cases
from host_count import KEY, POLICY, DelayedCount, HostCount, in_jax, on_host

import rollout
from rollout import envs
from rollout.host import HostCollector

OUTSIDE = "must be called outside of `jit`"


def collector(env=None, **options):
    return HostCollector(env=env or HostCount(5), policy=POLICY, **options)


def asynchronous(num_ready=2, batch_size=None, **options):
    env = DelayedCount(5)
    env.batch_size = batch_size
    return collector(env, num_ready=num_ready, **options)


def steps(made, num_steps=3, **options):
    return made.collect_steps(made.init(KEY), None, num_steps, **options)


def keyed():
    """A policy that records the key of its episode."""
    return rollout.recurrent_policy(
        lambda params, obs, state, key: (
            jnp.zeros(len(obs), jnp.int32),
            state,
            {"key": state.value},
        ),
        lambda num_envs: rollout.types.EpisodeKey(),
    )


def stream(made=None, **options):
    options = {"steps_per_batch": 40, "key": KEY, **options}
    return rollout.Stream(made or on_host(), **options)


def batches(make_collector=on_host, **options):
    options = {"key": KEY, "num_actors": 2, "steps_per_batch": 24, **options}
    return rollout.host.RayCollector(make_collector, **options)


def closed():
    made = batches()
    made.close()
    made.close()  # once more changes nothing
    return made


CASES = [
    # HostCollector
    (
        lambda: collector(gymnasium.make_vec("CartPole-v1", 2)),
        "`env` must not be an environment of Gymnasium, got ",
    ),
    (lambda: collector(envs.make_vec("CartPole-v1", 2)), "Use a `Collector` for JAX"),
    (lambda: collector(on_fault="drop"), "`on_fault` must be"),
    (lambda: asynchronous(6), "`num_ready` must be at most 5, got 6"),
    (lambda: collector(num_ready=1), "`env` must be an `AsyncHostVectorEnv`"),
    (lambda: asynchronous(3, 2), "must be the `batch_size` of the environment, 2, go"),
    (lambda: jax.jit(lambda x: x + collector().init(KEY).step)(1.0), OUTSIDE),
    (lambda: jax.jit(lambda x: collector().num_ready)(1.0), OUTSIDE),
    (lambda: jax.jit(step_in_jit())(1.0), OUTSIDE),
    (lambda: steps(on_host(), 0), "`num_steps` must be"),
    (
        lambda: steps(asynchronous(), at_batch_end="reset"),
        "`at_batch_end` must be \"continue\", got 'reset'",
    ),
    (
        lambda: asynchronous(record_fn=lambda t: t.replace(info=())).row_shape(None),
        "`record_fn` must keep the `AsyncInfo` in `info`",
    ),
    (lambda: steps(HostCollector(HostCount(2), keyed())), "Use jax.random.key_data"),
    (lambda: on_host().recover(), "`recover` must follow `init`"),
    (lambda: rollout.host.regroup_by_env(on_host().init(KEY)), "`rows` must be of a `"),
    # Stream
    (lambda: next(stream(asynchronous())), "`num_ready`"),
    # The other kind of collector
    (lambda: in_jax().replace(env=HostCount(2)), "to a `HostCollector`"),
    (
        lambda: rollout.shard(on_host(), jax.make_mesh((2,), ("lanes",))),
        "`collector` must be a `Collector`",
    ),
    # RayCollector
    (lambda: batches(3), "`make_collector` must be a function, got int 3"),
    (lambda: batches(key=0), "`key` must be one typed key"),
    (lambda: batches(max_policy_lag=-1), "`max_policy_lag` must be an int of at least"),
    (lambda: batches(params=1.0).set_params(jnp.ones(2)), "`params` must keep structu"),
    (lambda: closed().set_params(None), "`set_params` must be called before `close`"),
    (lambda: next(closed()), "`next` must be called before `close`"),
]


def step_in_jit():
    made = on_host()
    carry = made.init(KEY)
    return lambda params: made.step(carry, params)[1].reward


@pytest.mark.parametrize(("call", "message"), CASES)
def test_message_names_what_is_wrong(call, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", remote_cases.LocalRay())
    errors = ValueError, TypeError, RuntimeError
    with pytest.raises(errors, match=re.escape(message)):
        call()


def test_missing_ray_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ImportError, match=r'ray is not installed: pip install "\.\[ray'
    ):
        batches()
