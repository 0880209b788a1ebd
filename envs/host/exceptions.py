"""Packs exceptions of environments in bytes, to send from a worker process."""

import pickle
import traceback

_NOTE = "In the environment:"


def to_bytes(cause: BaseException) -> bytes:
    """Pickles an exception, or its text if it cannot be pickled.

    Pickle drops the traceback, so it travels as a note.
    """
    text = "".join(traceback.format_exception(cause)).rstrip()
    summary = f"{type(cause).__name__}: {cause}"
    try:
        notes = getattr(cause, "__notes__", ())
        if not any(note.startswith(_NOTE) for note in notes):
            cause.add_note(f"{_NOTE}\n{text}")
        whole = pickle.dumps(cause)
    except Exception:
        whole = None
    # Nested: if `whole` cannot be unpickled there, the two texts still arrive.
    return pickle.dumps((whole, summary, text))


def from_bytes(packed: bytes) -> BaseException:
    """Returns the exception, or a `RuntimeError` with its text if unpickling fails."""
    whole, summary, text = pickle.loads(packed)
    try:
        cause = pickle.loads(whole)
    except Exception:
        cause = None
    if isinstance(cause, BaseException):
        return cause
    error = RuntimeError(summary)
    error.add_note(f"{_NOTE}\n{text}")
    return error
