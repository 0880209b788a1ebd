"""Starts worker processes, sends requests, reads replies, and ends lost workers."""

import collections
import contextlib
import dataclasses
import functools
import os
import pickle
import selectors
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from multiprocessing import forkserver
from typing import Any, Self

from rollout.envs.host import exceptions, request_checks, worker_process

_GRACE = 2.0  # seconds to close environments in, before a process is killed


@dataclasses.dataclass(eq=False, kw_only=True)
class WorkerHandle:
    """One worker process, as the main process sees it.

    Attributes:
        number: of the worker, from 0.
        ids: numbers of its environments.
        process: None if it is lost, or was not started yet.
        pipe: None if it is lost, or was not started yet.
        owed: the replies that it owes, in their order: None for that to a request, and
            the number of an environment for one to `advance`.
        reply: its last reply to a request, `(result, error)`; None before the first.
        since: when its time for the next reply began.
        is_ready: False while it makes environments, and may take any time.
    """

    number: int
    ids: range
    process: Any = None
    pipe: Any = None
    owed: collections.deque[int | None] = dataclasses.field(
        default_factory=collections.deque
    )
    reply: Any = None
    since: float = 0.0
    is_ready: bool = False

    def __str__(self) -> str:
        first, last = self.ids[0], self.ids[-1]
        which = f"environment {first}"
        if last > first:
            which = f"environments {first} to {last}"
        return f"worker {self.number} ({which})"

    @property
    def rows(self) -> slice:
        """Its environments, as a slice of all."""
        return slice(self.ids.start, self.ids.stop)


class WorkerPool:
    """All worker processes.

    Every request stands in a `with` block of the pool. Where an interrupt cuts one
    short, nobody knows which bytes were sent and read, so all workers are ended.

    Attributes:
        handles: one for each worker.
        in_flight: environments that were sent and not received.
        answered: those of them that have answered, in the order of their answers.
        broken: the cause of each faulty environment, by its number.
    """

    def __init__(self, groups: Iterable[range], timeout: float | None) -> None:
        self.handles = [WorkerHandle(number=i, ids=ids) for i, ids in enumerate(groups)]
        self.in_flight: set[int] = set()
        self.answered: collections.deque[int] = collections.deque()
        self.broken: dict[int, BaseException] = {}
        self._is_closed, self._is_torn = False, False
        self._owner, self._timeout = os.getpid(), timeout
        # Pipes are registered once; `connection.wait` would register all in every call.
        self._selector = selectors.DefaultSelector()

    @property
    def alive(self) -> list[WorkerHandle]:
        """The workers that are not lost."""
        return [handle for handle in self.handles if handle.pipe is not None]

    def __enter__(self) -> Self:
        request_checks.closed(self._is_closed)
        if self._is_torn:
            self._give_up()
        self._is_torn = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An interrupt is no `Exception`.
        if kind is not None and not issubclass(kind, Exception):
            self._give_up()
        self._is_torn = False

    def start(self, handle: WorkerHandle, context: Any) -> None:
        """Starts a process, which is not ready yet."""
        handle.reply = None
        handle.pipe, theirs = context.Pipe()
        args = theirs, context.get_start_method()
        handle.process = context.Process(
            target=worker_process.serve, args=args, daemon=True
        )
        try:
            handle.process.start()
        finally:
            theirs.close()
        self._selector.register(handle.pipe, selectors.EVENT_READ, handle)

    def ask(self, handle: WorkerHandle, method: str, *args: Any) -> None:
        """Sends a request, unless the worker is lost."""
        if handle.pipe is None:
            return
        if not handle.owed:  # else its time runs since the request or reply before
            handle.since = time.monotonic()
        if method == "advance":
            handle.owed.extend(handle.ids[at] for at in args)
        else:
            handle.owed.append(None)
        try:
            handle.pipe.send_bytes(pickle.dumps((method, args)))
        except OSError:
            self.lose(handle)

    def gather(
        self, handles: Collection[WorkerHandle]
    ) -> list[tuple[WorkerHandle, Any, BaseException | None]]:
        """Waits for the replies to a request.

        Returns:
            Each worker that is not lost, with its result and the error that it raised.
        """
        while any(handle.owed for handle in handles):
            self.pump()
        return [
            (handle, result, error and exceptions.from_bytes(error))
            for handle in handles
            if handle.pipe is not None
            for result, error in [handle.reply]
        ]

    def results(
        self, handles: Collection[WorkerHandle]
    ) -> list[tuple[WorkerHandle, Any]]:
        """Waits for the replies to a request, and raises the first error."""
        found = self.gather(handles)
        for _, _, error in found:
            if error is not None:
                raise error
        return [(handle, result) for handle, result, _ in found]

    def settle(self, handles: Collection[WorkerHandle]) -> None:
        """Waits for the replies to a request, and notes the faults in them."""
        for _, causes in self.results(handles):
            self.note(causes)

    def note(self, causes: Mapping[int, bytes]) -> None:
        """Notes which environments have become faulty."""
        for at, packed in causes.items():
            self.broken[at] = exceptions.from_bytes(packed)

    def pump(self, timeout: float | None = None) -> None:
        """Waits for replies, at most `timeout` seconds; reads one of each worker."""
        for key, _ in self._selector.select(self._patience(timeout)):
            self._read(key.data)
        if self._timeout is None:
            return
        now = time.monotonic()
        for handle in self.handles:
            late = handle.owed and now - handle.since >= self._timeout
            if late and handle.is_ready:
                text = f"{handle} did not answer within {self._timeout} s"
                self.lose(handle, TimeoutError(text))

    def lose(self, handle: WorkerHandle, cause: BaseException | None = None) -> None:
        """Ends a process; its environments are faulty, and answer so if in flight."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(handle.pipe)
        if cause is None:
            handle.process.join(_GRACE)  # its pipe may be closed a moment before
            text = f"{handle} ended with exit code {handle.process.exitcode}"
            if handle.reply is None:
                text += (
                    " before it was ready: see its output; a script must call "
                    '`workers` under `if __name__ == "__main__":`'
                )
            cause = RuntimeError(text)
        self.broken.update(dict.fromkeys(handle.ids, cause))
        # Nobody else will answer for these, and `receive` waits for them.
        self.answered.extend(at for at in handle.owed if at is not None)
        handle.owed.clear()
        handle.is_ready = False
        _end(handle)

    def forget(self, numbers: Collection[int]) -> None:
        """Drops the answers of these environments, which have stepped by now."""
        self.in_flight.difference_update(numbers)
        self.answered = collections.deque(
            at for at in self.answered if at not in numbers
        )

    def close(self) -> None:
        """Ends every process; a second call does nothing."""
        if os.getpid() != self._owner:  # a fork has a copy of this
            return
        self._is_closed, alive = True, self.alive
        for handle in alive:
            with contextlib.suppress(OSError):
                handle.pipe.send_bytes(pickle.dumps(("close", ())))
        end = time.monotonic() + _GRACE
        for handle in alive:
            with contextlib.suppress(AssertionError, AttributeError, ValueError):
                handle.process.join(max(0.0, end - time.monotonic()))
            _end(handle)
        self._selector.close()

    def _give_up(self) -> None:
        """Ends all workers, after an interrupt."""
        for handle in self.alive:
            self.lose(handle, RuntimeError(f"{handle} was interrupted"))
        self.forget(range(self.handles[-1].ids.stop))

    def _read(self, handle: WorkerHandle) -> None:
        try:
            reply = pickle.loads(handle.pipe.recv_bytes())
        except (EOFError, OSError):
            return self.lose(handle)
        handle.since, at = time.monotonic(), handle.owed.popleft()
        if at is None:
            handle.reply = reply
        else:
            self.note(reply[0])
            self.answered.append(at)

    def _patience(self, timeout: float | None) -> float | None:
        """Returns the seconds until `timeout` or the first timeout of a worker."""
        if self._timeout is None:
            return timeout
        now = time.monotonic()
        waits = [
            max(0.0, handle.since + self._timeout - now)
            for handle in self.handles
            if handle.owed and handle.is_ready
        ]
        return min(waits + ([] if timeout is None else [timeout]), default=None)


@functools.cache
def preload(context: Any) -> None:
    """Makes the fork server import modules of every worker, unless it already runs.

    It does not import the modules of the functions, which may start threads or jax's
    backend.
    """
    known = getattr(forkserver, "_forkserver", None)
    modules = list(getattr(known, "_preload_modules", None) or ["__main__"])
    modules += ["rollout.envs.host.worker_process"]
    modules += ["gymnasium"] if "gymnasium" in sys.modules else []
    context.set_forkserver_preload(list(dict.fromkeys(modules)))


def _end(handle: WorkerHandle) -> None:
    # An interrupt may have left it half started.
    with contextlib.suppress(AttributeError, ValueError):
        handle.process.kill()
        handle.process.join()
        handle.process.close()
    handle.pipe.close()
    handle.process = handle.pipe = None
