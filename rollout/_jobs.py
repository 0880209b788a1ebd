"""One batch under way: filled in a thread of its own, a part at a time.

Between two parts the thread looks whether it was told to pause or to end the batch, so
a stream can be stopped within about a tenth of a second however long a batch takes. A
thread other than the main one is never interrupted by Ctrl-C, so the carry, which each
part consumes, cannot get lost between two lines.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import numpy as np

from rollout import _faults
from rollout._fill import Filled, Window
from rollout._programs import Programs
from rollout._rows import Rows
from rollout.collector import Collector
from rollout.types import Carry

_SECONDS = 0.1  # that a part should take
_MOMENT = 1e-5  # s
_GROWTH = 16  # a part has at most so many times the rows of the one before


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
    """Memory to fill, None where there is none to reuse."""

    rows: Rows | None
    output: chex.ArrayTree | None


class Job:
    """The rows of one batch, and what it takes to fill them.

    Attributes:
        start: the carry before the first row.
        params_version: which parameters it is made with.
        num_steps: its steps; fewer than planned if it was ended early.
        is_complete: all that will be filled is.
        seconds: how long filling it took so far.
        error: what went wrong, None if nothing did.
        fault: the first step at which something was not finite, or `_faults.NONE`.
        filled: what the last part returned.
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
        pace: Pace,
        memory: Memory,
        finish: Callable[[Filled], Any],
    ) -> None:
        self.start, self.params, self.window = start, params, window
        self.params_version = params_version
        self.num_steps = window.num_steps
        self.is_complete = False
        self.seconds = 0.0
        self.error: BaseException | None = None
        self.fault = _faults.NONE
        self.filled: Filled | None = None
        self.product: Any = None
        self._programs, self._collector, self._pace = programs, collector, pace
        self._memory, self._finish = memory, finish
        self._row = 0
        self._must_pause = self._must_end = False
        self._is_idle = threading.Event()
        self._is_idle.set()

    def go(self) -> None:
        """Starts to fill, or goes on with it; returns at once."""
        self._is_idle.wait()  # until a pause has come into force
        self._must_pause = False
        if not self.is_complete and self.error is None:
            self._is_idle.clear()
            threading.Thread(target=self._run, name="rollout.Stream").start()

    def wait_for_memory(self) -> None:
        """Waits until the memory that is reused is no longer the old batch's."""
        rows, output = self._memory
        owned = [] if rows is None else [rows.flags]
        owned += jax.tree.leaves(output)[:1] if rows is None else []
        while not self._is_idle.is_set() and not all(x.is_deleted() for x in owned):
            time.sleep(_MOMENT)

    def wait(self) -> None:
        """Waits until nothing is being filled."""
        self._is_idle.wait()

    def pause(self) -> None:
        """Stands still after the part under way, until the next `go`."""
        self._must_pause = True

    def end(self) -> None:
        """Ends the batch after the part under way; the rest of it is masked."""
        self._must_end = True

    def _run(self) -> None:
        try:
            while not (self.is_complete or self._must_pause):
                # The interpreter waits for this thread before it exits.
                if not threading.main_thread().is_alive():
                    break
                self._fill_part()
        except BaseException as error:
            self.error = error
        finally:
            self._is_idle.set()

    def _fill_part(self) -> None:
        start, window = time.perf_counter(), self.window
        num_envs = self._collector.env.num_envs
        num_rows = -(-self.num_steps // num_envs)
        size = self._pace.next(num_rows - self._row)
        if self._must_end:
            size, self.num_steps = 0, min(self.num_steps, self._row * num_envs)
        stop = self._row + size
        is_last = self._must_end or stop == num_rows
        if self.num_steps:
            window = window._replace(
                first_row=self._row,
                stop_row=stop,
                is_last=int(is_last),
                num_steps=self.num_steps,
            )
            self._call(window)
        self._row = stop
        self.is_complete = is_last
        if is_last and self.filled is not None:
            self.product = self._finish(self.filled)
        taken = time.perf_counter() - start
        self.seconds += taken
        if size:
            self._pace.note(size, taken)

    def _call(self, window: Window) -> None:
        if self.filled is None:
            carry, memory = self._programs.copy(self.start), self._memory
        else:
            filled = self.filled
            carry, memory = filled.carry, Memory(filled.rows, filled.result.output)
        rows, output = self._programs.blank_what_is_missing(*memory)
        self.filled = self._programs.fill(
            self._collector, carry, rows, output, self.params, np.array(window, np.int32)
        )
        self.fault = min(self.fault, int(jax.block_until_ready(self.filled.fault)))
