"""Shared by tests of streams: streams at their beginning, and their batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases import make_collector, raw

import rollout

B = 4
EPISODES = {"steps_per_batch": None, "episodes_per_batch": 5, "max_episode_steps": 6}


def act(params, obs, key):
    """Two actions: the second with the odds that the parameters give."""
    del obs
    action = jax.random.bernoulli(key, params["odds"], (B,)).astype(jnp.int32)
    return action, {"value": jnp.broadcast_to(params["odds"], (B,))}


@functools.cache
def make_learner():
    policy = rollout.stateless_policy(act)  # here, since it starts jax
    return rollout.Collector(env=make_collector("count", B).env, policy=policy)


def new_stream(**options):
    """A stream that nobody else uses."""
    defaults = {"key": jax.random.key(7), "params": {"odds": np.float32(0.5)}}
    defaults["steps_per_batch"] = 8
    return rollout.Stream(make_learner(), **{**defaults, **options})


@functools.cache
def _made(options):
    stream = new_stream(**dict(options))
    return stream, stream.state()


def make_stream(**options):
    """A stream at its beginning; one for the same options, which compiles only once."""
    stream, start = _made(tuple(options.items()))
    stream.restore(start)
    return stream


@functools.cache
def straight():
    """The 12 rows that `collect_steps` gives from the same key."""
    collector = make_learner()
    carry = collector.init(jax.random.key(7))
    params = {"odds": np.float32(0.5)}
    return jax.device_get(raw(collector.collect_steps(carry, params, 12)[1]))


def host(batch):
    """The trajectory as NumPy arrays of its own."""
    return jax.tree.map(np.array, jax.device_get(raw(batch.trajectory)))


def join(batches):
    """The trajectories one after the other, `[T, B, ...]`."""
    return jax.tree.map(lambda *x: np.concatenate(x), *map(host, batches))


def learn(batch):
    """Parameters that depend on every row of the batch."""
    rows = batch.trajectory
    action, returns = jax.device_get((rows.action, rows.episode_return))
    share = action.sum() + returns.sum() / 64
    return {"odds": np.float32(share / 8 % 1)}


def train(stream, num_batches):
    """Batches of a loop that sets the parameters by the batches before."""
    seen = []
    for _ in range(num_batches):
        batch = next(stream)
        stream.set_params(learn(batch))
        seen.append((host(batch), batch.steps, batch.params_version))
    return seen
