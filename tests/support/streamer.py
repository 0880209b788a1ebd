"""Runs a stream in a process, saves checkpoints and writes a hash of every batch.

The process resumes from the newest checkpoint in FOLDER/checkpoint. A line of
FOLDER/hashes is the number and the hash of a batch, or "start" and the number of the
first batch of a process.
"""

import hashlib
from pathlib import Path

import jax
import numpy as np
from streams import learn, new_stream

import rollout

EVERY = 2


def digest(batch: rollout.stream.StreamBatch) -> str:
    """Hashes every bit of a batch and the version of its parameters."""
    parts = [np.asarray(x).tobytes() for x in jax.tree.leaves(batch.trajectory)]
    text = b"".join(parts) + f"{batch.steps} {batch.params_version}".encode()
    return hashlib.sha256(text).hexdigest()


def main(folder: Path, num_batches: int) -> None:
    """Streams `num_batches` batches; `folder.parent` has the compilation cache."""
    # The cache avoids repeated compilation, which would dominate the time of the test.
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    options = {"total_steps": 8 * num_batches, "prefetch": 1}
    stream, checkpoints = new_stream(**options), folder / "checkpoint"
    if rollout.checkpoint.steps(checkpoints):
        tree = rollout.checkpoint.restore(checkpoints, {"stream": stream.state()})
        stream.restore(tree["stream"])
    number = stream.steps // 8
    with (folder / "hashes").open("a") as file:
        print("start", number, file=file, flush=True)
        for batch in stream:
            print(number, digest(batch), file=file, flush=True)
            stream.set_params(learn(batch))
            number += 1
            tree = {"stream": stream.state()}
            rollout.checkpoint.save(checkpoints, tree, step=number, every=EVERY, keep=2)
