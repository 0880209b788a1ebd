"""A state as one file of plain arrays, written whole or not at all.

The file is an uncompressed `.npz`, which `numpy.load` reads without pickle. Its array
`header` is JSON: the version of the format, and the path, dtype and shape of each leaf.
The arrays `leaf_0`, `leaf_1`, ... are the leaves, in order. A leaf of a dtype that
NumPy lacks (bfloat16, float8) is stored as its bits, in unsigned integers, and a typed
key as its words. Every array has a checksum, which `load` verifies before it uses it.
"""

import contextlib
import io
import json
import os
import secrets
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import chex
import jax
import jax.numpy as jnp
import numpy as np

from buffers.types import ArrayTree

_VERSION = 1
# What zipfile, NumPy and JSON raise on damaged bytes.
_DAMAGE = (
    EOFError,
    KeyError,
    OSError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def save(path: str | os.PathLike[str], state: ArrayTree) -> None:
    """Writes a state to a file, whole or not at all.

    The file is written next to `path`, flushed to disk and then renamed. Whatever
    happens on the way, `path` is either the old file or the new one. A process that is
    killed may leave its unfinished file behind, `.NAME.*.part`.

    Args:
        path: the file, under exactly this name; one that exists is replaced.
        state: the state of any buffer, or any other pytree of arrays of numbers and
            typed keys. It cannot be called under `jit`.

    Raises:
        ValueError: if a leaf is not such an array; it names the leaf.
        OSError: if the file cannot be written.
    """
    header = {"version": _VERSION, "leaves": _describe("state", state)}
    with whole_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        _put(archive, "header", np.asarray(json.dumps(header)))
        for number, leaf in enumerate(jax.tree.leaves(state)):
            _put(archive, f"leaf_{number}", _plain(leaf))


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


def load(path: str | os.PathLike[str], like: ArrayTree) -> ArrayTree:
    """Reads a state that `save` wrote.

    Args:
        path: the file.
        like: what the state must look like: a state of the same buffer, or its
            `jax.eval_shape`. Only structure, shapes and dtypes are read.

    Returns:
        The state, with the structure of `like`: jax arrays on the default device that
        own their memory, so it may be donated.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is damaged or of another version, or if its leaves are
            not those of `like`; it names the leaf.
    """
    wanted = _describe("like", like)
    with open(path, "rb") as file:
        with _reading(path):
            archive = zipfile.ZipFile(file)
            header = json.loads(str(_get(archive, file, "header")))
            version, stored = header["version"], header.get("leaves")
        if version != _VERSION:
            raise ValueError(
                f"`path` must be a file of format version {_VERSION}, got version "
                f"{version!r} in {os.fspath(path)!r}."
            )
        _compare(wanted, stored)
        leaves = []
        for number, (leaf, at) in enumerate(
            zip(jax.tree.leaves(like), stored, strict=True)
        ):
            with _reading(path):
                array = _get(archive, file, f"leaf_{number}")
                _check_kind(array, leaf)
            leaves.append(_restore(array, leaf.dtype, at))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _describe(name: str, tree: ArrayTree) -> list[dict[str, Any]]:
    """Path, dtype and shape of every leaf; refuses all but arrays of numbers."""
    leaves = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        at, dtype = jax.tree_util.keystr(path), getattr(leaf, "dtype", None)
        if dtype is None or not _is_plain(dtype):
            got = type(leaf).__name__ if dtype is None else dtype
            raise ValueError(
                f"`{name}` must hold arrays of numbers, booleans or typed keys "
                f"only, got {got} at {at}."
            )
        described = {"path": at, "dtype": str(dtype), "shape": list(leaf.shape)}
        if _is_key(dtype) and isinstance(leaf, jax.Array):
            described["impl"] = str(jax.random.key_impl(leaf))
        leaves.append(described)
    return leaves


def _compare(wanted: list[dict[str, Any]], stored: list[dict[str, Any]]) -> None:
    """Checks the leaves against those of the file."""
    names = [[leaf["path"] for leaf in leaves] for leaves in (wanted, stored)]
    if names[0] != names[1]:
        raise ValueError(
            "`like` must have the leaves of the file, got "
            f"{_only(*names) or 'none'} that the file lacks, and lacks "
            f"{_only(*names[::-1]) or 'none'} of the file."
        )
    for want, got in zip(wanted, stored, strict=True):
        if (want["dtype"], want["shape"]) != (got["dtype"], got["shape"]):
            raise ValueError(
                f"`like` must be {_kind(got)} at {got['path']}, as in the file, got "
                f"{_kind(want)}."
            )


def _plain(leaf: chex.Array) -> np.ndarray:
    """A leaf as an array of one of NumPy's own dtypes, `[...]`."""
    if _is_key(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf, order="C")
    if array.dtype.isbuiltin == 1:
        return array
    return array.view(f"u{array.dtype.itemsize}")


def _check_kind(array: np.ndarray, leaf: Any) -> None:
    """Checks an array against the header of the leaf."""
    if _is_key(leaf.dtype):
        words = array.shape[: len(leaf.shape)], str(array.dtype)
        good = words == (tuple(leaf.shape), "uint32")
    else:
        dtype = np.dtype(leaf.dtype)
        plain = dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")
        good = (array.shape, array.dtype) == (tuple(leaf.shape), plain)
    if not good:
        got = f"{array.dtype} of shape {array.shape}"
        raise ValueError(f"an array is not what the header says, but {got}")


def _restore(array: np.ndarray, dtype: Any, stored: dict[str, Any]) -> jax.Array:
    """The leaf that `_plain` made `array` of; the copy owns its memory."""
    if _is_key(dtype):
        return jax.random.wrap_key_data(jnp.array(array), impl=stored["impl"])
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"`like` must have a dtype that jax keeps at {stored['path']}, got {dtype} "
            "without `jax_enable_x64`."
        )
    return jnp.array(array.view(dtype))


def _put(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    """Appends an array, as `numpy.savez` does."""
    # Without a date: the same state gives the same file.
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)


def _get(archive: zipfile.ZipFile, file: BinaryIO, name: str) -> np.ndarray:
    """Reads an array; its checksum is verified first."""
    info = archive.getinfo(f"{name}.npy")
    length = os.fstat(file.fileno()).st_size
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size > length:
        raise zipfile.BadZipFile(f"{name} is not as `save` writes it")
    content = io.BytesIO(archive.read(info))
    return np.lib.format.read_array(content, allow_pickle=False)


@contextlib.contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Reports whatever goes wrong as a damaged file."""
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(
            f"`path` is damaged or was not written by `save`, got {os.fspath(path)!r}: "
            f"{error}."
        ) from error


def _sync_directory(directory: Path) -> None:
    """Flushes the new name to disk, where directories can be opened for that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _is_plain(dtype: Any) -> bool:
    """Tells whether `save` takes a dtype: no objects, text or foreign byte order."""
    if _is_key(dtype):
        return True
    kinds = (np.number, np.bool_)
    is_number = any(jnp.issubdtype(dtype, kind) for kind in kinds)
    return is_number and np.dtype(dtype).isbuiltin != 0


def _kind(leaf: dict[str, Any]) -> str:
    return f"{leaf['dtype']} of shape {tuple(leaf['shape'])}"


def _only(these: list[str], those: list[str]) -> str:
    """The first of `these` that is not among `those`."""
    return next((name for name in these if name not in set(those)), "")
