"""`make_worker_envs`: environments in worker processes; crashes become faults."""

import contextlib
import itertools
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from multiprocessing import reduction
from typing import Any

import numpy as np

from rollout.base import checks
from rollout.envs.host import env_checks, workers
from rollout.envs.host.arrays import assign, make_layout
from rollout.envs.host.types import AsyncHostVectorEnv, EnvFault, HostStep
from rollout.envs.host.workers import WorkerHandle, WorkerPool
from rollout.envs.types import ArrayTree


def make_worker_envs(
    make_fns: Sequence[Callable[[], Any]],
    num_workers: int | None = None,
    *,
    timeout: float | None = 60.0,
    observe_info: Mapping[str, Any] | None = None,
    record_info: Mapping[str, Any] | None = None,
) -> "WorkerEnvs":
    """Creates environments in worker processes; each worker steps several of them.

    A script must call this function under `if __name__ == "__main__":`, as for all
    multiprocessing. The workers end with the main process, also after a crash.

    Environments should sample random numbers from the generator that `reset(seed=)`
    seeds. For environments that use the global generators of Python or NumPy instead, a
    worker seeds these generators at the start from the index of the worker. Whenever
    all environments of a worker are reset, it seeds them from the seed of the first
    environment. Workers therefore sample different numbers, and with one environment
    per worker an episode is reproducible from its seed.

    Args:
        make_fns: `B` picklable functions, each of which creates one environment with
            the methods and spaces of `gymnasium.Env`. With cloudpickle, which gymnasium
            installs, they may be lambdas or classes defined in a notebook.
        num_workers: number of processes. The default is the number of CPU cores, but at
            most B.
        timeout: maximum time in seconds for one request to a worker: a step of all its
            environments, a step of one environment after `send`, or a reset. After a
            timeout, the worker is killed and all its environments are faulty. The
            creation of environments has no timeout. None disables the timeout.
        observe_info: keys of `info` to include in the observation, each with an
            example value, as in `LocalEnvs`.
        record_info: keys of `info` to record in `HostStep.info`, each with an example
            value.

    Returns:
        Environments in the order of `make_fns`. Worker 0 steps the first environments.

    Raises:
        EnvFault: if an environment cannot be created.
        ValueError: if an option is invalid, a function cannot be pickled, spaces
            differ, or a space does not consist of arrays.
    """
    is_list = isinstance(make_fns, Sequence) and len(make_fns) > 0
    if not is_list or not all(map(callable, make_fns)):
        raise ValueError(
            "`make_fns` must be functions, one for each environment, for example "
            f"`[make_env] * 8`, got {make_fns!r}."
        )
    if num_workers is None:
        num_workers = min(len(make_fns), _num_cores())
    checks.check_int("num_workers", num_workers, most=len(make_fns))
    if timeout is not None:
        checks.check_positive("timeout", timeout)
    info = {"observe_info": observe_info, "record_info": record_info}
    envs = WorkerEnvs(_pack(make_fns), num_workers, timeout, info)
    envs.source = list(make_fns)
    return envs


class WorkerEnvs(AsyncHostVectorEnv):
    """Environments in worker processes; use `make_worker_envs` to create them.

    `rebuild` also restores the environments of a worker that was lost. The returned
    arrays are views of memory that the workers write to: the result of `reset` may
    change for environments that are in flight.
    """

    can_rebuild = can_load = True

    def __init__(
        self,
        make_fns: list[bytes],
        num_workers: int,
        timeout: float | None,
        info: Mapping[str, Any],
    ) -> None:
        self.num_envs = len(make_fns)
        self._make_fns, self._info = make_fns, info
        self._numbers = np.zeros(self.num_envs, np.int32)
        # Do not use "fork": a fork of a process that runs jax can deadlock.
        context: Any = multiprocessing.get_context("forkserver")
        # The fork server imports these modules once for all workers, unless it already
        # runs. Modules of `make_fns` are excluded: they may start threads or jax.
        preload = ["__main__", "gymnasium", "rollout.envs.host.workers"]
        context.set_forkserver_preload([x for x in preload if x in sys.modules])
        # Each worker has a range of environments: a slice of rows of the shared memory.
        bounds = np.linspace(0, self.num_envs, num_workers + 1).astype(int).tolist()
        groups = [range(a, b) for a, b in itertools.pairwise(bounds)]
        self._pool = WorkerPool(groups, timeout, context)
        self._handle_of = [handle for handle in self._pool.handles for _ in handle.ids]
        self._spaces: Any = None  # set by the reply of the first worker
        weakref.finalize(self, self._pool.close)
        try:
            with self._pool as pool:
                self._start(pool.handles)
                self._raise(range(self.num_envs))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, in the order of the environments."""
        return [handle.process.pid for handle in self._pool.handles]

    def at_episodes(self, numbers: np.ndarray) -> None:
        """Announces the numbers of the next episodes; see `HostVectorEnv`."""
        self._numbers = numbers

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        """Starts an episode in some environments; see `HostVectorEnv`.

        Raises:
            EnvFault: if an environment fails, or has failed and was not rebuilt.
        """
        env_ids = np.flatnonzero(mask).tolist()
        with self._pool as pool:
            handles = self._handles(x for x in env_ids if x not in pool.broken)
            for handle in handles:  # send all requests first, so that workers overlap
                args = (x[handle.rows] for x in (seeds, mask, self._numbers))
                pool.request(handle, "reset_numbered", *args)
            pool.results(handles)
            # Discard after the reply: until then, results of earlier steps may arrive.
            pool.discard_steps(env_ids)
            self._raise(env_ids)
            return self._arrays.obs_tree

    def step(self, action: ArrayTree) -> HostStep:
        """Steps every environment with its action, `[B, ...]`, without resets."""
        with self._pool as pool:
            self._write_action(slice(None), action)
            # Send all requests before waiting for replies, so that workers overlap.
            for handle in pool.handles:
                pool.request(handle, "take_step")
            pool.results(pool.handles)
            return self._arrays.answer(pool.broken)

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        """Starts a step in some environments; see `AsyncHostVectorEnv`."""
        with self._pool as pool:
            self._write_action(env_id, action)
            for x in env_id.tolist():
                pool.in_flight.add(x)
                if x in pool.broken:  # ready immediately: `receive` reports the fault
                    pool.ready.append(x)
                else:
                    handle = self._handle_of[x]
                    pool.request(handle, "take_step_of", x - handle.ids.start)

    def receive(
        self, num_ready: int, timeout: float | None = None
    ) -> tuple[HostStep, np.ndarray]:
        """Waits until some environments are ready; see `AsyncHostVectorEnv`.

        Raises:
            TimeoutError: if fewer environments are ready within `timeout`. The next
                call returns them.
            ValueError: if fewer environments are in flight.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._pool as pool:
            checks.check_int("num_ready", num_ready, most=len(pool.in_flight))
            while len(pool.ready) < num_ready:
                seconds = None if end is None else max(0.0, end - time.monotonic())
                pool.read_replies(seconds)  # 0 seconds reads the replies in the pipes
                if seconds == 0 and len(pool.ready) < num_ready:
                    raise TimeoutError(
                        f"{len(pool.ready)} of {num_ready} environments answered "
                        f"within {timeout} s."
                    )
            # Workers do not write to these rows before the next `send`.
            env_ids = [pool.ready.popleft() for _ in range(num_ready)]
            pool.in_flight.difference_update(env_ids)
            ids = np.asarray(env_ids, np.int32)
            return self._arrays.answer(pool.broken, ids), ids

    def rebuild(self, mask: np.ndarray) -> None:
        """Replaces environments by new ones; see `LocalEnvs.rebuild`.

        Discards the steps of these environments that are in flight. A lost worker is
        restarted with all its environments. Environments outside `mask` remain faulty
        until they are rebuilt.
        """
        env_ids = np.flatnonzero(mask).tolist()
        with self._pool as pool:
            handles = self._handles(env_ids)
            for handle in handles:
                pool.request(handle, "rebuild", mask[handle.rows])
            pool.results(handles)
            for x in env_ids:  # after the replies, which still report the old faults
                pool.broken.pop(x, None)
            for handle in handles:
                pool.add_faults(handle)
            # An environment may have crashed the worker during the rebuild.
            self._start([handle for handle in handles if handle.pipe is None])
            pool.discard_steps(env_ids)
            self._raise(env_ids)

    def save(self) -> list[bytes] | None:
        """Saves every environment, None if some are in flight; see `HostVectorEnv`."""
        with self._pool as pool:
            for handle in pool.handles:
                pool.request(handle, "save")
            # Check for faults after the replies, which report faults and lost workers.
            states = pool.results(pool.handles)
            if pool.broken or pool.in_flight or None in states:
                return None
            return list(itertools.chain.from_iterable(states))

    def load(self, saved: Sequence[bytes], obs: ArrayTree) -> None:
        """Restores the state of every environment; see `HostVectorEnv`.

        Raises:
            EnvFault: if a worker ends during the call.
            ValueError: if an environment has no `load_state`.
        """
        with self._pool as pool:
            pool.read_replies(0.0)  # detects workers that have ended
            self._start([handle for handle in pool.handles if handle.pipe is None])
            # Clear old faults: `load` also restores faulty environments, and the
            # replies report new faults.
            pool.broken.clear()
            pool.discard_steps(range(self.num_envs))
            for handle in pool.handles:
                rows = self._layout.obs.map(lambda x, rows=handle.rows: x[rows], obs)
                pool.request(handle, "load", saved[handle.rows], rows)
            pool.results(pool.handles)
            self._raise(range(self.num_envs))

    def close(self) -> None:
        """Ends the worker processes; a second call does nothing."""
        self._pool.close()

    def _start(self, handles: Collection[WorkerHandle]) -> None:
        """Starts workers with all their environments."""
        pool, ready = self._pool, []
        for handle in handles:
            make_fns = self._make_fns[handle.rows]
            pool.start(handle)
            pool.request(handle, "make", make_fns, self._info, handle.ids)
        for handle, spaces, error in pool.gather(handles):
            if error is None:
                ready.append(handle)
                # The first reply determines the spaces and thus the size of the memory.
                self._spaces = self._spaces or self._share_memory(spaces)
                env_checks.check_same_spaces(self._spaces, spaces, handle.ids.start)
                continue
            pool.kill(handle, error)
            if isinstance(error, ValueError):  # spaces differ or are not supported
                raise error
            if isinstance(error, EnvFault):
                pool.broken.update(error.causes)
        for handle in ready:
            # The worker reads the descriptor from the pipe right after this message.
            pool.request(handle, "share", self.num_envs)
            if handle.pipe is not None:
                with contextlib.suppress(OSError):  # `results` detects a lost worker
                    reduction.send_handle(handle.pipe, self._memory, handle.process.pid)
        pool.results(ready)

    def _share_memory(self, spaces: tuple[Any, Any]) -> tuple[Any, Any]:
        """Allocates the shared arrays for these spaces; returns `spaces`."""
        self._layout = make_layout(spaces, **self._info)
        self.observation_space = self._layout.obs.space
        self.action_space = self._layout.action.space
        # The file has no name: the memory is freed with the last open descriptor.
        self._memory = workers.allocate(self._layout, self.num_envs)
        weakref.finalize(self, os.close, self._memory)
        self._arrays = workers.map_arrays(self._layout, self.num_envs, self._memory)
        self.info = self._arrays.info_tree
        return spaces

    def _handles(self, env_ids: Iterable[int]) -> list[WorkerHandle]:
        """Returns the workers of these environments without duplicates."""
        return list(dict.fromkeys(self._handle_of[x] for x in env_ids))

    def _write_action(self, index: Any, action: ArrayTree) -> None:
        values = self._layout.action.flatten(action)
        assign(self._arrays.action, index, values, "action")

    def _raise(self, env_ids: Iterable[int]) -> None:
        broken = self._pool.broken
        causes = {x: broken[x] for x in env_ids if x in broken}
        if causes:
            raise EnvFault(causes) from next(iter(causes.values()))


def _pack(make_fns: Sequence[Callable[[], Any]]) -> list[bytes]:
    """Pickles functions, with cloudpickle if it is installed."""
    try:
        from cloudpickle import dumps
    except ImportError:  # gymnasium installs cloudpickle
        from pickle import dumps
    try:
        return [dumps(fn) for fn in make_fns]
    except Exception as error:
        raise ValueError(
            f"`make_fns` must be picklable, got {make_fns}: {error}. Pass a "
            "`functools.partial` of a module-level function, or run `pip install "
            "cloudpickle` to use lambdas."
        ) from error


def _num_cores() -> int:
    """Returns the number of CPU cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
