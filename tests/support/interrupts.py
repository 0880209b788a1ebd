"""Raises `KeyboardInterrupt` on the lines of a call, one after the other."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLACES = (str(ROOT / "rollout/host"),)


class Tracer:
    """Interrupts where a line is reached for the first time in a call.

    Args:
        seen: lines at which it has done so before; it adds its own.
        places: beginnings of the paths of files whose lines count.
    """

    def __init__(self, seen: set, places: tuple[str, ...] = PLACES) -> None:
        self.seen, self.places, self.at = seen, places, None

    def __enter__(self) -> "Tracer":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, arg: Any) -> Callable | None:
        path = frame.f_code.co_filename
        if not path.startswith(self.places):
            return None
        if event == "line" and self.at is None:
            place = path, frame.f_lineno
            if place not in self.seen:
                self.seen.add(place)
                self.at = place
                raise KeyboardInterrupt
        return self._trace


def interrupted(call: Callable[[], Any], places: tuple[str, ...] = PLACES) -> Iterator:
    """Calls again and again, each time interrupted at another line.

    Yields:
        The line, as the name of its file and its number, after each interrupt; the
            caller does any repair. It ends with the first call that is
            not interrupted.
    """
    seen: set = set()
    while True:
        tracer = Tracer(seen, places)
        try:
            with tracer:
                call()
        except KeyboardInterrupt:
            assert tracer.at is not None
        if tracer.at is None:
            return
        path, line = tracer.at
        yield f"{Path(path).name}:{line}"
