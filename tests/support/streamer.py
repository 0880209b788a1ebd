"""Streams, checkpoints, and writes a hash of every batch: in a process of its own.

Goes on from the newest checkpoint in FOLDER/checkpoint. Every line of FOLDER/hashes is
the number of a batch and its hash, or "start" and the number of the batch with which
a process begins.
"""

import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from cases import make_env

import rollout
from rollout import envs

B, EVERY = 4, 2


def act(params, obs, key):
    """Draws the second action with the odds that the parameters give."""
    del obs
    action = jax.random.bernoulli(key, params["odds"], (B,)).astype(jnp.int32)
    return action, {"value": jnp.broadcast_to(params["odds"], (B,))}


def digest(batch: rollout.StreamBatch) -> str:
    """Hashes every bit of a batch, and the parameters that made it."""
    parts = [np.asarray(x).tobytes() for x in jax.tree.leaves(batch.trajectory)]
    text = b"".join(parts) + f"{batch.steps} {batch.params_version}".encode()
    return hashlib.sha256(text).hexdigest()


def learn(batch: rollout.StreamBatch) -> dict[str, jax.Array]:
    """Makes parameters that depend on the batch."""
    return {"odds": jnp.float32(batch.trajectory.action.sum() / 8 % 1)}


def main(env_id: str, folder: Path, num_batches: int) -> None:
    """Streams up to the given batch; `folder.parent` keeps compiled programs."""
    # Compiled once, or most of the test would be compiling.
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    collector = rollout.Collector(
        env=envs.vectorize(make_env(env_id), B), policy=rollout.stateless_policy(act)
    )
    stream = rollout.Stream(
        collector,
        key=jax.random.key(7),
        params={"odds": jnp.float32(0.5)},
        steps_per_batch=8,
        total_steps=8 * num_batches,
        warmup_steps=16,
        prefetch=1,
    )
    checkpoints = folder / "checkpoint"
    if rollout.checkpoint.steps(checkpoints):
        saved = rollout.checkpoint.restore(checkpoints, {"stream": stream.state()})
        stream.restore(saved["stream"])
    number = stream.steps // 8
    with (folder / "hashes").open("a") as file:
        print("start", number, file=file, flush=True)
        for batch in stream:
            print(number, digest(batch), file=file, flush=True)
            stream.set_params(learn(batch))
            number += 1
            tree = {"stream": stream.state()}
            rollout.checkpoint.save(checkpoints, tree, step=number, every=EVERY, keep=2)
