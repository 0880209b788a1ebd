"""Holds Ctrl-C back during a call that must not be cut short."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


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
            signal.signal(signal.SIGINT, handler)
            let_through()
