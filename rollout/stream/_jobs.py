"""One batch under way: filled in a thread of its own, a part at a time.

Between two parts the thread looks whether it was told to pause or to end the batch, so
a stream can be stopped within about a tenth of a second however long a batch takes. A
thread other than the main one is never interrupted by Ctrl-C, so the carry, which each
part consumes, cannot get lost between two lines.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import numpy as np

from rollout.collector import Collector
from rollout.stats import CollectStats
from rollout.stream import _faults
from rollout.stream._fill import Filled
from rollout.stream._programs import Programs
from rollout.stream._rows import Rows
from rollout.stream._window import Window
from rollout.types import Carry

_SECONDS = 0.1  # that a part should take
_GROWTH = 16  # a part has at most so many times the rows of the one before
_MOMENT = 1e-5  # s
_PATIENCE = 0.2  # s, after which a thread without work ends


class Worker:
    """A thread that runs jobs one after the other, and ends when there are none.

    A new thread for every batch would cost more, and has no warm memory.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_alive = False

    def run(self, job: "Job") -> None:
        """Runs a job; returns at once."""
        with self._lock:
            self._jobs.put(job)
            if not self._is_alive:
                self._is_alive = True
                threading.Thread(target=self._serve, name="rollout.Stream").start()

    def _serve(self) -> None:
        while True:
            try:
                self._jobs.get(timeout=_PATIENCE).run()
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._is_alive = False
                        return


class Pace:
    """How many rows a part has, from how long the last one took."""

    def __init__(self) -> None:
        self._num_rows = 1

    def next(self, num_left: int) -> int:
        """Says how many rows to take of those left."""
        # A last part of a few rows costs a call and saves nothing.
        return num_left if num_left <= 1.5 * self._num_rows else self._num_rows

    def note(self, num_rows: int, seconds: float) -> None:
        """Notes how long a part took."""
        most = _GROWTH * max(num_rows, self._num_rows)
        wanted = num_rows * _SECONDS / max(seconds, 1e-9)
        self._num_rows = int(min(max(wanted, 1), most))


class Memory(NamedTuple):
    """Memory to write to."""

    carries: list[Carry]
    rows: Rows | None  # None where there is none to reuse
    output: chex.ArrayTree | None  # likewise


class Job:
    """The rows of one batch, and what it takes to fill them.

    Attributes:
        start: the carry before the first row; it is not consumed.
        params: the parameters it is made with.
        params_version: their version.
        window: what the batch is; its rows are those of a part.
        num_steps: its steps, fewer than planned if it was ended early.
        is_complete: all that will be filled is.
        seconds: how long filling it took so far.
        error: what went wrong, None if nothing did.
        fault: the first step at which something was not finite, or `_faults.NONE`.
        filled: what the last part returned, None before the first.
        product: what is handed over, once the job is complete.
        stats: of the episodes in it; perhaps still being computed.
        counted: the part of them that a stream adds up, in one array.
    """

    def __init__(
        self,
        programs: Programs,
        collector: Collector,
        start: Carry,
        params: Any,
        window: Window,
        *,
        params_version: int,
        worker: Worker,
        pace: Pace,
        memory: Memory,
        finish: Callable[[Filled], chex.ArrayTree],
    ) -> None:
        self.start, self.params, self.window = start, params, window
        self.params_version = params_version
        self.num_steps = window.num_steps
        self.is_complete = False
        self.seconds = 0.0
        self.error: BaseException | None = None
        self.fault = _faults.NONE
        self.filled: Filled | None = None
        self.product: chex.ArrayTree | None = None
        self.stats: CollectStats | None = None
        self.counted: jax.Array | None = None
        self._programs, self._collector = programs, collector
        self._worker, self._pace = worker, pace
        self._memory, self._finish = memory, finish
        self._row = 0
        self._must_pause = self._must_end = False
        self._is_idle = threading.Event()
        self._is_idle.set()

    def go(self) -> None:
        """Starts to fill, or goes on with it, as soon as a pause is in force."""
        if self._must_pause:
            self._is_idle.wait()
        self._must_pause = False
        if self._is_idle.is_set() and not self.is_settled:
            self._is_idle.clear()
            self._worker.run(self)

    @property
    def is_settled(self) -> bool:
        """There is nothing more to do."""
        return self.is_complete or self.error is not None

    def wait(self) -> None:
        """Waits until nothing is being filled."""
        self._is_idle.wait()

    def wait_for_memory(self) -> None:
        """Waits until the memory that is written to is no longer the old batch's."""
        # All of it, for a call takes one array after the other.
        memory = jax.tree.leaves((self._memory.rows, self._memory.output))
        while not all(x.is_deleted() for x in memory):
            if self._is_idle.is_set():
                return
            time.sleep(_MOMENT)

    def pause(self) -> None:
        """Stands still after the part under way, until the next `go`."""
        self._must_pause = True

    def end(self) -> None:
        """Ends the batch after the part under way; the rest of it is masked."""
        self._must_end = True

    def run(self) -> None:
        """Fills rows until the batch is complete or something is asked of the job."""
        try:
            # The interpreter waits for this thread before it exits.
            while not self._must_pause and threading.main_thread().is_alive():
                self._fill_part()
                if self.is_complete:
                    break
        except BaseException as error:
            self.error = error
        finally:
            self._is_idle.set()

    def _fill_part(self) -> None:
        start, num_envs = time.perf_counter(), self._collector.env.num_envs
        num_rows = -(-self.num_steps // num_envs)
        is_last = self._must_end
        if is_last:
            stop = self._row
            self.num_steps = min(self.num_steps, stop * num_envs)
        else:
            stop = self._row + self._pace.next(num_rows - self._row)
            is_last = stop == num_rows
        if self.num_steps:
            self._call(first_row=self._row, stop_row=stop, is_last=int(is_last))
            if is_last:
                if self._programs.counts_steps:
                    self.num_steps = int(self.filled.num_steps)
                self.stats, self.counted = self._programs.describe(self.filled)
                self.product = self._finish(self.filled)
        size, self._row, self.is_complete = stop - self._row, stop, is_last
        taken = time.perf_counter() - start
        self.seconds += taken
        if size:
            self._pace.note(size, taken)

    def _call(self, **rows_of_part: int) -> None:
        window = self.window._replace(**rows_of_part, num_steps=self.num_steps)
        filled, memory = self.filled, self._memory
        if filled is None:
            carry, rows, output = self.start, memory.rows, memory.output
            rows = self._programs.blank_rows() if rows is None else rows
        else:
            carry, rows, output = filled.carry, filled.rows, filled.output
        programs, carries = self._programs, memory.carries
        output = output if programs.recycles else ()
        self.filled = programs.fill(
            self._collector,
            carry,
            carries.pop() if carries else programs.copy(carry),
            rows,
            programs.blank_output() if output is None else output,
            self.params,
            np.array(window, np.int32),
        )
        jax.block_until_ready(self.filled.fault)
        if programs.checks:
            self.fault = min(self.fault, int(self.filled.fault))
        if carry is not self.start:
            carries.append(carry)
