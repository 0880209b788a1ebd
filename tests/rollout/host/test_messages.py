"""Messages of `HostCollector`, of streams over it, and of actors."""

import functools
import re
import sys

import gymnasium
import jax
import jax.numpy as jnp
import pytest
import remote_cases
from host_count import KEY, POLICY, HostCount, Late, in_jax, on_host

import rollout
from rollout import envs
from rollout.host import HostCollector

OUTSIDE = "must be used outside of `jit`"
cart = functools.partial(gymnasium.make, "CartPole-v1")
CARTS = functools.partial(envs.make_vec, "CartPole-v1")
IN_JAX = "`collector` must be a `Collector`"


@functools.cache
def collector():
    return on_host()


@functools.cache
def carry():
    return collector().init(KEY)


def step(params=None):
    return collector().step(carry(), params)


def steps(num_steps=3, **options):
    return collector().collect_steps(carry(), None, num_steps, **options)


def episodes(**options):
    return collector().collect_episodes(carry(), None, 3, **options)


def host(num_ready=None, kind=HostCount, **options):
    env = kind(5)
    return HostCollector(env=env, policy=POLICY, num_ready=num_ready, **options)


def fixed():
    env = Late(5)
    env.batch_size = 2
    return HostCollector(env=env, policy=POLICY, num_ready=3)


def stream(made=None, **options):
    options = {"steps_per_batch": 40, "key": KEY, **options}
    return rollout.Stream(made or collector(), **options)


def keyed():
    """Collects with a policy that records the key of its episode."""

    def act(params, obs, state, key):
        return jnp.zeros(len(obs), jnp.int32), state, {"key": state.value}

    def init(num_envs):
        return rollout.types.EpisodeKey()

    collector = HostCollector(HostCount(2), rollout.recurrent_policy(act, init))
    return collector.collect_steps(collector.init(KEY), None, 1)


def unserved():
    collector = host(2, Late, record_fn=lambda t: t.replace(info=()))
    return collector.row_shape(None)


def batches(make_collector=on_host, **options):
    options = {"key": KEY, "num_actors": 2, "steps_per_batch": 24, **options}
    return rollout.host.RayCollector(make_collector, **options)


def closed():
    made = batches()
    made.close()
    made.close()  # once more changes nothing
    return made


GYMNASIUM = "`env` must not be an environment of Gymnasium, got "
CASES = {
    "of Gymnasium": (
        (lambda: envs.vectorize(cart(), 2), GYMNASIUM),
        (lambda: rollout.Collector(cart(), POLICY), GYMNASIUM),
        (lambda: HostCollector(cart(), POLICY), GYMNASIUM),
        (
            lambda: HostCollector(gymnasium.make_vec("CartPole-v1", 2), POLICY),
            GYMNASIUM,
        ),
    ),
    "HostCollector": (
        (lambda: host(kind=CARTS), "Use a `Collector` for JAX environments"),
        (lambda: host(on_fault="drop"), "`on_fault` must be"),
        (lambda: host(max_restarts=-1), "`max_restarts` must be"),
        (lambda: host(6, Late), "`num_ready` must be at most 5, got 6"),
        (lambda: host(1), "`env` must be an `AsyncHostVectorEnv`"),
        (fixed, "`num_ready` must be the `batch_size` of the environment, 2, got 3"),
        (lambda: jax.jit(lambda x: host().num_ready)(1.0), OUTSIDE),
    ),
    "replace": (
        (lambda: collector().replace(envs=HostCount(4)), "'envs'", TypeError),
        (lambda: collector().replace(max_restarts=-1), "`max_restarts` must be"),
    ),
    "methods": (
        (lambda: jax.jit(lambda p: step(params=p)[1].reward)(1.0), OUTSIDE),
        # Nothing is traced in here.
        (lambda: jax.jit(lambda x: x + collector().init(KEY).step)(1.0), OUTSIDE),
        (lambda: steps(0), "`num_steps` must be"),
        (lambda: steps(max_episode_steps=0), "`max_episode_steps` must be"),
        (lambda: steps(at_batch_end="stop"), '`at_batch_end` must be "continue" or'),
        (
            lambda: host(2, Late).collect_steps(carry(), None, 3, at_batch_end="reset"),
            "`at_batch_end` must be \"continue\", got 'reset'",
        ),
        (lambda: episodes(max_episode_steps=0), "`max_episode_steps` must be"),
        (unserved, "`record_fn` must keep the `AsyncInfo` in `info`"),
        (keyed, "Use jax.random.key_data", TypeError),
        (lambda: on_host().recover(), "`recover` must follow `init`"),
    ),
    "regroup_by_env": (
        (
            lambda: rollout.host.regroup_by_env(carry()),
            "`rows` must be of a `HostCollector` with",
        ),
    ),
    "Stream": (
        (lambda: stream(host(2, Late)), "must step all environments together"),
        (lambda: stream(steps_per_batch=41), "`steps_per_batch` must be a multiple"),
        (lambda: stream(total_steps=41), "`total_steps` must be a multiple"),
        (lambda: stream(reuse_memory=True), "`reuse_memory=True` needs"),
        (lambda: stream(on_fault="drop", check_finite=True), '"drop"` needs'),
    ),
    "what is for the other kind": (
        (lambda: in_jax().replace(env=HostCount(2)), "to a `HostCollector`"),
        (lambda: rollout.shard(collector(), jax.make_mesh((2,), ("lanes",))), IN_JAX),
    ),
    "RayCollector": (
        (lambda: batches(3), "`make_collector` must be a function, got int 3"),
        (lambda: batches(key=0), "`key` must be one typed key"),
        (lambda: batches(num_actors=0), "`num_actors` must be an int of at least 1"),
        (lambda: batches(steps_per_batch=2.5), "`steps_per_batch` must be an int"),
        (lambda: batches(max_policy_lag=-1), "`max_policy_lag` must be an int of at l"),
        (lambda: batches(total_steps=0), "`total_steps` must be an int of at least 1"),
        (lambda: batches(max_restarts=True), "`max_restarts` must be an int of at lea"),
        (lambda: batches(params=1.0).set_params(jnp.ones(2)), "`params` must keep st"),
        (lambda: closed().set_params(None), "`set_params` must be call", RuntimeError),
        (lambda: next(closed()), "`next` must be called before `close`", RuntimeError),
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{name}-{number}")
        for name, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_message_names_what_is_wrong(case, monkeypatch):
    call, message, *kind = case
    monkeypatch.setitem(sys.modules, "ray", remote_cases.LocalRay())
    with pytest.raises(*kind or [ValueError], match=re.escape(message)):
        call()


def test_missing_ray_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    message = re.escape('ray is not installed: pip install ".[ray]"')
    with pytest.raises(ImportError, match=message):
        batches()
