"""Describes a failure of an environment in bytes that another process can read."""

import pickle
import traceback

_NOTE = "In the environment:"


def pack(cause: BaseException) -> bytes:
    """Pickles an exception; one that cannot be pickled is told by its text.

    Its traceback goes along as a note, as exceptions are pickled without.
    """
    text = "".join(traceback.format_exception(cause)).rstrip()
    told = f"{type(cause).__name__}: {cause}"
    try:
        notes = getattr(cause, "__notes__", ())
        if not any(note.startswith(_NOTE) for note in notes):
            cause.add_note(f"{_NOTE}\n{text}")
        whole = pickle.dumps(cause)
    except Exception:
        whole = None
    return pickle.dumps((whole, told, text))


def unpack(packed: bytes) -> BaseException:
    """The exception, or a `RuntimeError` with its text if it cannot be made again."""
    whole, told, text = pickle.loads(packed)
    try:
        cause = pickle.loads(whole)
    except Exception:
        cause = None
    if isinstance(cause, BaseException):
        return cause
    error = RuntimeError(told)
    error.add_note(f"{_NOTE}\n{text}")
    return error
