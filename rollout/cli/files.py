"""Writes a file whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file to write that is there whole after the `with` block, or not at all.

    Args:
        path: the file; one that exists is replaced, and keeps its permissions.

    Yields:
        A file next to it, which is flushed to disk and then renamed.

    Raises:
        OSError: if the file cannot be written.
    """
    path = Path(os.path.realpath(path))  # a link stays one
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
