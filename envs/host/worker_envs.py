"""`make_worker_envs`: environments in processes, safe from crashes and hangs."""

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

from rollout import checks
from rollout.envs.host import request_checks, shared_memory
from rollout.envs.host.arrays import assign, make_layout
from rollout.envs.host.types import AsyncHostVectorEnv, EnvFault, HostStep
from rollout.envs.host.worker_pool import WorkerHandle, WorkerPool
from rollout.envs.types import ArrayTree


def make_worker_envs(
    make_fns: Sequence[Callable[[], Any]],
    num_workers: int | None = None,
    *,
    timeout: float | None = 60.0,
    observe_info: Mapping[str, Any] | None = None,
    record_info: Mapping[str, Any] | None = None,
) -> "WorkerEnvs":
    """Makes environments in worker processes; each process steps several in turn.

    A script must call it under `if __name__ == "__main__":`, like everything that
    starts processes. The processes end with the main one, however that ends.

    Environments should draw random numbers from the generator that `reset(seed=)`
    seeds. For environments that use the global generators of Python or NumPy instead, a
    worker seeds these from its number at the start, and from the seed of its first
    environment whenever all of its environments are reset. So workers differ, and with
    one environment per worker an episode can be repeated by its seed.

    Args:
        make_fns: `B` functions that make one environment each, with the methods and
            spaces of `gymnasium.Env`; picklable. With cloudpickle, which gymnasium
            installs, they may be lambdas, and classes of a notebook.
        num_workers: number of processes; by default one for each core, and at most B.
        timeout: seconds that a worker may take for one answer: a step of all its
            environments, or of one after `send`; a reset of some. After that it is
            killed, and its environments are faulty. None for any time; a start may
            always take any time.
        observe_info: keys of `info` that become part of the observation, each with an
            example, as in `LocalEnvs`.
        record_info: keys of `info` that `HostStep.info` has, each with an example.

    Returns:
        Environments in the order of `make_fns`, the first ones in worker 0.

    Raises:
        EnvFault: if an environment could not be made.
        ValueError: if an option is not as above, a function cannot be pickled, spaces
            differ, or a space has no arrays.
    """
    is_list = isinstance(make_fns, Sequence) and len(make_fns) > 0
    if not is_list or not all(map(callable, make_fns)):
        raise ValueError(
            "`make_fns` must be functions, one for each environment, such as "
            f"`[make_one] * 8`, got {make_fns!r}."
        )
    if num_workers is None:
        num_workers = min(len(make_fns), _num_cores())
    checks.int_between("num_workers", num_workers, most=len(make_fns))
    timeout = checks.seconds("timeout", timeout)
    info = {"observe_info": observe_info, "record_info": record_info}
    return WorkerEnvs(_pack(make_fns), num_workers, timeout, info)


class WorkerEnvs(AsyncHostVectorEnv):
    """Environments in worker processes: the result of `make_worker_envs`.

    It can `rebuild` environments, also those of a lost worker, and `save`. The arrays
    it returns are memory that the workers write to: those of `reset` may change where
    environments are in flight.
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
        # A fork of a process that runs jax can block for ever.
        context: Any = multiprocessing.get_context("forkserver")
        # The fork server imports for all workers, unless it already runs. It leaves out
        # the modules of the functions, which may start threads or jax's backend.
        preload = ["__main__", "gymnasium", "rollout.envs.host.worker_process"]
        context.set_forkserver_preload([x for x in preload if x in sys.modules])
        # Each worker has a range of environments: a slice of rows of the shared memory.
        cuts = np.linspace(0, self.num_envs, num_workers + 1).astype(int).tolist()
        groups = [range(a, b) for a, b in itertools.pairwise(cuts)]
        self._pool = WorkerPool(groups, timeout, context)
        self._handle_of = [handle for handle in self._pool.handles for _ in handle.ids]
        self._spaces: Any = None  # known once the first worker has made its own
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
        """The ids of the worker processes, in the order of their environments."""
        return [handle.process.pid for handle in self._pool.handles]

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        """Starts an episode in some environments; see `HostVectorEnv`.

        Raises:
            EnvFault: if some failed, or had failed and were not rebuilt.
        """
        which = np.flatnonzero(mask).tolist()
        with self._pool as pool:
            asked = self._handles(at for at in which if at not in pool.broken)
            for handle in asked:  # all are asked before the first answer is awaited
                pool.ask(handle, "restart", seeds[handle.rows], mask[handle.rows])
            pool.results(asked)
            # Only now: until its reply a worker may still have answered a step before.
            pool.drop_answers(which)
            self._raise(which)
            return self._arrays.obs_tree

    def step(self, action: ArrayTree) -> HostStep:
        """Takes one step in every environment, `[B, ...]`, and resets none."""
        with self._pool as pool:
            self._write_action(slice(None), action)
            # All are asked before the first is waited for, so that they work at once.
            for handle in pool.handles:
                pool.ask(handle, "take_step")
            pool.results(pool.handles)
            return self._arrays.answer(pool.broken)

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        """Begins a step in some environments; see `AsyncHostVectorEnv`."""
        with self._pool as pool:
            self._write_action(env_id, action)
            for at in env_id.tolist():
                pool.in_flight.add(at)
                if at in pool.broken:  # it answers at once, with its fault
                    pool.answered.append(at)
                else:
                    handle = self._handle_of[at]
                    pool.ask(handle, "take_step_of", at - handle.ids.start)

    def receive(
        self, num_ready: int, timeout: float | None = None
    ) -> tuple[HostStep, np.ndarray]:
        """Waits for the first environments that answer; see `AsyncHostVectorEnv`.

        Raises:
            TimeoutError: if fewer answer within `timeout`; the next call has them.
            ValueError: if fewer are in flight.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._pool as pool:
            checks.int_between("num_ready", num_ready, most=len(pool.in_flight))
            while len(pool.answered) < num_ready:
                left = None if end is None else max(0.0, end - time.monotonic())
                pool.read_replies(left)  # with 0 left it still reads what has arrived
                if left == 0 and len(pool.answered) < num_ready:
                    raise TimeoutError(
                        f"{len(pool.answered)} of {num_ready} environments answered "
                        f"within {timeout} s."
                    )
            # No worker writes to their rows before the next `send` for them.
            first = [pool.answered.popleft() for _ in range(num_ready)]
            pool.in_flight.difference_update(first)
            ids = np.asarray(first, np.int32)
            return self._arrays.answer(pool.broken, ids), ids

    def rebuild(self, mask: np.ndarray) -> None:
        """Rebuilds some environments, as `LocalEnvs.rebuild` does.

        Drops the steps of these environments that are in flight. A lost worker is
        started again, with all its environments; those that `mask` leaves out stay
        faulty until they are rebuilt, too.
        """
        which = np.flatnonzero(mask).tolist()
        with self._pool as pool:
            handles = self._handles(which)
            for handle in handles:
                pool.ask(handle, "rebuild", mask[handle.rows])
            pool.results(handles)
            for at in which:  # only now: until their replies they were faulty
                pool.broken.pop(at, None)
            for handle in handles:
                pool.add_faults(handle)
            # One environment may have ended a worker before the next was rebuilt.
            self._start([handle for handle in handles if handle.pipe is None])
            pool.drop_answers(which)
            self._raise(which)

    def save(self) -> list[bytes] | None:
        """Saves every environment, None if some are in flight; see `HostVectorEnv`."""
        with self._pool as pool:
            for handle in pool.handles:
                pool.ask(handle, "save")
            # Faults and losses are noticed by replies, and so looked for after them.
            states = pool.results(pool.handles)
            if pool.broken or pool.in_flight or None in states:
                return None
            return list(itertools.chain.from_iterable(states))

    def load(self, saved: Sequence[bytes], obs: ArrayTree) -> None:
        """Puts every environment where it was at `save`; see `HostVectorEnv`.

        Raises:
            EnvFault: if a worker ends meanwhile.
            ValueError: if some have no `load_state`.
        """
        with self._pool as pool:
            pool.read_replies(0.0)  # notices workers that have ended
            self._start([handle for handle in pool.handles if handle.pipe is None])
            # Whatever was wrong before, the workers load into all of them, and say what
            # is wrong then.
            pool.broken.clear()
            pool.drop_answers(range(self.num_envs))
            for handle in pool.handles:
                rows = self._layout.obs.map(lambda x, at=handle.rows: x[at], obs)
                pool.ask(handle, "load", saved[handle.rows], rows)
            pool.results(pool.handles)
            self._raise(range(self.num_envs))

    def close(self) -> None:
        """Ends the processes; a second call does nothing."""
        self._pool.close()

    def _start(self, handles: Collection[WorkerHandle]) -> None:
        """Starts workers with all their environments."""
        pool, ready = self._pool, []
        for handle in handles:
            make_fns = self._make_fns[handle.rows]
            pool.start(handle)
            pool.ask(handle, "make", make_fns, self._info, handle.ids)
        for handle, spaces, error in pool.gather(handles):
            if error is None:
                ready.append(handle)
                # The first answer fixes the spaces, and so the size of the memory.
                self._spaces = self._spaces or self._share_memory(spaces)
                request_checks.same_spaces(self._spaces, spaces, handle.ids.start)
                continue
            pool.give_up(handle, error)
            if isinstance(error, ValueError):  # spaces differ, or have no arrays
                raise error
            pool.broken.update(getattr(error, "causes", {}))
        for handle in ready:
            # The worker reads the descriptor from the pipe right after this message.
            pool.ask(handle, "share", self.num_envs)
            if handle.pipe is not None:
                with contextlib.suppress(OSError):  # `results` finds that it is lost
                    reduction.send_handle(handle.pipe, self._memory, handle.process.pid)
        pool.results(ready)

    def _share_memory(self, spaces: tuple[Any, Any]) -> tuple[Any, Any]:
        """Makes the arrays, once the spaces are known; returns these."""
        self._layout = make_layout(spaces, **self._info)
        self.observation_space = self._layout.obs.space
        self.action_space = self._layout.action.space
        # A descriptor and no name: it is gone with the last process that has it.
        self._memory = shared_memory.new(self._layout, self.num_envs)
        weakref.finalize(self, os.close, self._memory)
        self._arrays = shared_memory.arrays(self._layout, self.num_envs, self._memory)
        self.info = self._arrays.info_tree
        return spaces

    def _handles(self, which: Iterable[int]) -> list[WorkerHandle]:
        """Returns the workers of these environments, each once."""
        return list(dict.fromkeys(self._handle_of[at] for at in which))

    def _write_action(self, index: Any, action: ArrayTree) -> None:
        values = self._layout.action.flatten(action)
        assign(self._arrays.action, index, values, "action")

    def _raise(self, which: Iterable[int]) -> None:
        broken = self._pool.broken
        causes = {at: broken[at] for at in which if at in broken}
        if causes:
            raise EnvFault(causes) from next(iter(causes.values()))


def _pack(make_fns: Sequence[Callable[[], Any]]) -> list[bytes]:
    """Pickles functions; with cloudpickle, also lambdas and classes of a notebook."""
    try:
        from cloudpickle import dumps
    except ImportError:  # gymnasium installs it
        from pickle import dumps
    try:
        return [dumps(fn) for fn in make_fns]
    except Exception as error:
        raise ValueError(
            "`make_fns` must be picklable; `functools.partial` of a function at "
            "module level takes options, and `pip install cloudpickle` allows "
            f"lambdas. Got {make_fns}: {error}."
        ) from error


def _num_cores() -> int:
    """Returns how many cores `taskset` or a container leaves to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
