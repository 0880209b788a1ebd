"""Packs exceptions in bytes, to send them to another process; ends threads at exit."""

import pickle
import threading
import traceback


class RemoteTraceback(Exception):  # noqa: N818
    """The traceback in the process where an exception was raised; it is its cause."""


def to_bytes(error: BaseException) -> bytes:
    """Pickles an exception, and its traceback as text, which pickle drops."""
    text = "".join(traceback.format_exception(error))
    try:
        whole = pickle.dumps(error)
    except Exception:
        whole = b""
    # Nested: if `whole` cannot be unpickled there, the two texts still arrive.
    return pickle.dumps((whole, f"{type(error).__name__}: {error}", text))


def from_bytes(packed: bytes) -> BaseException:
    """Returns the exception, or a `RuntimeError` with its text if unpickling fails."""
    whole, summary, text = pickle.loads(packed)
    try:
        error = pickle.loads(whole)
    except Exception:
        error = RuntimeError(summary)
    error.__cause__ = RemoteTraceback(f"\n{text}")
    return error


def raise_at_exit() -> None:
    """Raises `SystemExit` in a thread that the process, at its exit, waits for."""
    main = threading.main_thread()
    if threading.current_thread() is not main and not main.is_alive():
        raise SystemExit
