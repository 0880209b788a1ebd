"""`workers`: environments in other processes, safe from crashes and hangs of others."""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import reduction
from typing import Any

import numpy as np

from rollout import checks
from rollout.envs.host import (
    exceptions,
    request_checks,
    saved_state,
    shared_memory,
    worker_process,
)
from rollout.envs.host.arrays import answer, answer_all, assign, make_layout, pick
from rollout.envs.host.types import EnvFault, HostStep
from rollout.envs.host.worker_pool import WorkerHandle, WorkerPool, preload
from rollout.envs.types import AnySpace, ArrayTree

_START_METHODS = ("forkserver", "spawn")


def workers(
    make_fns: Sequence[Callable[[], Any]],
    num_workers: int | None = None,
    *,
    start_method: str = "forkserver",
    timeout: float | None = None,
    observe_info: Mapping[str, Any] | None = None,
    record_info: Mapping[str, Any] | None = None,
) -> "WorkerEnvs":
    """Makes environments in worker processes; each process steps several in turn.

    A script must call it under `if __name__ == "__main__":`, like everything that
    starts processes. The processes end with the main one, however that ends. Their
    environments cannot start processes by `multiprocessing`.

    Args:
        make_fns: `B` functions that make one environment each, with the methods and
            spaces of `gymnasium.Env`; picklable. With cloudpickle, which gymnasium
            installs, they may be lambdas, and classes of a notebook.
        num_workers: number of processes; by default that of the CPUs, and at most B.
        start_method: "forkserver", or "spawn", which is slower. A fork of a process
            that runs jax can block for ever.
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
    make_fns = _list(make_fns)
    if num_workers is None:
        num_workers = min(len(make_fns), os.cpu_count() or 1)
    if checks.int_between("num_workers", num_workers) > len(make_fns):
        raise ValueError(
            f"`num_workers` must be at most the number of environments, "
            f"{len(make_fns)}, got {num_workers}."
        )
    if start_method not in _START_METHODS:
        raise ValueError(
            f'`start_method` must be "forkserver" or "spawn", got {start_method!r}.'
        )
    timeout = checks.seconds("timeout", timeout)
    _check_picklable(make_fns)
    info = {"observe_info": observe_info, "record_info": record_info}
    return WorkerEnvs(make_fns, num_workers, start_method, timeout, info)


def _list(make_fns: Any) -> list[Callable[[], Any]]:
    """Returns the functions as a list; raises unless they are functions."""
    is_series = hasattr(make_fns, "__iter__") and not isinstance(make_fns, str)
    listed: list[Any] = list(make_fns) if is_series else [None]
    if not all(map(callable, listed)):
        got = make_fns if isinstance(make_fns, str) else type(make_fns).__name__
        raise ValueError(
            "`make_fns` must be functions, one for each environment, such as "
            f"`[make_one] * 8`, got {got!r}."
        )
    if not listed:
        raise ValueError("`make_fns` must have at least one function, got none.")
    return listed


class WorkerEnvs:
    """Environments in worker processes, an `AsyncHostVectorEnv`; see `workers`.

    It can `rebuild` environments, also those of a lost worker, and `save`. The arrays
    it returns are memory that the workers write to: those of `reset` may change where
    environments are in flight.
    """

    def __init__(
        self,
        make_fns: list[Callable[[], Any]],
        num_workers: int,
        start_method: str,
        timeout: float | None,
        info: Mapping[str, Any],
    ) -> None:
        self.num_envs = len(make_fns)
        self._make_fns, self._info = make_fns, info
        self._context = multiprocessing.get_context(start_method)
        # Each worker has a range of environments: a slice of rows of the shared memory.
        cuts = np.linspace(0, self.num_envs, num_workers + 1).astype(int).tolist()
        groups = [range(a, b) for a, b in itertools.pairwise(cuts)]
        self._pool = WorkerPool(groups, timeout)
        self._handle_of = [handle for handle in self._pool.handles for _ in handle.ids]
        # Sent and not received; an answer that waits in `answered` counts, too.
        self._in_flight: set[int] = set()
        weakref.finalize(self, self._pool.close)
        try:
            with self._pool:
                self._begin()
        except BaseException:
            self.close()
            raise

    @property
    def observation_space(self) -> AnySpace:
        """Space of one environment's observation."""
        return self._layout.observation_space

    @property
    def action_space(self) -> AnySpace:
        """Space of one environment's action."""
        return self._layout.action_space

    @property
    def pids(self) -> list[int]:
        """The ids of the worker processes, in the order of their environments."""
        return [handle.process.pid for handle in self._pool.handles]

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        """Starts an episode in some environments, each from its own seed.

        Drops the steps of these environments that are in flight.

        Args:
            seeds: `[B]` uint32; read where `mask`.
            mask: `[B]` bool, which to reset; at least one.

        Returns:
            `[B, ...]` observations, the memory that the workers write to.

        Raises:
            EnvFault: if some failed, or had failed and were not rebuilt.
        """
        which = request_checks.reset(seeds, mask, self.num_envs)
        seeds, mask = np.asarray(seeds), np.asarray(mask)
        with self._pool as pool:
            asked = self._alive(which)
            for handle in asked:  # all are asked before the first answer is awaited
                mine = slice(handle.ids.start, handle.ids.stop)
                pool.ask(handle, "reset", (seeds[mine], mask[mine]))
            self._gather(asked)
            self._forget(which)
            self._raise(which)
            return self._arrays.obs

    def step(self, action: ArrayTree) -> HostStep:
        """Takes one step in every environment, `[B, ...]`, and resets none."""
        request_checks.all_idle("step", self._in_flight)
        with self._pool as pool:
            alive = self._alive(range(self.num_envs))
            assign(self._arrays.action, slice(None), action, "action")
            for handle in alive:
                pool.ask(handle, "step")
            self._gather(alive)
            return answer_all(self._arrays, pool.broken)

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        """Begins a step in some environments.

        Args:
            action: `[K, ...]`, one action for each of `K` of the `B` environments.
            env_id: `[K]` int, their numbers; none of them may be in flight.
        """
        ids = request_checks.env_ids(env_id, self.num_envs)
        request_checks.idle(ids, self._in_flight)
        with self._pool as pool:
            assign(self._arrays.action, np.asarray(ids, np.intp), action, "action")
            groups: dict[WorkerHandle, list[int]] = {}
            self._in_flight.update(ids)
            for at in ids:
                if at in pool.broken:  # it answers at once, with its fault
                    pool.answered.append((at, pool.broken[at]))
                else:
                    handle = self._handle_of[at]
                    groups.setdefault(handle, []).append(at - handle.ids.start)
            for handle, numbers in groups.items():
                pool.ask(handle, "send", numbers)

    def receive(
        self, num_ready: int, timeout: float | None = None
    ) -> tuple[HostStep, np.ndarray]:
        """Waits for the first `num_ready` environments that answer.

        Args:
            num_ready: at least 1 and at most the number in flight.
            timeout: seconds to wait, None for any time.

        Returns:
            Their answers, `[num_ready, ...]`, in the order of answering; and their
            numbers, `[num_ready]` int32.

        Raises:
            TimeoutError: if fewer answer within `timeout`. Nothing is lost: the next
                call returns them.
            ValueError: if fewer are in flight.
        """
        request_checks.num_ready(num_ready, len(self._in_flight))
        end = None if timeout is None else time.monotonic() + timeout
        with self._pool as pool:
            while len(pool.answered) < num_ready:
                left = None if end is None else max(0.0, end - time.monotonic())
                pool.pump(left)  # with 0 left it still reads what has arrived
                if left == 0 and len(pool.answered) < num_ready:
                    raise TimeoutError(
                        f"{len(pool.answered)} of {num_ready} environments answered "
                        f"within {timeout} s."
                    )
            first = [pool.answered.popleft() for _ in range(num_ready)]
            self._in_flight.difference_update(at for at, _ in first)
            return answer(self._arrays, first)

    def rebuild(self, mask: np.ndarray) -> None:
        """Rebuilds some environments; each must be reset before its next step.

        Drops the steps of these environments that are in flight. If a worker is lost,
        or ends during the request, a new one is started. Its other environments stay
        faulty until they are rebuilt, too.

        Args:
            mask: `[B]` bool, which to rebuild; at least one.

        Raises:
            EnvFault: if some could not be made; they stay faulty.
        """
        which = request_checks.masked(mask, self.num_envs)
        with self._pool as pool:
            handles = list(dict.fromkeys(self._handle_of[at] for at in which))
            for handle in handles:
                if handle.pipe is not None:
                    part = np.asarray(mask)[handle.ids.start : handle.ids.stop]
                    pool.ask(handle, "rebuild", part)
            alive = [handle for handle in handles if handle.pipe is not None]
            self._gather(alive, rebuilt=which)
            # One environment may have ended a worker before the next was rebuilt.
            gone = [handle for handle in handles if handle.pipe is None]
            self._start(gone, rebuilt=which)
            self._forget(which)
            self._raise(which)

    def save(self, *, allow_pickle: bool = False) -> list[bytes] | None:
        """Saves every environment; see `HostVectorEnv`.

        Raises:
            ValueError: if some are in flight.
        """
        request_checks.all_idle("save", self._in_flight)
        with self._pool as pool:
            alive = [handle for handle in pool.handles if handle.pipe is not None]
            for handle in alive:
                pool.ask(handle, "save", allow_pickle)
            saved: list[Any] = [None] * self.num_envs
            for handle, (states, error) in pool.gather(alive):
                if error is not None:
                    raise exceptions.from_bytes(error)
                if states is None:
                    return None
                saved[handle.ids.start : handle.ids.stop] = states
            for at, cause in pool.broken.items():
                # A lost worker saves nothing; one that lives saved its own faults.
                saved[at] = saved[at] or saved_state.save_fault(cause)
            return saved

    def can_load(self, saved: Sequence[bytes], *, allow_pickle: bool = False) -> bool:
        """Returns whether `load` takes these states; see `HostVectorEnv`.

        Raises:
            ValueError: if pickled environments were made with other settings.
        """
        request_checks.length("saved", saved, self.num_envs)
        can_load = True
        with self._pool as pool:
            alive = [handle for handle in pool.handles if handle.pipe is not None]
            for handle in alive:
                mine = slice(handle.ids.start, handle.ids.stop)
                pool.ask(handle, "can_load", (list(saved[mine]), allow_pickle))
            for _, (worker_can_load, error) in pool.gather(alive):
                if error is not None:
                    raise exceptions.from_bytes(error)
                can_load &= worker_can_load
        return can_load

    def load(
        self, saved: Sequence[bytes], obs: ArrayTree, *, allow_pickle: bool = False
    ) -> bool:
        """Puts every environment where it was at `save`; see `HostVectorEnv`.

        Raises:
            ValueError: if some are in flight, or as `can_load` does.
        """
        request_checks.length("saved", saved, self.num_envs)
        request_checks.all_idle("load", self._in_flight)
        every = range(self.num_envs)
        with self._pool as pool:
            self._start(
                [handle for handle in pool.handles if handle.pipe is None],
                rebuilt=every,
            )
            alive = [handle for handle in pool.handles if handle.pipe is not None]
            for handle in alive:
                mine = slice(handle.ids.start, handle.ids.stop)
                argument = list(saved[mine]), pick(obs, mine), allow_pickle
                pool.ask(handle, "load", argument)
            are_loaded = True
            for handle, (is_loaded, error, causes) in pool.gather(alive):
                if error is not None:
                    raise exceptions.from_bytes(error)
                are_loaded &= is_loaded
                self._note(handle, causes, rebuilt=every)
            return are_loaded

    def close(self) -> None:
        """Ends the processes; a second call does nothing."""
        self._pool.close()

    def _begin(self) -> None:
        """Starts every worker, and makes the arrays once their layout is known."""
        if self._context.get_start_method() == "forkserver":
            preload(self._context)
        spaces = self._launch(self._pool.handles, range(self.num_envs))
        self._raise(range(self.num_envs))
        first = spaces[self._pool.handles[0]]
        for handle, other in spaces.items():
            request_checks.same_spaces(first, other, handle.ids.start)
        self._spaces, self._layout = first, make_layout(first, **self._info)
        self._memory = shared_memory.new(self._layout, self.num_envs)
        weakref.finalize(self, os.close, self._memory)
        self._arrays = shared_memory.arrays(self._layout, self.num_envs, self._memory)
        self._share(self._pool.handles)

    def _start(
        self, handles: Collection[WorkerHandle], rebuilt: Collection[int]
    ) -> None:
        """Starts lost workers again; environments in `rebuilt` are no longer faulty."""
        for handle, spaces in self._launch(handles, rebuilt).items():
            request_checks.same_spaces(self._spaces, spaces, handle.ids.start)
            self._share([handle])
            for at in set(handle.ids) & set(rebuilt):
                self._pool.broken.pop(at, None)

    def _launch(
        self, handles: Collection[WorkerHandle], rebuilt: Collection[int]
    ) -> dict[WorkerHandle, tuple[Any, Any]]:
        """Starts workers; returns the spaces of those that made their environments."""
        method = self._context.get_start_method()
        for handle in handles:
            start = handle.ids.start
            make_fns = _dumps(self._make_fns[start : handle.ids.stop])
            # A lost worker comes back with all its environments; those outside of
            # `rebuilt` stay faulty.
            broken = {
                at - start: exceptions.to_bytes(self._pool.broken[at])
                for at in handle.ids
                if at in self._pool.broken and at not in rebuilt
            }
            args = (make_fns, self._info, broken, method)
            self._pool.start(handle, self._context, worker_process.serve, args)
        ready = {}
        for handle, (spaces, causes, is_setup_error) in self._pool.gather(handles):
            if spaces is not None:
                ready[handle] = spaces
                continue
            at, packed = next(iter(causes.items()))
            cause, at = exceptions.from_bytes(packed), handle.ids[at]
            if isinstance(cause, ValueError) and is_setup_error:
                raise ValueError(f"{cause} Counted within {handle}.") from cause
            failed = f"environment {at}: {type(cause).__name__}: {cause}"
            self._pool.lose(handle, RuntimeError(f"{handle} could not make {failed}"))
            self._pool.broken[at] = cause  # its own; `lose` gave all of them the other
        return ready

    def _share(self, handles: Collection[WorkerHandle]) -> None:
        for handle in handles:
            # The worker reads the descriptor from the pipe right after this message.
            self._pool.ask(handle, "share", (handle.ids.start, self.num_envs))
            if handle.pipe is not None:
                with contextlib.suppress(OSError):  # `gather` finds that it is lost
                    reduction.send_handle(handle.pipe, self._memory, handle.process.pid)
        for handle, _ in self._pool.gather(handles):
            handle.is_torn = False  # ready: see `WorkerPool.start`

    def _alive(self, which: Collection[int]) -> list[WorkerHandle]:
        """Returns the workers of the environments that are not faulty, each once."""
        broken = self._pool.broken
        handles = (self._handle_of[at] for at in which if at not in broken)
        return list(dict.fromkeys(handles))

    def _gather(
        self, handles: Collection[WorkerHandle], rebuilt: Collection[int] = ()
    ) -> None:
        """Waits for each worker's new faults; forgets the old ones of `rebuilt`."""
        for handle, causes in self._pool.gather(handles):
            self._note(handle, causes, rebuilt)

    def _note(
        self,
        handle: WorkerHandle,
        causes: Mapping[int, bytes],
        rebuilt: Collection[int],
    ) -> None:
        for at in set(handle.ids) & set(rebuilt):
            self._pool.broken.pop(at, None)
        for at, packed in causes.items():
            self._pool.broken[handle.ids[at]] = exceptions.from_bytes(packed)

    def _forget(self, which: Collection[int]) -> None:
        """Drops the answers of these environments, which have stepped by now."""
        self._pool.drop(which)
        self._in_flight -= set(which)

    def _raise(self, which: Collection[int]) -> None:
        broken = self._pool.broken
        causes = {at: broken[at] for at in which if at in broken}
        if causes:
            raise EnvFault(causes) from next(iter(causes.values()))


def _dumps(make_fns: Any) -> bytes:
    """Pickles functions; with cloudpickle, also lambdas and classes of a notebook."""
    try:
        import cloudpickle
    except ImportError:  # gymnasium installs it
        return pickle.dumps(make_fns)
    return cloudpickle.dumps(make_fns)


def _check_picklable(make_fns: Sequence[Callable[[], Any]]) -> None:
    for at, fn in enumerate(make_fns):
        try:
            _dumps(fn)
        except Exception as error:
            raise ValueError(
                "`make_fns` must be picklable; `functools.partial` of a function at "
                "module level takes options, and `pip install cloudpickle` allows "
                f"lambdas. Got function {at}, {fn!r}: {error}."
            ) from error
