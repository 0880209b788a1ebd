"""What do actors of Ray cost, against collectors in plain processes?

Two actors with a `HostCollector` over 16 CartPoles each, and two processes with the
same collector each and no Ray, take turns. Environment steps per second of all
together, as seen by a learner that takes a batch and throws it away; the plain
processes keep what they collect, so theirs is the speed of collecting alone. Then the
processor time of a step, which other work on the machine changes less (Linux only).

    pip install "rollout-jax[gymnasium,ray]"
    python tests/benchmarks/remote_speed.py
"""

import functools
import multiprocessing
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import jax
import numpy as np
from harness import arguments, report

import rollout
from rollout import envs

NUM_ACTORS, NUM_ENVS, NUM_STEPS = 2, 16, 128
KEY = 0


def make_collector() -> rollout.HostCollector:
    """A policy of two layers in 16 environments."""
    env = envs.from_gymnasium("CartPole-v1", num_envs=NUM_ENVS)

    def act(params: tuple, obs: jax.Array, key: jax.Array) -> jax.Array:
        return jax.random.categorical(key, jax.numpy.tanh(obs @ params[0]) @ params[1])

    return rollout.HostCollector(env=env, policy=rollout.stateless_policy(act))


def make_noted(folder: str) -> rollout.HostCollector:
    """Makes one, and leaves a file with the id of its process."""
    (pathlib.Path(folder) / str(os.getpid())).touch()
    return make_collector()


def make_params() -> tuple[np.ndarray, np.ndarray]:
    """Weights of the two layers."""
    draw = np.random.default_rng(0).normal
    return tuple(draw(size=x).astype(np.float32) for x in ((4, 64), (64, 2)))


def serve(pipe: Connection, number: int) -> None:
    """Collects as many batches as it is asked for, in a process of its own."""
    collector, params = make_collector(), jax.device_put(make_params())
    carry = collector.init(jax.random.fold_in(jax.random.key(KEY), number))
    while num_batches := pipe.recv():
        start = time.perf_counter()
        for _ in range(num_batches):
            carry, trajectory = collector.collect_steps(carry, params, NUM_STEPS)
            jax.device_get(trajectory)
        steps = num_batches * NUM_ENVS * NUM_STEPS
        pipe.send(steps / (time.perf_counter() - start))


def time_local(pipes: list[Connection], num_batches: int) -> float:
    """Environment steps per second, the sum of those of each process."""
    for pipe in pipes:
        pipe.send(num_batches)
    return sum(pipe.recv() for pipe in pipes)


def time_remote(batches: rollout.host.RemoteBatches, num_batches: int) -> float:
    """Environment steps per second of all actors together."""
    for _ in range(2 * NUM_ACTORS):  # those that wait, and those begun after them
        next(batches)
    start = time.perf_counter()
    steps = sum(next(batches).steps for _ in range(num_batches * NUM_ACTORS))
    return steps / (time.perf_counter() - start)


def cpu_time(pids: list[int]) -> float:
    """Microseconds of processor time that processes have taken."""
    paths = [pathlib.Path(f"/proc/{pid}/stat") for pid in pids]
    fields = [path.read_text().rpartition(")")[2].split() for path in paths]
    ticks = sum(int(x[11]) + int(x[12]) for x in fields)  # of the user, of the system
    return 1e6 * ticks / os.sysconf("SC_CLK_TCK")


def cpu_per_step(pids: list[int], run: Callable[[], object], num_batches: int) -> float:
    """Microseconds of processor time per environment step."""
    start = cpu_time(pids)
    run()
    time.sleep(1.0)  # until each actor has one batch waiting again
    steps = num_batches * NUM_ACTORS * NUM_ENVS * NUM_STEPS
    return (cpu_time(pids) - start) / steps


def main() -> None:
    """Makes the table."""
    args = arguments(__doc__, 9, num_batches=(20,))  # of each actor
    # By default Ray's are nice to all others (15), and slow where there are others.
    os.environ.setdefault("RAY_worker_niceness", "0")
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(NUM_ACTORS):
        pipe, other = context.Pipe()
        processes.append(context.Process(target=serve, args=(other, number)))
        processes[-1].start()
        pipes.append(pipe)
    options = {"num_actors": NUM_ACTORS, "steps_per_batch": NUM_ENVS * NUM_STEPS}
    options |= {"key": jax.random.key(KEY), "params": make_params()}
    folder, num = tempfile.mkdtemp(), args.num_batches[0]
    make = functools.partial(make_noted, folder)
    rates, times = [], []
    with rollout.remote_batches(make, **options) as batches:
        local = lambda: time_local(pipes, num)  # noqa: E731
        remote = lambda: [next(batches) for _ in range(num * NUM_ACTORS)]  # noqa: E731
        local(), time_remote(batches, num)  # compiles
        rates = [(local(), time_remote(batches, num)) for _ in range(args.repeats)]
        time.sleep(1.0)
        pids = [x.pid for x in processes], [int(x) for x in os.listdir(folder)]
        times = [
            (cpu_per_step(pids[0], local, num), cpu_per_step(pids[1], remote, num))
            for _ in range(args.repeats)
        ]
    local, remote = np.array(rates).T
    columns = "", "two actors of Ray", "two plain processes", "actors / processes"
    ratio, cpu = f"{np.median(remote / local):.2f}", np.median(times, axis=0)
    speeds = (f"{np.median(x):,.0f}" for x in (remote, local))
    us = f"{cpu[1]:.0f}", f"{cpu[0]:.0f}"
    rows = ("steps/s", *speeds, ratio), ("processor time per step, us", *us, "")
    report(args, "actors of Ray", [dict(zip(columns, x, strict=True)) for x in rows])
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(0)
        process.join()


if __name__ == "__main__":
    main()
