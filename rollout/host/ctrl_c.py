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
def held_back() -> Iterator[Callable[[], None]]:
    """Delays Ctrl-C until the block ends, or until it calls the yielded function.

    A second Ctrl-C raises immediately, because the block may hang. Only the main thread
    receives signals. In other threads, the yielded function raises `SystemExit` when
    the process exits.
    """
    handler: Any = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    num_presses = 0

    def on_press(number: int, frame: Any) -> None:
        nonlocal num_presses
        del number, frame  # unused
        num_presses += 1
        # The first Ctrl-C waits for the block. The second raises immediately.
        if num_presses > 1:
            raise_pending()

    def raise_pending() -> None:
        nonlocal num_presses
        raise_at_exit()
        # Reset the count first: the handler may raise, and must not be called twice.
        if num_presses:
            num_presses = 0
            handler(signal.SIGINT, None)  # usually raises `KeyboardInterrupt`

    is_delayed = is_main and callable(handler)
    if is_delayed:
        signal.signal(signal.SIGINT, on_press)
    try:
        yield raise_pending
    finally:
        if is_delayed:
            if signal.getsignal(signal.SIGINT) is on_press:  # else `handler` set it
                signal.signal(signal.SIGINT, handler)
            raise_pending()


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
        with held_back():  # an interrupt could drop the call from the queue
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
    with held_back() as check:
        while not futures.wait([future], _POLL_INTERVAL).done:
            check()
