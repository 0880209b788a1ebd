"""Holds Ctrl-C back where it must not cut a call short."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

from rollout.envs.host.exceptions import raise_at_exit

_PATIENCE = 0.05  # s, after which a pressed Ctrl-C is noticed


@contextlib.contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the block ends, or until it calls what this yields.

    A second Ctrl-C comes through at once, for what the block waits for may hang. Other
    threads than the main one receive no signals; what this yields ends them with
    `SystemExit` where the process ends.
    """
    handler: Any = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    num_pressed = 0

    def note(number: int, frame: Any) -> None:
        nonlocal num_pressed
        del number, frame  # unused
        num_pressed += 1
        # The first waits for a place between two rows; who presses again will not wait.
        if num_pressed > 1:
            let_through()

    def let_through() -> None:
        nonlocal num_pressed
        raise_at_exit()
        # Set to 0 first: the handler may raise, and must not be called twice.
        if num_pressed:
            num_pressed = 0
            handler(signal.SIGINT, None)  # usually raises `KeyboardInterrupt`

    is_held = is_main and callable(handler)
    if is_held:
        signal.signal(signal.SIGINT, note)
    try:
        yield let_through
    finally:
        if is_held:
            if signal.getsignal(signal.SIGINT) is note:  # else `handler` set another
                signal.signal(signal.SIGINT, handler)
            let_through()


class Calls:
    """Calls in threads, one after another, for which Ctrl-C finds the caller waiting.

    A call that waits or checks at the exit of the process is given up. It is no pool of
    `concurrent.futures`, whose threads cannot see that the process ends.
    """

    def __init__(self) -> None:
        self._last: futures.Future[Any] = futures.Future()
        self._last.set_result(None)

    def submit(self, fn: Callable[..., Any], *args: Any) -> futures.Future[Any]:
        """Calls `fn(*args)`, after the calls before it."""
        with held_back():  # or the call could be unknown to the next one
            before, future = self._last, futures.Future()

            def run() -> None:
                # A chain of threads is a queue: each waits for the call before its own.
                futures.wait([before])
                try:
                    future.set_result(fn(*args))
                except BaseException as error:
                    future.set_exception(error)

            threading.Thread(target=run).start()
            self._last = future
        return future

    def wait(self) -> None:
        """Waits for the end of all calls; Ctrl-C raises here, and they go on."""
        wait(self._last)


def result(future: futures.Future[Any]) -> Any:
    """Waits for the result of a call; Ctrl-C raises here, and the call goes on."""
    wait(future)
    return future.result()


def wait(future: futures.Future[Any]) -> None:
    """Waits for the end of a call; Ctrl-C raises here, and the call goes on."""
    # Between two waits: inside of one, an interrupt could become another error, since
    # the locks of Python's threads do not expect it.
    with held_back() as check:
        while not futures.wait([future], _PATIENCE).done:
            check()
