"""Handles Ctrl-C in `python -m rollout`: one line on stderr, exit status 130."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

STATUS = 130  # as a shell counts SIGINT


def line() -> str:
    """Returns the line to write; on a terminal below the `^C` or a progress bar."""
    start = "\n\r" if sys.stderr and sys.stderr.isatty() else ""
    return f"{start}python -m rollout: interrupted\n"


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Makes the first Ctrl-C raise and ignores later ones, which would lose the table.

    A handler that the caller of `main` has set stays.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if before is not signal.default_int_handler or not is_main:
        yield
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def aside(fn: Callable[[], T]) -> T:
    """Calls `fn` in a thread, while the main one only waits.

    So Ctrl-C raises here, at once, and never inside jax, which compiles for seconds
    without checking signals, and turns exceptions in callbacks into other errors.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future.result()
