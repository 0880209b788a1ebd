"""Pickling of exceptions for another process, and the end of threads at exit."""

import pickle
import threading
import traceback


def portable(error: BaseException) -> BaseException:
    """Returns a picklable exception with the traceback as a note.

    If `error` cannot be pickled, the result is a `RuntimeError` with the same message.
    """
    try:
        pickle.loads(pickle.dumps(error))  # some exceptions fail only in `loads`
    except Exception:
        text = f"{type(error).__name__}: {error}"
        error = RuntimeError(text).with_traceback(error.__traceback__)
    if error.__traceback__ is not None:  # without a traceback, the note exists already
        error.add_note("".join(traceback.format_exception(error)))
        error.__traceback__ = None
    return error


def raise_at_exit() -> None:
    """Raises `SystemExit` in a non-main thread once the main thread has ended.

    At exit, the interpreter waits for all threads that are not daemonic.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main and not main.is_alive():
        raise SystemExit
