"""Delays Ctrl-C until a call can be interrupted without losing data."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

from rollout.envs.host.workers import raise_at_exit

_POLL_INTERVAL = 0.05  # s, polling interval: the maximum delay until Ctrl-C raises


@contextlib.contextmanager
def delay_ctrl_c() -> Iterator[Callable[[], None]]:
    """Delays Ctrl-C until the block ends, or until it calls the yielded function.

    A second Ctrl-C raises immediately, because the block may hang. Only the main thread
    receives signals. In other threads, the yielded function raises `SystemExit` when
    the process exits.
    """
    handler: Any = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Presses):  # the outer block delays Ctrl-C
        yield raise_at_exit
        return
    is_main = threading.current_thread() is threading.main_thread()
    presses = _Presses(handler)
    is_delayed = is_main and callable(handler)
    if is_delayed:
        signal.signal(signal.SIGINT, presses)
    try:
        yield presses.raise_pending
    finally:
        if is_delayed:
            if signal.getsignal(signal.SIGINT) is presses:  # else `handler` set it
                signal.signal(signal.SIGINT, handler)
            presses.raise_pending()


class _Presses:
    """A signal handler that counts Ctrl-C. The second press raises immediately."""

    def __init__(self, handler: Any) -> None:
        self._handler, self._count = handler, 0

    def __call__(self, number: int, frame: Any) -> None:
        self._count += 1
        if self._count > 1:
            self.raise_pending()

    def raise_pending(self) -> None:
        """Calls the previous handler if Ctrl-C was pressed."""
        raise_at_exit()
        # Reset the count first: the handler may raise, and must not be called twice.
        if self._count:
            self._count = 0
            self._handler(signal.SIGINT, None)  # usually raises `KeyboardInterrupt`


class Calls:
    """A queue of calls in threads. Ctrl-C interrupts the caller, not the call.

    When the process exits, a call ends at its next wait or check for Ctrl-C. Threads of
    a `concurrent.futures` pool would continue.
    """

    def __init__(self) -> None:
        self._last: futures.Future[Any] = futures.Future()
        self._last.set_result(None)

    def submit(self, fn: Callable[..., Any], *args: Any) -> futures.Future[Any]:
        """Calls `fn(*args)` in a thread after all earlier calls have ended."""
        with delay_ctrl_c():  # an interrupt could drop the call from the queue
            previous, future = self._last, futures.Future()

            def run() -> None:
                # The threads form a queue: each thread waits for the previous call.
                futures.wait([previous])
                try:
                    future.set_result(fn(*args))
                except BaseException as error:
                    future.set_exception(error)

            threading.Thread(target=run).start()
            self._last = future
        return future

    def wait(self) -> None:
        """Waits until all calls have ended. Ctrl-C raises here; the calls continue."""
        wait(self._last)


def result(future: futures.Future[Any]) -> Any:
    """Returns the result of a call. Ctrl-C raises here; the call continues."""
    wait(future)
    return future.result()


def wait(future: futures.Future[Any]) -> None:
    """Waits until a call has ended. Ctrl-C raises here; the call continues."""
    # Check between two waits: an interrupt inside Python's locks could raise a
    # different error.
    with delay_ctrl_c() as check:
        while not futures.wait([future], _POLL_INTERVAL).done:
            check()
