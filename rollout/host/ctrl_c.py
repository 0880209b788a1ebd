"""Holds Ctrl-C back where it must not cut a call short."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

_PATIENCE = 0.05  # s, after which a pressed Ctrl-C is noticed


@contextlib.contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the block ends, or until it calls what this yields.

    A second Ctrl-C comes through at once, for what the block waits for may hang. Other
    threads than the main one receive no signals.
    """
    handler: Any = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    num_pressed = 0

    def note(number: int, frame: Any) -> None:
        nonlocal num_pressed
        del number, frame  # unused
        num_pressed += 1
        if num_pressed > 1:
            let_through()

    def let_through() -> None:
        nonlocal num_pressed
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


def submit(
    pool: futures.Executor, fn: Callable[..., Any], *args: Any
) -> futures.Future[Any]:
    """Calls `fn(*args)` in a thread of the pool."""
    with held_back():  # an interrupt in here could leave a lock of the pool locked
        return pool.submit(fn, *args)


def result(future: futures.Future[Any]) -> Any:
    """Waits for the result of a call; Ctrl-C raises here, and the call goes on."""
    # Between two waits: inside of one, an interrupt could become another error, since
    # the locks of Python's threads do not expect it.
    with held_back() as check:
        while not futures.wait([future], _PATIENCE).done:
            check()
    return future.result()
