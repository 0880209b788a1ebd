"""New streams and their batches, for tests of streams."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases import make_collector, raw

import rollout

B = 4
EPISODES = {"steps_per_batch": None, "episodes_per_batch": 5, "max_episode_steps": 6}


def act(params, obs, key):
    """Samples one of two actions; `params["odds"]` is the probability of action 1."""
    del obs
    action = jax.random.bernoulli(key, params["odds"], (B,)).astype(jnp.int32)
    return action, {"value": jnp.broadcast_to(params["odds"], (B,))}


@functools.cache
def make_learner():
    policy = rollout.stateless_policy(act)  # in a function, since it initializes jax
    return rollout.Collector(env=make_collector("count", B).env, policy=policy)


def new_stream(**options):
    """Creates a stream."""
    defaults = {"key": jax.random.key(7), "params": {"odds": np.float32(0.5)}}
    defaults["steps_per_batch"] = 8
    return rollout.Stream(make_learner(), **{**defaults, **options})


@functools.cache
def _stream_and_state(options):
    stream = new_stream(**dict(options))
    return stream, stream.state()


def make_stream(**options):
    """Returns a stream in its initial state; equal options share a stream."""
    stream, start = _stream_and_state(tuple(options.items()))
    stream.restore(start)
    return stream


@functools.cache
def reference_rows():
    """Returns the 12 rows of `collect_steps` with the key of the streams."""
    collector = make_learner()
    carry = collector.init(jax.random.key(7))
    params = {"odds": np.float32(0.5)}
    return jax.device_get(raw(collector.collect_steps(carry, params, 12)[1]))


def host(batch):
    """Copies the trajectory of a batch to NumPy arrays."""
    return jax.tree.map(np.array, jax.device_get(raw(batch.trajectory)))


def join(batches):
    """Concatenates the trajectories of batches, `[T, B, ...]`."""
    return jax.tree.map(lambda *x: np.concatenate(x), *map(host, batches))


def learn(batch):
    """Computes parameters that depend on every row of a batch."""
    rows = batch.trajectory
    action, returns = jax.device_get((rows.action, rows.episode_return))
    share = action.sum() + returns.sum() / 64
    return {"odds": np.float32(share / 8 % 1)}


def train(stream, num_batches):
    """Runs a training loop; returns its batches with their counts and versions."""
    results = []
    for _ in range(num_batches):
        batch = next(stream)
        stream.set_params(learn(batch))
        results.append((host(batch), batch.steps, batch.params_version))
    return results
