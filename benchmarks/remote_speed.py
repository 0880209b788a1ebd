"""Times Ray actors against collectors in plain processes.

Two actors and two plain processes without Ray run in turn; each has a `HostCollector`
over 16 CartPoles. Reports the total environment steps per second. The learner receives
every batch of the actors and discards it. The plain processes send no batches, so their
speed is the speed of collection without transfers.

    pip install ".[gymnasium,ray]"
    python benchmarks/remote_speed.py
"""

import multiprocessing
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from multiprocessing.connection import Connection

import jax
import numpy as np
from harness import run

import rollout
from rollout import envs

NUM_ACTORS, NUM_ENVS, NUM_STEPS = 2, 16, 128
KEY = 0


def make_collector() -> rollout.HostCollector:
    """Makes a collector with a two-layer policy in 16 environments."""
    env = envs.from_gymnasium("CartPole-v1", num_envs=NUM_ENVS)

    def act(params: tuple, obs: jax.Array, key: jax.Array) -> jax.Array:
        return jax.random.categorical(key, jax.numpy.tanh(obs @ params[0]) @ params[1])

    return rollout.HostCollector(env=env, policy=rollout.stateless_policy(act))


def make_params() -> tuple[np.ndarray, np.ndarray]:
    """Samples the weights of the two layers."""
    normal = np.random.default_rng(0).normal
    return tuple(normal(size=x).astype(np.float32) for x in ((4, 64), (64, 2)))


def serve(pipe: Connection, index: int) -> None:
    """Runs in a worker process: collects the requested batches and sends the speed."""
    collector, params = make_collector(), jax.device_put(make_params())
    carry = collector.init(jax.random.fold_in(jax.random.key(KEY), index))
    while num_batches := pipe.recv():
        start = time.perf_counter()
        for _ in range(num_batches):
            carry, trajectory = collector.collect_steps(carry, params, NUM_STEPS)
            jax.device_get(trajectory)
        steps = num_batches * NUM_ENVS * NUM_STEPS
        pipe.send(steps / (time.perf_counter() - start))


def time_local(pipes: list[Connection], num_batches: int) -> float:
    """Returns environment steps per second, summed over the processes."""
    for pipe in pipes:
        pipe.send(num_batches)
    return sum(pipe.recv() for pipe in pipes)


def time_remote(batches: rollout.host.RayCollector, num_batches: int) -> float:
    """Returns environment steps per second of all actors together."""
    for _ in range(2 * NUM_ACTORS):  # skip batches that began before the timer
        next(batches)
    start = time.perf_counter()
    steps = sum(next(batches).steps for _ in range(num_batches * NUM_ACTORS))
    return steps / (time.perf_counter() - start)


def rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times actors and plain processes in turn."""
    # Ray's default niceness (15) slows actors down while other processes run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(NUM_ACTORS):
        pipe, worker_pipe = context.Pipe()
        processes.append(context.Process(target=serve, args=(worker_pipe, index)))
        processes[-1].start()
        pipes.append(pipe)
    options = {"num_actors": NUM_ACTORS, "steps_per_batch": NUM_ENVS * NUM_STEPS}
    options |= {"key": jax.random.key(KEY), "params": make_params()}
    num, rates = args.num_batches[0], []
    with rollout.host.RayCollector(make_collector, **options) as batches:
        time_local(pipes, num), time_remote(batches, num)  # compiles
        for _ in range(args.repeats):
            rates.append((time_local(pipes, num), time_remote(batches, num)))
    local, remote = np.array(rates).T
    yield {
        "": "steps/s",
        "two actors of Ray": f"{np.median(remote):,.0f}",
        "two plain processes": f"{np.median(local):,.0f}",
        "actors / processes": f"{np.median(remote / local):.2f}",
    }
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(0)
        process.join()


if __name__ == "__main__":
    run(__doc__, 9, {"actors of Ray": rows}, num_batches=(20,))  # of each actor
