"""A thread that makes the batches, so that the main one can be interrupted.

Ctrl-C can come between any two lines of the main thread, so no line may rely on the one
after it. A job runs once, however often it is started: `wait` starts it again, so a
request that an interrupt cut short does no harm.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any


class Job:
    """A call that is made once: its result or its error, and its duration in s."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.is_done, self.seconds = False, 0.0
        self.result: Any = None
        self.error: BaseException | None = None
        self.ahead: Any = None  # the `Position` with the next job, if that has begun
        self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry per `run`
        self._fn: Any = fn

    def run(self) -> None:
        """Makes the call, unless it has been made."""
        if not self.is_done:
            start = time.perf_counter()
            try:
                self.result = self._fn()
            except BaseException as error:
                self.error = error
            self.seconds = time.perf_counter() - start
            self._fn = None  # frees its arguments
            self.is_done = True
        self.ended.put(None)


class Worker:
    """A thread that runs jobs one after the other, until `close` or its deletion."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_serve, args=(self._jobs,), name="rollout.Stream", daemon=True
        )
        thread.start()
        # Also called when the interpreter exits: no thread may be inside XLA by then.
        self.close = weakref.finalize(self, _end, self._jobs, thread)

    def start(self, job: Job) -> None:
        """Queues a job for the thread; returns at once."""
        if not self.close.alive:
            raise RuntimeError("The stream is closed.")
        self._jobs.put(job)

    def wait(self, job: Job) -> None:
        """Waits until a job is done, starting it if need be; Ctrl-C raises here."""
        # Once more even if it has been started: `run` does nothing the second time.
        while not job.is_done:
            self.start(job)
            job.ended.get()


def _serve(jobs: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # frees its result before the next one comes


def _end(jobs: queue.SimpleQueue, thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
