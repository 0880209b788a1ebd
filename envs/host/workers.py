"""Worker processes that step host environments, and the memory that they share.

`serve` is the loop of a worker process. `WorkerPool` starts, stops and replaces
workers. `allocate` and `map_arrays` create the shared arrays that workers write to.
`make_picklable` prepares exceptions for the pipe to the parent process.
"""

import collections
import contextlib
import ctypes
import dataclasses
import math
import mmap
import multiprocessing
import multiprocessing.process
import os
import pickle
import random
import selectors
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from multiprocessing import connection, reduction
from typing import Any, Self

import numpy as np

from rollout.envs.host import env_checks
from rollout.envs.host.arrays import Layout, StepArrays
from rollout.envs.host.local_envs import LocalEnvs
from rollout.envs.host.types import EnvFault

_ALIGN = 64  # bytes, a cache line
_PR_SET_PDEATHSIG = 1  # option of prctl(2)
_GRACE = 2.0  # seconds to close environments before a process is killed
_POLL = 0.5  # seconds between checks for an exit of the main thread
_UNTIMED = ("make", "share")  # no timeout for the creation of environments


def allocate(layout: Layout, num_envs: int) -> int:
    """Creates a file for arrays of `num_envs` environments; returns its descriptor."""
    allocator = _Allocator(None)  # a dry run measures the size
    StepArrays(layout, num_envs, allocator.allocate)
    # Do not use /dev/shm: containers often limit it to 64 MiB.
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rollout")
    else:
        with tempfile.TemporaryFile() as file:  # for example on macOS
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, max(allocator.end, 1))
    return descriptor


def map_arrays(
    layout: Layout, num_envs: int, descriptor: int, rows: slice = slice(None)
) -> StepArrays:
    """Maps `rows` of a file of `allocate`; the mapping lives as long as the arrays."""
    memory = mmap.mmap(descriptor, 0)
    return StepArrays(layout, num_envs, _Allocator(memory, rows).allocate)


class _Allocator:
    """Allocates consecutive arrays in a block of memory."""

    def __init__(self, memory: mmap.mmap | None, rows: slice = slice(None)) -> None:
        self.memory, self.rows, self.end = memory, rows, 0

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        # Align each array to a cache line, so that no two arrays share a cache line.
        start = self.end
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.end += -(-num_bytes // _ALIGN) * _ALIGN
        # All processes allocate in the same order, so they compute the same offsets.
        if self.memory is None:
            return np.empty(0, dtype)
        return np.ndarray(shape, dtype, self.memory, start)[self.rows]


def make_picklable(error: BaseException) -> BaseException:
    """Returns a picklable exception with the traceback as a note.

    If `error` cannot be pickled, the result is a `RuntimeError` with the same message.
    """
    try:
        pickle.loads(pickle.dumps(error))  # some exceptions fail only in `loads`
    except Exception:
        text = f"{type(error).__name__}: {error}"
        error = RuntimeError(text).with_traceback(error.__traceback__)
    if error.__traceback__ is not None:  # without a traceback, the note exists already
        error.add_note("".join(traceback.format_exception(error)))
        error.__traceback__ = None
    return error


def raise_at_exit() -> None:
    """Raises `SystemExit` in a non-main thread once the main thread has ended.

    At exit, the interpreter waits for all threads that are not daemonic.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main and not main.is_alive():
        raise SystemExit


def serve(pipe: connection.Connection) -> None:
    """Handles requests until the request "close" or the end of the main process."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    envs: Any = None  # set by the request "make"
    method = ""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while method != "close":
            method, args = pickle.loads(pipe.recv_bytes())
            result = error = None
            try:
                if method == "make":
                    envs = _Envs(pipe, *args)
                    result = envs.spaces
                else:
                    result = getattr(envs, method)(*args)
            except Exception as exception:
                # Continuing is safe: after a failed method, each environment is either
                # intact or in `causes`.
                error = make_picklable(exception)
            causes = {}
            if envs is not None:
                for index, cause in envs.causes.items():
                    causes[envs.ids[index]] = make_picklable(cause)
            pipe.send_bytes(pickle.dumps((result, error, causes)))


class _Envs(LocalEnvs):
    """The environments of a worker; requests call its methods by name."""

    def __init__(
        self,
        pipe: connection.Connection,
        make_fns: Sequence[bytes],
        info: Mapping[str, Any],
        ids: range,
    ) -> None:
        self._pipe, self.ids = pipe, ids
        # Seed the generators: workers of a fork server inherit equal states.
        _seed_global_generators(random.getrandbits(31) + ids.start)
        super().__init__([pickle.loads(x) for x in make_fns], **info, first=ids.start)

    def share(self, num_envs: int) -> None:
        """Moves the arrays to the shared memory; its descriptor follows the request."""
        # The arrays of this worker are rows of the shared `[B, ...]` arrays.
        descriptor = reduction.recv_handle(self._pipe)
        rows = slice(self.ids.start, self.ids.stop)
        arrays = map_arrays(self.layout, num_envs, descriptor, rows)
        os.close(descriptor)  # the mapping remains valid
        self._actions = arrays.action
        self.place(arrays)

    def take_step(self) -> None:
        """Steps every environment with the actions in the shared memory."""
        self.step(self.layout.action.unflatten(self._actions))

    def take_step_of(self, index: int) -> None:
        """Steps a single environment with its action in the shared memory."""
        # `_split` expects a batch: pass a batch of size one.
        row = [array[index : index + 1] for array in self._actions]
        (action,) = self._split(self.layout.action.unflatten(row))
        self.step_one(index, action)

    def reset_numbered(
        self, seeds: np.ndarray, mask: np.ndarray, numbers: np.ndarray
    ) -> None:
        """Resets some environments and writes observations to the shared memory."""
        if mask.all():
            _seed_global_generators(int(seeds[0]))
        self.at_episodes(numbers)
        self.reset(seeds, mask)


def _seed_global_generators(seed: int) -> None:
    """Seeds the global generators of Python and NumPy."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _end_with_parent() -> None:
    """Ends this process when the main process ends, even during a step."""
    parent: Any = multiprocessing.parent_process()

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    # The thread needs the GIL, which a hanging step may hold: let the kernel end the
    # process.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclasses.dataclass(eq=False, kw_only=True)
class WorkerHandle:
    """State of a worker process in the main process.

    Attributes:
        number: index of the worker, from 0.
        ids: indices of the worker's environments.
        process: worker process; None before the start and after the worker is lost.
        pipe: connection to the worker; None before the start and after it is lost.
        method: method of the last request.
        since: start of the timeout for the next reply, in seconds.
        pending: expected replies in order. An entry is the index of an environment for
            a step of a single environment, and None for any other request.
        reply: `(result, error)` of the last request other than such a step.
        causes: exception of each faulty environment according to the last reply.
    """

    number: int
    ids: range
    process: Any = None
    pipe: Any = None
    method: str = ""
    since: float = 0.0
    pending: collections.deque[int | None] = dataclasses.field(
        default_factory=collections.deque
    )
    reply: tuple[Any, BaseException | None] = (None, None)
    causes: dict[int, BaseException] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"worker {self.number} (environments {self.ids[0]} to {self.ids[-1]})"

    @property
    def rows(self) -> slice:
        """The slice of the worker's environments in `[B, ...]` arrays."""
        return slice(self.ids.start, self.ids.stop)


class WorkerPool:
    """Manages all worker processes.

    Every request must be inside a `with` block of the pool. If an interrupt leaves the
    block, the bytes in the pipes are unknown, so the pool ends all workers.

    Attributes:
        handles: one `WorkerHandle` per worker.
        in_flight: environments whose step was sent but not received.
        ready: environments in flight whose step has finished, in order of completion.
        broken: exception of each faulty environment, by index, until `rebuild`.
    """

    def __init__(
        self, groups: Iterable[range], timeout: float | None, context: Any
    ) -> None:
        self.handles = [WorkerHandle(number=i, ids=ids) for i, ids in enumerate(groups)]
        self.in_flight: set[int] = set()
        self.ready: collections.deque[int] = collections.deque()
        self.broken: dict[int, BaseException] = {}
        self._timeout, self._context, self._owner = timeout, context, os.getpid()
        self._is_closed, self._is_busy = False, False
        # Register each pipe once: `connection.wait` registers all pipes on every call.
        self._selector = selectors.DefaultSelector()

    @property
    def alive(self) -> list[WorkerHandle]:
        """Handles of the workers that run."""
        return [handle for handle in self.handles if handle.pipe is not None]

    def __enter__(self) -> Self:
        env_checks.check_open(self._is_closed)
        # `_is_busy` is still set if an interrupt came just before the previous block
        # or during `__exit__`.
        if self._is_busy:
            self._kill_all()
        self._is_busy = True
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # `KeyboardInterrupt` is not a subclass of `Exception`.
        if error is not None and not issubclass(error, Exception):
            self._kill_all()
        self._is_busy = False

    def start(self, handle: WorkerHandle) -> None:
        """Starts the process of a worker."""
        handle.pipe, child_pipe = self._context.Pipe()
        handle.process = self._context.Process(target=serve, args=(child_pipe,))
        with child_pipe:
            handle.process.start()
        # Remove the worker from this set: at exit multiprocessing joins the processes
        # in the set, also in a fork of this process that does not own them. `close`
        # ends workers, and workers end with the main process. Workers are not daemonic,
        # so that environments may start processes.
        children: Any = vars(multiprocessing.process)["_children"]
        children.discard(handle.process)
        self._selector.register(handle.pipe, selectors.EVENT_READ, handle)

    def request(self, handle: WorkerHandle, method: str, *args: Any) -> None:
        """Sends a request, unless the worker is lost."""
        if handle.pipe is None:
            return
        if not handle.pending:  # otherwise the timeout of another request runs
            handle.since = time.monotonic()
        # Register the request before sending, so that replies match their requests.
        handle.method = method
        handle.pending.append(handle.ids[args[0]] if method == "take_step_of" else None)
        try:
            handle.pipe.send_bytes(pickle.dumps((method, args)))
        except OSError:
            self.kill(handle)

    def gather(
        self, handles: Collection[WorkerHandle]
    ) -> list[tuple[WorkerHandle, Any, BaseException | None]]:
        """Waits for the replies to a request.

        Returns:
            `(handle, result, error)` of each worker that is not lost.
        """
        # Replies arrive in the order of requests: results of earlier steps come first.
        while any(handle.pending for handle in handles):
            self.read_replies()
        return [
            (handle, *handle.reply) for handle in handles if handle.pipe is not None
        ]

    def results(self, handles: Collection[WorkerHandle]) -> list[Any]:
        """Waits for the results of a request and raises the first error."""
        replies = self.gather(handles)
        for _, _, error in replies:
            # Skip `EnvFault`: `broken` records the faults of all workers.
            if error is not None and not isinstance(error, EnvFault):
                raise error
        return [result for _, result, _ in replies]

    def add_faults(self, handle: WorkerHandle) -> None:
        """Records new faults of a worker's environments."""
        self.broken = {**handle.causes, **self.broken}

    def read_replies(self, timeout: float | None = None) -> None:
        """Waits at most `timeout` seconds; reads at most one reply of each worker."""
        # Wake up regularly, to detect that the main thread has ended.
        timeouts = [max(0.0, seconds) for _, seconds in self._time_left()]
        timeouts += [_POLL] if timeout is None else [_POLL, timeout]
        raise_at_exit()
        for key, _ in self._selector.select(min(timeouts)):
            self._read(key.data)
        for handle, seconds in self._time_left():
            if seconds <= 0:
                text = f"{handle} did not answer within {self._timeout} s"
                self.kill(handle, TimeoutError(text))

    def kill(self, handle: WorkerHandle, cause: BaseException | None = None) -> None:
        """Kills a worker process and marks its environments as faulty."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(handle.pipe)
        if cause is None:
            handle.process.join(_GRACE)  # the pipe may close before the process ends
            exit_code = handle.process.exitcode
            cause = RuntimeError(f"{handle} ended with exit code {exit_code}")
        self.broken.update(dict.fromkeys(handle.ids, cause))
        handle.causes = {}
        # Mark these environments as ready: otherwise `receive` would wait forever.
        self.ready.extend(x for x in handle.pending if x is not None)
        handle.pending.clear()
        _end(handle)

    def discard_steps(self, env_ids: Collection[int]) -> None:
        """Discards the results of these environments, whose steps have finished."""
        self.in_flight.difference_update(env_ids)
        self.ready = collections.deque(x for x in self.ready if x not in env_ids)

    def close(self) -> None:
        """Ends every process; a second call does nothing."""
        if os.getpid() != self._owner:  # a fork does not own the workers
            return
        self._is_closed, alive = True, self.alive
        # All workers close their environments in parallel within the same deadline.
        for handle in alive:
            with contextlib.suppress(OSError):
                handle.pipe.send_bytes(pickle.dumps(("close", ())))
        end = time.monotonic() + _GRACE
        for handle in alive:
            _end(handle, max(0.0, end - time.monotonic()))
        self._selector.close()

    def _kill_all(self) -> None:
        """Ends all workers after an interrupt."""
        for handle in self.alive:
            self.kill(handle, RuntimeError(f"{handle} was interrupted"))
        self.discard_steps(range(self.handles[-1].ids.stop))

    def _read(self, handle: WorkerHandle) -> None:
        try:
            result, error, handle.causes = pickle.loads(handle.pipe.recv_bytes())
        except (EOFError, OSError):
            return self.kill(handle)
        except Exception as error:  # such as a class unknown to this process
            return self.kill(handle, error)
        # A worker processes requests one by one: restart the timeout for the next one.
        handle.since, env_id = time.monotonic(), handle.pending.popleft()
        self.add_faults(handle)
        if env_id is None:
            handle.reply = result, error
        else:
            self.ready.append(env_id)

    def _time_left(self) -> list[tuple[WorkerHandle, float]]:
        """Returns the remaining seconds of each request with a timeout."""
        if self._timeout is None:
            return []
        end = self._timeout - time.monotonic()
        timed = (x for x in self.handles if x.pending and x.method not in _UNTIMED)
        return [(handle, handle.since + end) for handle in timed]


def _end(handle: WorkerHandle, timeout: float = 0.0) -> None:
    # Suppress errors: an interrupt may have left the process partly started.
    with contextlib.suppress(AssertionError, AttributeError, ValueError):
        handle.process.join(timeout)
    with contextlib.suppress(AttributeError, ValueError):
        handle.process.kill()
        handle.process.join()
        handle.process.close()
    handle.pipe.close()
    handle.process = handle.pipe = None
