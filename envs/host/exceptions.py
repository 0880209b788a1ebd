"""Exceptions that go to another process, and one that ends threads at exit."""

import pickle
import threading
import traceback


def portable(error: BaseException) -> BaseException:
    """Makes an exception that can be pickled, with its traceback as a note.

    Where pickle fails, it is a `RuntimeError` that says the same.
    """
    try:
        pickle.loads(pickle.dumps(error))  # some are pickled, and fail only here
    except Exception:
        text = f"{type(error).__name__}: {error}"
        error = RuntimeError(text).with_traceback(error.__traceback__)
    if error.__traceback__ is not None:  # else it has the note
        error.add_note("".join(traceback.format_exception(error)))
        error.__traceback__ = None
    return error


def raise_at_exit() -> None:
    """Raises `SystemExit` in a thread that the process, at its exit, waits for."""
    main = threading.main_thread()
    if threading.current_thread() is not main and not main.is_alive():
        raise SystemExit
