"""Hashes all collected data of six environments and three policies.

`tests/bits.json` contains the hashes that `test_bits` compares, for both versions of
jax. A trajectory has one hash per field. Compilers for other processors round
differently: `chaos`, a program unrelated to this project, detects such a processor.

    PYTHONPATH=tests/support python tests/support/bits.py

writes the hashes for the installed version of jax, which takes minutes. If a change
explains different hashes, run the script with both versions.
"""

import hashlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import make_env, raw

import rollout
from rollout import envs
from rollout.policies import EpsilonGreedy, OrnsteinUhlenbeck, RandomWarmup

FILE = pathlib.Path(__file__).parents[1] / "bits.json"
B = 6
STREAMS = {
    "resume": {"steps_per_batch": 2 * B, "resume": True},
    "warmup": {"steps_per_batch": 2 * B, "warmup": 3},
    "limit": {"steps_per_batch": 4 * B, "max_episode_steps": 5},
    "reuse_memory": {"steps_per_batch": 3 * B, "reuse_memory": True, "prefetch": 1},
    "truncate": {"steps_per_batch": 3 * B, "at_batch_end": "truncate"},
    "reset": {"steps_per_batch": 3 * B, "at_batch_end": "reset"},
    "whole": {"episodes_per_batch": 3, "max_episode_steps": 8},
}


def digest(tree) -> str:
    """Hashes every bit of a tree."""
    parts = [np.asarray(x) for x in jax.tree.leaves(raw(tree))]
    text = b"".join(f"{x.dtype}{x.shape}".encode() + x.tobytes() for x in parts)
    return hashlib.sha256(text).hexdigest()[:16]


@jax.jit
def chaos() -> tuple[jax.Array, jax.Array]:
    """Runs a chaotic program with the operations of environments and networks."""

    def step(x, _):
        y = jnp.sin(3.1 * x) * jnp.exp(-(x**2)) + jnp.cos(x) @ (x.T @ x) / 7
        return jnp.tanh(y) / (1 + jnp.abs(x.mean())), y.sum()

    return jax.lax.scan(step, jnp.linspace(0.1, 0.9, 24).reshape(6, 4), length=100)


def make_vector_env(name: str) -> envs.types.VectorEnv:
    if name == "normalized":
        return envs.NormalizeObs(envs.vectorize(make_env("CartPole-v1"), B))
    if name == "Acrobot-v1":
        return envs.make_vec(name, B, max_steps_in_episode=15)
    return envs.vectorize(make_env(name), B)


def features(obs: jax.Array) -> jax.Array:
    flat = obs.reshape(obs.shape[0], -1).astype(jnp.float32)
    mixed = flat[:, :4] + flat.mean(axis=1, keepdims=True)
    return mixed.sum(axis=1, keepdims=True)


def head(space: envs.types.AnySpace, scores: jax.Array, key) -> tuple[jax.Array, dict]:
    """Returns actions and extras for `[B, 1]` scores."""
    if hasattr(space, "n"):
        logits = scores * jnp.arange(space.n, dtype=jnp.float32)[None]
        action = jax.random.categorical(key, logits).astype(space.dtype)
        return action, {"logits": logits}
    noise = jax.random.normal(key, (scores.shape[0], *space.shape))
    return jnp.tanh(scores + noise).astype(space.dtype), {"value": scores[:, 0]}


def make_policy(name: str, space: envs.spaces.Space) -> rollout.Policy:
    if name == "random":
        return rollout.random_policy(space)
    if name == "net":
        return rollout.stateless_policy(
            lambda w, obs, key: head(space, features(obs) * w, key)
        )

    def apply(w, obs, state, key):
        state = jnp.tanh(state + features(obs) * w)
        return *(head(space, state, key)[:1]), state, {"state": state}

    policy = rollout.recurrent_policy(apply, lambda num_envs: jnp.zeros((num_envs, 1)))
    if hasattr(space, "n"):
        return EpsilonGreedy(policy, space, lambda step: 1.0 / (1 + step / 9))
    return OrnsteinUhlenbeck(policy, space, 0.2)


def hash_stream(collector, *, resume=False, warmup=0, **options) -> str:
    """Hashes four batches.

    A restored stream returns the last two batches if `resume` is set. The first
    `warmup` steps of each lane are random.
    """
    if warmup:
        space = collector.env.action_space
        policy = RandomWarmup(collector.policy, space, warmup)
        collector = collector.replace(policy=policy)

    def make_stream(seed: int) -> rollout.Stream:
        stream_options = {"params": jnp.float32(0.3), **options}
        return rollout.Stream(collector, key=jax.random.key(seed), **stream_options)

    stream, parts = make_stream(11), []
    for number in range(4):
        if resume and number == 2:
            state = stream.state()
            stream.close()
            stream = make_stream(0)
            stream.restore(state)
        batch = next(stream)
        num_random = B * warmup - (stream.steps - batch.steps)
        counts = np.array([batch.steps, np.clip(num_random, 0, batch.steps)])
        parts.append(digest((batch.trajectory, counts)))
        stream.set_params(jnp.float32(0.3 + batch.steps / 100))
    hashes = np.frombuffer("".join(parts).encode(), np.uint8)
    carry = stream.state()["carry"]
    stream.close()
    return digest((hashes, carry))


def hash_all(env_name: str, policy_name: str, streams=tuple(STREAMS)) -> dict[str, str]:
    """Hashes the results of all collection methods and of these streams."""
    env = make_vector_env(env_name)
    policy = make_policy(policy_name, env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    params, carry = jnp.float32(0.3), collector.init(jax.random.key(7))
    carry, trajectory = collector.collect_steps(carry, params, 40)
    hashes = {f"t.{name}": digest(x) for name, x in vars(trajectory).items()}
    hashes["carry"] = digest(carry)
    carry, episodes = collector.collect_episodes(carry, params, 9, max_episode_steps=14)
    hashes["episodes"] = digest((carry, episodes.replace(lane=(), mask=())))
    carry, _ = collector.collect_episodes(
        carry, params, 2, max_episode_steps=14, per_env=True
    )
    hashes["per_env"] = digest(carry)
    carry, episodes = collector.collect_episodes(
        carry, params, 5, max_episode_steps=14, return_trajectory=True
    )
    hashes["padded"] = digest((carry, episodes.trajectory))
    for name in streams:
        hashes[f"stream {name}"] = hash_stream(collector, **STREAMS[name])
    return hashes


def main() -> None:
    """Writes the hashes of all pairs and streams that the file contains."""
    hashes_by_version = json.loads(FILE.read_text())
    pairs = hashes_by_version[max(hashes_by_version)]
    hashes: dict[str, Any] = {"chaos": digest(chaos())}
    for pair in pairs.keys() - {"chaos"}:
        streams = [x.partition(" ")[2] for x in pairs[pair] if x.startswith("stream ")]
        env_name, _, policy_name = pair.rpartition(" ")
        hashes[pair] = hash_all(env_name, policy_name, streams)
    hashes_by_version[jax.__version__] = hashes
    FILE.write_text(json.dumps(hashes_by_version, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
