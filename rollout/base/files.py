"""Files that a killed process leaves whole, and folders with one writer."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".part"  # appended to the names of incomplete files


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to write, which replaces `path` once every byte is on disk.

    If the block raises or the process is killed, `path` is unchanged.
    """
    part = path.with_name(path.name + UNFINISHED)
    try:
        with part.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:  # for example a full disk
        part.unlink(missing_ok=True)
        raise
    part.replace(path)


@contextlib.contextmanager
def lock(path: Path, error: Exception) -> Iterator[None]:
    """Locks a file or folder until the block or the process ends.

    Also excludes other threads of this process. A file, which is created, excludes the
    processes of all machines on a shared file system; a folder may exclude only the
    processes of this machine.

    Raises:
        Exception: `error`, if the path is already locked.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error from None
        yield
    finally:
        os.close(descriptor)
