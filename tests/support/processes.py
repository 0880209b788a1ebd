"""Runs a stream and invalid calls in one of two processes.

    python processes.py PORT PROCESS_ID FOLDER

Writes the batch of the local lanes to FOLDER/<process>.npz, and the error messages to
FOLDER/<process>.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import make_env, raw
from jax.experimental import multihost_utils
from jax.sharding import AxisType, PartitionSpec

import rollout
from rollout import envs

B, NUM_DEVICES, NUM_PROCESSES = 16, 4, 2


def act(params, obs, key):
    return jax.random.randint(key, obs.shape[:1], 0, 3)


def make_collector(num_envs=B, **params):
    env = envs.vectorize(make_env("count", **params), num_envs, auto_reset="select")
    return rollout.Collector(env=env, policy=rollout.stateless_policy(act))


def make_mesh():
    """Returns a mesh of four devices of any process."""
    devices = jax.devices()[:NUM_DEVICES]
    types = {"axis_types": (AxisType.Auto,)}
    return jax.make_mesh((NUM_DEVICES,), ("lanes",), devices=devices, **types)


def make_stream(collector, **options):
    options = {"steps_per_batch": 8 * B, **options}
    return rollout.Stream(collector, key=jax.random.key(2), **options)


def make_batch():
    """Returns a batch of environments with different parameters per lane."""
    env = jax.vmap(lambda limit: make_env("count", limit=limit))(2 + jnp.arange(B) % 5)
    env = envs.vectorize_each(env, auto_reset="select")
    collector = make_collector().replace(env=env)
    return next(make_stream(rollout.shard(collector, make_mesh()))).trajectory


def arrays(tree) -> dict[str, Any]:
    """Returns the leaves of a tree as NumPy arrays by path."""
    leaves = jax.tree.leaves_with_path(raw(tree))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def error_messages(process):
    """Yields the name and message of each call whose arguments differ by process."""
    mesh, sharded = make_mesh(), rollout.shard(make_collector(), make_mesh())
    calls = {
        "lanes": lambda: rollout.shard(make_collector(B * (1 + process)), mesh),
        "uneven": lambda: rollout.shard(make_collector(B + process), mesh),
        "parameters": lambda: rollout.shard(make_collector(limit=7 + process), mesh),
        "options": lambda: make_stream(sharded, steps_per_batch=8 * B * (1 + process)),
        "prefetch": lambda: make_stream(sharded, prefetch=1),
    }
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            yield name, str(error)


if __name__ == "__main__":
    port, process_id, folder = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES // NUM_PROCESSES)
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes=NUM_PROCESSES, process_id=int(process_id)
    )
    file = Path(folder) / process_id
    file.with_suffix(".json").write_text(
        json.dumps(dict(error_messages(int(process_id))))
    )
    args = make_batch(), make_mesh(), PartitionSpec(None, "lanes")
    local_batch = multihost_utils.global_array_to_host_local_array(*args)
    np.savez(file.with_suffix(".npz"), **arrays(local_batch))
