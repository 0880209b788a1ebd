"""Counting what jax traces and compiles."""

import contextlib

import jax

_EVENTS: list[str] = []
_IS_ON: list[bool] = []


def _listen(name, *_, **__):
    if _IS_ON and name.startswith("/jax/core/compile/"):
        _EVENTS.append(name)


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def count_compiles():
    """Yields the list of functions traced, lowered or compiled within the block."""
    _EVENTS.clear()
    _IS_ON.append(True)
    try:
        yield _EVENTS
    finally:
        _IS_ON.pop()
