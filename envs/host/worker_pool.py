"""Starts worker processes, asks them, gathers their answers, and ends lost ones."""

import collections
import contextlib
import dataclasses
import functools
import os
import pickle
import selectors
import sys
import time
from collections.abc import Callable, Collection, Iterable
from multiprocessing import forkserver
from typing import Any, Self

from rollout.envs.host import exceptions, request_checks

_GRACE = 2.0  # seconds to close environments in, before a process is killed


@dataclasses.dataclass(eq=False, kw_only=True)
class WorkerHandle:
    """One worker process, as the main process sees it.

    Attributes:
        number: of the worker, from 0.
        ids: numbers of its environments.
        process: None if it is lost, or was not started yet.
        pipe: None if it is lost, or was not started yet.
        owed: how many answers it owes; only the last one is kept.
        answer: its last answer.
        in_flight: numbers of its environments that were sent and have not answered.
        since: when its time for the next answer began; None if it may take any time.
        is_torn: True while it is not ready, or a message was begun and not finished.
    """

    number: int
    ids: range
    process: Any = None
    pipe: Any = None
    owed: int = 0
    answer: Any = None
    in_flight: set[int] = dataclasses.field(default_factory=set)
    since: float | None = None
    is_torn: bool = False

    def __str__(self) -> str:
        first, last = self.ids[0], self.ids[-1]
        which = f"environment {first}"
        if last > first:
            which = f"environments {first} to {last}"
        return f"worker {self.number} ({which})"

    @property
    def busy(self) -> bool:
        """Whether it owes an answer."""
        return self.owed > 0 or bool(self.in_flight)


class WorkerPool:
    """All worker processes.

    Every request stands in a `with` block of the pool. If an interrupt cuts a request
    short, nobody knows which workers were asked and which have answered; the next
    request first waits until no worker owes an answer.

    Attributes:
        handles: one for each worker.
        answered: numbers of environments that were sent and have answered, in the order
            of their answers, each with its fault or None.
        broken: the cause of each faulty environment, by its number.
    """

    def __init__(self, groups: Iterable[range], timeout: float | None) -> None:
        self.handles = [WorkerHandle(number=i, ids=ids) for i, ids in enumerate(groups)]
        self.answered: collections.deque[tuple[int, BaseException | None]] = (
            collections.deque()
        )
        self.broken: dict[int, BaseException] = {}
        self.closed = False
        # True during a request, and after one that an interrupt cut short.
        self._is_torn, self._token = False, 0
        self._owner = os.getpid()
        self._timeout = timeout
        # Pipes are registered once; `connection.wait` would register all in every call.
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        request_checks.closed(self.closed)
        if self._is_torn:
            self._drain()
        self._is_torn = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An interrupt is no `Exception`; it comes from outside, at any line.
        self._is_torn = kind is not None and not issubclass(kind, Exception)

    def start(
        self, handle: WorkerHandle, context: Any, target: Callable, args: tuple
    ) -> None:
        """Starts a process; it owes an answer, and may take any time for it.

        The caller resets `is_torn` once the process is ready.
        """
        handle.is_torn = True
        handle.pipe, theirs = context.Pipe()
        handle.process = context.Process(
            target=target, args=(theirs, *args), daemon=True
        )
        try:
            handle.process.start()
        finally:
            theirs.close()
        handle.owed, handle.answer, handle.since = 1, None, None
        self._selector.register(handle.pipe, selectors.EVENT_READ, handle)

    def ask(self, handle: WorkerHandle, command: str, argument: Any = None) -> None:
        """Sends a command; the process owes an answer, except to `send`."""
        if not handle.busy:  # else its time runs since the request or answer before
            handle.since = time.monotonic()
        # It owes the answer before it is asked, and is torn until all bytes are sent:
        # an interrupt at any line leaves too much noted down, which `_drain` clears.
        if command == "send":
            handle.in_flight.update(handle.ids[at] for at in argument)
        else:
            handle.owed += 1
        message, was_torn = pickle.dumps((command, argument)), handle.is_torn
        handle.is_torn = True
        try:
            handle.pipe.send_bytes(message)
        except OSError:
            self.lose(handle)
        else:
            handle.is_torn = was_torn

    def gather(self, handles: Iterable[WorkerHandle]) -> list[tuple[WorkerHandle, Any]]:
        """Waits until none of them owes an answer; returns those that are not lost."""
        handles = list(handles)
        while any(handle.owed for handle in handles):
            self.pump()
        return [(x, x.answer) for x in handles if x.pipe is not None]

    def pump(self, timeout: float | None = None) -> None:
        """Waits for messages, at most `timeout` seconds; reads one of each worker."""
        for key, _ in self._selector.select(self._patience(timeout)):
            self._read(key.data)
        if self._timeout is None:
            return
        now = time.monotonic()
        for handle in self.handles:
            since = handle.since if handle.busy else None
            if since is not None and now - since >= self._timeout:
                text = f"{handle} did not answer within {self._timeout} s"
                self.lose(handle, TimeoutError(text))

    def lose(self, handle: WorkerHandle, cause: BaseException | None = None) -> None:
        """Ends a process; its environments are faulty, and answer so if in flight."""
        handle.is_torn = True
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(handle.pipe)
        if cause is None:
            handle.process.join(_GRACE)  # its pipe may be closed a moment before
            text = f"{handle} ended with exit code {handle.process.exitcode}"
            if handle.since is None:
                text += (
                    " before it was ready: see its output; a script must call "
                    '`workers` under `if __name__ == "__main__":`'
                )
            cause = RuntimeError(text)
        for at in handle.ids:
            self.broken[at] = cause
        # Nobody else will answer for these, and `receive` waits for them.
        self.answered.extend((at, cause) for at in sorted(handle.in_flight))
        handle.in_flight.clear()
        handle.owed = 0
        _end(handle)

    def close(self) -> None:
        """Ends every process; a second call does nothing."""
        if os.getpid() != self._owner:  # a fork has a copy of this
            return
        self.closed = True
        alive = [handle for handle in self.handles if handle.pipe is not None]
        for handle in alive:
            with contextlib.suppress(OSError):
                handle.pipe.send_bytes(pickle.dumps(("close", None)))
        end = time.monotonic() + _GRACE
        for handle in alive:
            with contextlib.suppress(AssertionError, AttributeError, ValueError):
                handle.process.join(max(0.0, end - time.monotonic()))
            _end(handle)
        self._selector.close()

    def drop(self, numbers: Collection[int]) -> None:
        """Drops the answers of these environments, which have stepped by now."""
        kept = [item for item in self.answered if item[0] not in numbers]
        self.answered = collections.deque(kept)

    def _drain(self) -> None:
        """Waits until no worker owes an answer to any earlier request."""
        self._token += 1
        for handle in self.handles:
            if handle.pipe is not None and handle.is_torn:
                self.lose(handle, RuntimeError(f"{handle} was interrupted"))
            elif handle.pipe is not None:
                # A worker answers in order, so this token is its last message.
                self.ask(handle, "echo", self._token)
        for handle in self.handles:
            while handle.pipe is not None and handle.answer != self._token:
                self.pump()
            # All is read: more is noted down only if a request was never sent.
            handle.owed = 0
            handle.in_flight.clear()

    def _read(self, handle: WorkerHandle) -> None:
        # Torn while a part of a message may have been read; see `ask`.
        was_torn, handle.is_torn = handle.is_torn, True
        try:
            at, message = pickle.loads(handle.pipe.recv_bytes())
        except (EOFError, OSError):
            return self.lose(handle)
        handle.is_torn = was_torn
        handle.since = time.monotonic()
        if at is None:  # the answer to a command; else that of one sent environment
            handle.owed, handle.answer = handle.owed - 1, message
            return
        number, cause = handle.ids[at], message and exceptions.from_bytes(message)
        if cause is not None:
            self.broken[number] = cause
        handle.in_flight.discard(number)
        self.answered.append((number, cause))

    def _patience(self, timeout: float | None) -> float | None:
        """Returns the seconds until `timeout` or the first timeout of a worker."""
        if self._timeout is None:
            return timeout
        now = time.monotonic()
        waits = [
            handle.since + self._timeout - now
            for handle in self.handles
            if handle.busy and handle.since is not None
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
    # An interrupt may have left it half started, or half ended.
    with contextlib.suppress(AttributeError, ValueError):
        handle.process.kill()
        handle.process.join()
        handle.process.close()
    handle.pipe.close()
    handle.process = handle.pipe = None
