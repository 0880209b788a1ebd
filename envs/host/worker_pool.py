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
class Link:
    """One worker process, as the main process sees it.

    Attributes:
        number: of the worker, from 0.
        ids: numbers of its environments.
        process: None if it is lost, or was not started yet.
        pipe: None if it is lost, or was not started yet.
        owed: how many answers it owes; only the last one is kept.
        answer: its last answer.
        under_way: numbers of its environments that were sent and have not answered.
        since: when its time for the next answer began; None if it may take any time.
        is_torn: True while it is not ready, or a message was begun and not finished.
    """

    number: int
    ids: range
    process: Any = None
    pipe: Any = None
    owed: int = 0
    answer: Any = None
    under_way: set[int] = dataclasses.field(default_factory=set)
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
        return self.owed > 0 or bool(self.under_way)


class Crew:
    """All worker processes.

    Every request stands in a `with` block of the crew. If an interrupt cuts a request
    short, nobody knows which workers were asked and which have answered; the next
    request first waits until no worker owes an answer.

    Attributes:
        links: one for each worker.
        answered: numbers of environments that were sent and have answered, in the order
            of their answers, each with its fault or None.
        broken: the cause of each faulty environment, by its number.
    """

    def __init__(self, groups: Iterable[range], timeout: float | None) -> None:
        self.links = [Link(number=i, ids=ids) for i, ids in enumerate(groups)]
        self.answered: collections.deque[tuple[int, BaseException | None]] = (
            collections.deque()
        )
        self.broken: dict[int, BaseException] = {}
        self.closed = False
        self._is_torn, self._token = False, 0
        self._owner = os.getpid()
        self._timeout = timeout
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

    def start(self, link: Link, context: Any, target: Callable, args: tuple) -> None:
        """Starts a process; it owes an answer, and may take any time for it.

        The caller resets `is_torn` once the process is ready.
        """
        link.is_torn = True
        link.pipe, theirs = context.Pipe()
        link.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        try:
            link.process.start()
        finally:
            theirs.close()
        link.owed, link.answer, link.since = 1, None, None
        self._selector.register(link.pipe, selectors.EVENT_READ, link)

    def ask(self, link: Link, command: str, argument: Any = None) -> None:
        """Sends a command; the process owes an answer, except to `send`."""
        if not link.busy:
            link.since = time.monotonic()
        if command == "send":
            link.under_way.update(link.ids[at] for at in argument)
        else:
            link.owed += 1
        message, was_torn = pickle.dumps((command, argument)), link.is_torn
        link.is_torn = True
        try:
            link.pipe.send_bytes(message)
        except OSError:
            self.lose(link)
        else:
            link.is_torn = was_torn

    def gather(self, links: Iterable[Link]) -> list[tuple[Link, Any]]:
        """Waits until none of them owes an answer; returns those that are not lost."""
        links = list(links)
        while any(link.owed for link in links):
            self.pump()
        return [(link, link.answer) for link in links if link.pipe is not None]

    def pump(self, timeout: float | None = None) -> None:
        """Waits for messages, at most `timeout` seconds, and reads all that arrived."""
        for key, _ in self._selector.select(self._patience(timeout)):
            self._read(key.data)
        if self._timeout is None:
            return
        now = time.monotonic()
        for link in self.links:
            since = link.since if link.busy else None
            if since is not None and now - since >= self._timeout:
                text = f"{link} did not answer within {self._timeout} s"
                self.lose(link, TimeoutError(text))

    def lose(self, link: Link, cause: BaseException | None = None) -> None:
        """Ends a process; its environments are faulty, those under way answer so."""
        link.is_torn = True
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.pipe)
        if cause is None:
            link.process.join(_GRACE)  # its pipe may be closed a moment before
            text = f"{link} ended with exit code {link.process.exitcode}"
            if link.since is None:
                text += (
                    " before it was ready: see its output; a script must call "
                    '`workers` under `if __name__ == "__main__":`'
                )
            cause = RuntimeError(text)
        for at in link.ids:
            self.broken[at] = cause
        self.answered.extend((at, cause) for at in sorted(link.under_way))
        link.under_way.clear()
        link.owed = 0
        _end(link)

    def close(self) -> None:
        """Ends every process; a second call does nothing."""
        if os.getpid() != self._owner:  # a fork has a copy of this
            return
        self.closed = True
        alive = [link for link in self.links if link.pipe is not None]
        for link in alive:
            with contextlib.suppress(OSError):
                link.pipe.send_bytes(pickle.dumps(("close", None)))
        end = time.monotonic() + _GRACE
        for link in alive:
            with contextlib.suppress(AssertionError, AttributeError, ValueError):
                link.process.join(max(0.0, end - time.monotonic()))
            _end(link)
        self._selector.close()

    def drop(self, numbers: Collection[int]) -> None:
        """Drops the answers of these environments, which have stepped by now."""
        kept = [item for item in self.answered if item[0] not in numbers]
        self.answered = collections.deque(kept)

    def _drain(self) -> None:
        """Waits until no worker owes an answer to any earlier request."""
        self._token += 1
        for link in self.links:
            if link.pipe is not None and link.is_torn:
                self.lose(link, RuntimeError(f"{link} was interrupted"))
            elif link.pipe is not None:
                self.ask(link, "echo", self._token)  # answered last
        for link in self.links:
            while link.pipe is not None and link.answer != self._token:
                self.pump()
            link.owed = 0
            link.under_way.clear()

    def _read(self, link: Link) -> None:
        was_torn, link.is_torn = link.is_torn, True
        try:
            at, message = pickle.loads(link.pipe.recv_bytes())
        except (EOFError, OSError):
            return self.lose(link)
        link.is_torn = was_torn
        link.since = time.monotonic()
        if at is None:
            link.owed, link.answer = link.owed - 1, message
            return
        number, cause = link.ids[at], message and exceptions.unpack(message)
        if cause is not None:
            self.broken[number] = cause
        link.under_way.discard(number)
        self.answered.append((number, cause))

    def _patience(self, timeout: float | None) -> float | None:
        """Returns the seconds until `timeout` or the first timeout of a worker."""
        if self._timeout is None:
            return timeout
        now = time.monotonic()
        waits = [
            link.since + self._timeout - now
            for link in self.links
            if link.busy and link.since is not None
        ]
        return min(waits + ([] if timeout is None else [timeout]), default=None)


@functools.cache
def preload(context: Any) -> None:
    """Makes the fork server import what every worker needs, unless it already runs.

    It does not import the modules of the functions, which may start threads or jax's
    backend.
    """
    known = getattr(forkserver, "_forkserver", None)
    modules = list(getattr(known, "_preload_modules", None) or ["__main__"])
    modules += ["rollout.envs.host.worker_process"]
    modules += ["gymnasium"] if "gymnasium" in sys.modules else []
    context.set_forkserver_preload(list(dict.fromkeys(modules)))


def _end(link: Link) -> None:
    # An interrupt may have left it half started, or half ended.
    with contextlib.suppress(AttributeError, ValueError):
        link.process.kill()
        link.process.join()
        link.process.close()
    link.pipe.close()
    link.process = link.pipe = None
