"""Starts worker processes, sends requests, reads replies, and ends lost workers."""

import collections
import contextlib
import dataclasses
import multiprocessing.process
import os
import pickle
import selectors
import time
from collections.abc import Collection, Iterable
from typing import Any, Self

from rollout.envs.host import exceptions, request_checks, worker_process
from rollout.envs.host.types import EnvFault

_GRACE = 2.0  # seconds to close environments in, before a process is killed
_PATIENCE = 0.5  # seconds, after which an exit of the process is noticed
_UNTIMED = ("make", "share")  # to make environments may take any time


@dataclasses.dataclass(eq=False, kw_only=True)
class WorkerHandle:
    """One worker process, as the main process sees it.

    Attributes:
        number: of the worker, from 0.
        ids: numbers of its environments.
        process: None if it is lost, or was not started yet.
        pipe: None if it is lost, or was not started yet.
        asked: the method of its last request.
        since: when its time for the next reply began.
        owed: the replies that it owes, in their order: the number of an environment for
            a step of that one, None for any other.
        reply: `(result, error)`, its last reply that was not to such a step.
        causes: those of its faulty environments, as its last reply has them.
    """

    number: int
    ids: range
    process: Any = None
    pipe: Any = None
    asked: str = ""
    since: float = 0.0
    owed: collections.deque[int | None] = dataclasses.field(
        default_factory=collections.deque
    )
    reply: tuple[Any, BaseException | None] = (None, None)
    causes: dict[int, BaseException] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"worker {self.number} (environments {self.ids[0]} to {self.ids[-1]})"

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
        broken: the cause of each faulty environment, by its number, until `rebuild`.
    """

    def __init__(
        self, groups: Iterable[range], timeout: float | None, context: Any
    ) -> None:
        self.handles = [WorkerHandle(number=i, ids=ids) for i, ids in enumerate(groups)]
        self.in_flight: set[int] = set()
        self.answered: collections.deque[int] = collections.deque()
        self.broken: dict[int, BaseException] = {}
        self._timeout, self._context, self._owner = timeout, context, os.getpid()
        self._is_closed, self._is_torn = False, False
        # Pipes are registered once; `connection.wait` would register all in every call.
        self._selector = selectors.DefaultSelector()

    @property
    def alive(self) -> list[WorkerHandle]:
        """The workers that are not lost."""
        return [handle for handle in self.handles if handle.pipe is not None]

    def __enter__(self) -> Self:
        request_checks.closed(self._is_closed)
        # An interrupt may also come between here and the block, or in `__exit__`.
        if self._is_torn:
            self._give_up_all()
        self._is_torn = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An interrupt is no `Exception`.
        if kind is not None and not issubclass(kind, Exception):
            self._give_up_all()
        self._is_torn = False

    def start(self, handle: WorkerHandle) -> None:
        """Starts a process."""
        handle.pipe, theirs = self._context.Pipe()
        handle.process = self._context.Process(
            target=worker_process.serve, args=(theirs,)
        )
        with theirs:
            handle.process.start()
        # At exit multiprocessing joins the processes of this set, also in a fork of
        # this process, which does not own them. `close` ends them, and a worker ends
        # with the main process. It is not daemonic, so that environments may start
        # processes.
        children: Any = vars(multiprocessing.process)["_children"]
        children.discard(handle.process)
        self._selector.register(handle.pipe, selectors.EVENT_READ, handle)

    def ask(self, handle: WorkerHandle, method: str, *args: Any) -> None:
        """Sends a request, unless the worker is lost."""
        if handle.pipe is None:
            return
        if not handle.owed:  # else its time runs since the request or reply before
            handle.since = time.monotonic()
        # Before it is sent: a reply that is not owed would count for another request.
        handle.asked = method
        handle.owed.append(handle.ids[args[0]] if method == "take_step_of" else None)
        try:
            handle.pipe.send_bytes(pickle.dumps((method, args)))
        except OSError:
            self.give_up(handle)

    def gather(
        self, handles: Collection[WorkerHandle]
    ) -> list[tuple[WorkerHandle, Any, BaseException | None]]:
        """Waits for the replies to a request.

        Returns:
            Each worker that is not lost, with its result and the error that it raised.
        """
        # Replies come in the order of requests, so those to earlier steps come first.
        while any(handle.owed for handle in handles):
            self.read_replies()
        return [
            (handle, *handle.reply) for handle in handles if handle.pipe is not None
        ]

    def results(self, handles: Collection[WorkerHandle]) -> list[Any]:
        """Waits for the results of a request, and raises the first error."""
        found = self.gather(handles)
        for _, _, error in found:
            # Which environments are faulty is in `broken`, with other workers' ones.
            if error is not None and not isinstance(error, EnvFault):
                raise error
        return [result for _, result, _ in found]

    def add_faults(self, handle: WorkerHandle) -> None:
        """Notes the faulty environments of a worker that are not known as such."""
        self.broken = {**handle.causes, **self.broken}

    def read_replies(self, timeout: float | None = None) -> None:
        """Waits for replies, at most `timeout` seconds; reads one of each worker."""
        # Woken now and then, since the process may be at its exit meanwhile.
        waits = [max(0.0, left) for _, left in self._time_left()]
        waits += [_PATIENCE] if timeout is None else [_PATIENCE, timeout]
        exceptions.raise_at_exit()
        for key, _ in self._selector.select(min(waits)):
            self._read(key.data)
        for handle, left in self._time_left():
            if left <= 0:
                text = f"{handle} did not answer within {self._timeout} s"
                self.give_up(handle, TimeoutError(text))

    def give_up(self, handle: WorkerHandle, cause: BaseException | None = None) -> None:
        """Ends a process; its environments are faulty, and answer so if in flight."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(handle.pipe)
        if cause is None:
            handle.process.join(_GRACE)  # its pipe may be closed a moment before
            exit_code = handle.process.exitcode
            cause = RuntimeError(f"{handle} ended with exit code {exit_code}")
        self.broken.update(dict.fromkeys(handle.ids, cause))
        handle.causes = {}
        # Nobody else will answer for these, and `receive` waits for them.
        self.answered.extend(at for at in handle.owed if at is not None)
        handle.owed.clear()
        _end(handle)

    def drop_answers(self, numbers: Collection[int]) -> None:
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
        # All close their environments at the same time, and share the grace.
        for handle in alive:
            with contextlib.suppress(OSError):
                handle.pipe.send_bytes(pickle.dumps(("close", ())))
        end = time.monotonic() + _GRACE
        for handle in alive:
            _end(handle, max(0.0, end - time.monotonic()))
        self._selector.close()

    def _give_up_all(self) -> None:
        """Ends all workers, after an interrupt."""
        for handle in self.alive:
            self.give_up(handle, RuntimeError(f"{handle} was interrupted"))
        self.drop_answers(range(self.handles[-1].ids.stop))

    def _read(self, handle: WorkerHandle) -> None:
        try:
            result, error, handle.causes = pickle.loads(handle.pipe.recv_bytes())
        except (EOFError, OSError):
            return self.give_up(handle)
        except Exception as error:  # of a class that only the worker knows
            return self.give_up(handle, error)
        # Its time for the next reply begins with this one: it works on one at a time.
        handle.since, at = time.monotonic(), handle.owed.popleft()
        self.add_faults(handle)
        if at is None:
            handle.reply = result, error
        else:
            self.answered.append(at)

    def _time_left(self) -> list[tuple[WorkerHandle, float]]:
        """Returns the seconds that workers with a timeout may still take."""
        if self._timeout is None:
            return []
        end = self._timeout - time.monotonic()
        timed = (x for x in self.handles if x.owed and x.asked not in _UNTIMED)
        return [(handle, handle.since + end) for handle in timed]


def _end(handle: WorkerHandle, patience: float = 0.0) -> None:
    # An interrupt may have left it half started.
    with contextlib.suppress(AssertionError, AttributeError, ValueError):
        handle.process.join(patience)
    with contextlib.suppress(AttributeError, ValueError):
        handle.process.kill()
        handle.process.join()
        handle.process.close()
    handle.pipe.close()
    handle.process = handle.pipe = None
