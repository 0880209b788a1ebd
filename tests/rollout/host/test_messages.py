"""Bad input to `HostCollector`, `Stream` and `RayCollector`: calls and messages."""

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

OUTSIDE = "`HostCollector` .* outside of `jit`"


def make_collector(env=None, **options):
    return HostCollector(env=env or HostCount(5), policy=POLICY, **options)


def make_async(num_ready=2, batch_size=None, **options):
    env = DelayedCount(5)
    env.batch_size = batch_size
    return make_collector(env, num_ready=num_ready, **options)


def collect_steps(collector, num_steps=3, **options):
    return collector.collect_steps(collector.init(KEY), None, num_steps, **options)


def make_key_policy():
    """Returns a policy that records the key of each episode."""
    return rollout.recurrent_policy(
        lambda params, obs, state, key: (
            jnp.zeros(len(obs), jnp.int32),
            state,
            {"key": state.value},
        ),
        lambda num_envs: rollout.types.EpisodeKey(),
    )


def make_ray(make_collector=on_host, **options):
    options = {"key": KEY, "num_actors": 2, "steps_per_batch": 24, **options}
    return rollout.host.RayCollector(make_collector, **options)


def make_closed_ray():
    batches = make_ray()
    batches.close()
    batches.close()  # a second call has no effect
    return batches


def trace_step():
    collector = on_host()
    carry = collector.init(KEY)
    return jax.jit(lambda params: collector.step(carry, params)[1].reward)(1.0)


CASES = [
    # HostCollector
    (
        lambda: make_collector(gymnasium.make_vec("CartPole-v1", 2)),
        "`env` must .* Gymnasium, got",
    ),
    (lambda: make_collector(envs.make_vec("CartPole-v1", 2)), "`Collector` for JAX"),
    (lambda: make_collector(on_fault="drop"), "`on_fault` must .* 'drop'"),
    (lambda: make_async(6), "`num_ready` must be at most 5, got 6"),
    (lambda: make_collector(num_ready=1), "`env` must .* `AsyncHostVectorEnv`"),
    (lambda: make_async(3, 2), "`num_ready` must .* `batch_size` .* 2, got 3"),
    (lambda: jax.jit(lambda x: x + make_collector().init(KEY).step)(1.0), OUTSIDE),
    (lambda: jax.jit(lambda x: make_collector().num_ready)(1.0), OUTSIDE),
    (trace_step, OUTSIDE),
    (lambda: collect_steps(on_host(), 0), "`num_steps` must .* got 0"),
    (
        lambda: collect_steps(make_async(), at_batch_end="reset"),
        "`at_batch_end` must .* got 'reset'",
    ),
    (
        lambda: make_async(record_fn=lambda t: t.replace(info=())).row_shape(None),
        "`record_fn` must .* `AsyncInfo`",
    ),
    (lambda: collect_steps(HostCollector(HostCount(2), make_key_policy())), "key_data"),
    (lambda: on_host().recover(), "`recover` must follow `init`"),
    (
        lambda: rollout.host.regroup_by_env(on_host().init(KEY)),
        "`rows` must .* `num_ready`",
    ),
    # Stream
    (
        lambda: next(rollout.Stream(make_async(), steps_per_batch=40, key=KEY)),
        "`num_ready`",
    ),
    # Collector, instead of HostCollector
    (lambda: in_jax().replace(env=HostCount(2)), "`HostCollector`"),
    (
        lambda: rollout.shard(on_host(), jax.make_mesh((2,), ("lanes",))),
        "`collector` must be a `Collector`",
    ),
    # RayCollector
    (lambda: make_ray(key=0), "`key` must .* typed key"),
    (lambda: make_ray(max_policy_lag=-1), "`max_policy_lag` must .* got -1"),
    (lambda: make_ray(params=1.0).set_params(jnp.ones(2)), "`params` must .* shapes"),
    (lambda: make_closed_ray().set_params(None), "`set_params` must .* `close`"),
    (lambda: next(make_closed_ray()), "`next` must .* `close`"),
]


@pytest.mark.parametrize(("call", "message"), CASES)
def test_error_names_the_argument(call, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", remote_cases.LocalRay())
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call()


def test_missing_ray_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'ray .* pip install "\.\[ray'):
        make_ray()
