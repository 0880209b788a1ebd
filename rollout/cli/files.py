"""Writes a file whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO


def write_file(path: Path, write_fn: Callable[[BinaryIO], Any]) -> None:
    """Writes a file whole, or leaves it as it was.

    Args:
        path: the file; one that exists is replaced, and keeps its permissions.
        write_fn: writes to an open file. This file lies next to `path`, is flushed to
            disk, and then renamed.

    Raises:
        ValueError: if the file cannot be written.
    """
    try:
        with _replacing(Path(os.path.realpath(path))) as file:  # a link stays one
            write_fn(file)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{path} could not be written: {reason}") from error


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            if path.exists():
                os.chmod(part, path.stat().st_mode & 0o7777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Flushes the new name to disk, where directories can be opened for that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
