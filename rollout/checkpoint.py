"""Saves and restores any pytree: bit for bit, and whole or not at all.

A checkpoint is a file of NumPy arrays in `path`, written under another name and renamed
once every byte is on disk. So a process may be killed at any moment: earlier
checkpoints stay as they were, and half-written files are never read. It holds the path,
dtype and shape of every leaf, and their checksums.

A folder has one writer at a time, and any number of readers.

With `jax.distributed` all processes save to and restore from one shared folder. Each
briefly holds the whole tree in memory, and the first one writes.
"""

import collections
import contextlib
import fcntl
import itertools
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from rollout import checks, multihost
from rollout.envs import trees
from rollout.envs.types import ArrayTree

_SUFFIX = ".checkpoint.npz"  # marks files as ours: no others are ever deleted
_UNFINISHED = ".part"  # appended to the names of half-written files


def save(
    path: str | Path,
    tree: ArrayTree,
    *,
    step: int | None = None,
    every: int = 1,
    keep: int = 1,
) -> bool:
    """Saves a tree as a checkpoint, and deletes the oldest ones.

    All processes must call it, with the same `path` and the same options; none returns
    before the checkpoint is on disk.

    Args:
        path: folder for the checkpoints of one run, on a file system of this machine; a
            leading `~` is the home folder. It is made if it does not exist.
        tree: any pytree of arrays of numbers, typed keys, numbers and bytes:
            `stream.state()`, the parameters, the state of an optimizer or of a buffer.
        step: number of the checkpoint, at least 0 and above those of earlier ones; None
            for the next number.
        every: saves only if `step` is a multiple of it, at least 1.
        keep: number of newest checkpoints to keep, at least 1.

    Returns:
        Whether the tree was saved. It is then on disk: no write goes on in the
        background.

    Raises:
        ValueError: if `step` is not an int above those of earlier checkpoints, or None
            where `every` is not 1; if `every` or `keep` is not an int of at least 1; if
            the tree has a leaf of another kind, which the message names; inside `jit`.
        OSError: if `path` is no folder and cannot be made one.
        RuntimeError: if another process or thread of this machine is saving to the
            folder.
    """
    checks.outside_of_jit("checkpoint.save")
    every = checks.int_between("every", every)
    keep = checks.int_between("keep", keep)
    if step is not None:
        step = checks.int_between("step", step, least=0, most=None)
        if step % every:
            return False
    elif every > 1:
        raise ValueError(
            f"`step` must be an int if `every` is not 1, got None with every={every}."
        )
    kinds = _describe("tree", tree)
    with _locked(path):
        found = steps(path)
        lowest = found[-1] + 1 if found else 0
        step = lowest if step is None else step
        # To replace a checkpoint would leave a moment with neither.
        step = checks.int_between("step", step, least=lowest, most=None)
        # Every process takes part in gathering, though only the first one writes.
        leaves = [multihost.gather(_words(leaf)) for leaf in jax.tree.leaves(tree)]
        arrays = [_bits(np.asarray(leaf)) for leaf in jax.device_get(leaves)]
        multihost_utils.sync_global_devices("all have listed the checkpoints")
        if jax.process_index() == 0:
            file = _file(path, step)
            for part in file.parent.glob(f"*{_SUFFIX}{_UNFINISHED}"):
                part.unlink()  # of a process that was killed: it takes up the disk
            part = file.with_name(file.name + _UNFINISHED)
            try:
                with part.open("wb") as stream:
                    np.savez(stream, np.array(kinds), *arrays)
                    stream.flush()
                    os.fsync(stream.fileno())
            except BaseException:  # such as a full disk
                part.unlink(missing_ok=True)
                raise
            part.rename(file)
            # Only now that the new one is on disk: a kill leaves one too many.
            for old in [*found, step][:-keep]:
                _file(path, old).unlink()
        multihost_utils.sync_global_devices("the checkpoint is on disk")
    return True


def restore(path: str | Path, like: ArrayTree, *, step: int | None = None) -> ArrayTree:
    """Reads a tree that `save` wrote.

    Args:
        path: the folder given to `save`.
        like: a tree of the saved structure, shapes and dtypes, or its `jax.eval_shape`;
            its values are not read, and bytes may be of any length. For a stream, pass
            a new stream's `state()`. Each restored array lies on the devices, and in
            the processes, of its counterpart here.
        step: number of the checkpoint, None for the newest one.

    Returns:
        The tree, of the structure of `like`, with the bits that were saved.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ValueError: if `step` is no such number; if the checkpoint has other leaves than
            `like`: the message names the first; if it is damaged: the message names the
            one before it.
    """
    if step is not None:
        step = checks.int_between("step", step, least=0, most=None)
    kinds, saved = _read(path, step)
    wanted = _describe("like", like)
    for want, got in itertools.zip_longest(wanted, kinds, fillvalue="no more"):
        if want != got:
            raise ValueError(
                f"`like` must have the leaves that were saved: {got}, got {want}."
            )
    # Each is dropped as soon as it is read: a large tree is not in memory twice.
    rest = collections.deque(saved)
    del saved
    return jax.tree.map(lambda old: _read_leaf(rest.popleft(), old), like)


def steps(path: str | Path) -> list[int]:
    """Lists the numbers of the whole checkpoints in a folder, ascending.

    Files that `save` did not write are left out.
    """
    names = [x.name.removesuffix(_SUFFIX) for x in _folder(path).glob(f"*{_SUFFIX}")]
    return sorted(int(name) for name in names if name.isdecimal())


def _folder(path: str | Path) -> Path:
    """Returns the folder of a path, after `~` is expanded."""
    if re.match(r"\w+:/", str(path)):  # such as gs://bucket, not a new folder "gs:"
        raise ValueError(f"`path` must name a folder of this machine, got {path!r}.")
    return Path(path).expanduser()


def _file(path: str | Path, step: int | None) -> Path:
    return _folder(path) / f"{step}{_SUFFIX}"


@contextlib.contextmanager
def _locked(path: str | Path) -> Iterator[None]:
    """Makes the folder, and refuses a second writer until the block ends."""
    folder = _folder(path)
    if jax.process_index() > 0:  # the first one writes
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:  # no other thread gets it either, and it ends with the process
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"`path` must have one writer at a time, got {path}, to which another "
                "process or thread is saving."
            ) from None
        yield
    finally:
        os.close(descriptor)


def _read(path: str | Path, step: int | None) -> tuple[list[str], list[np.ndarray]]:
    """Reads the descriptions and the leaves of a checkpoint."""
    found = steps(path)
    number = found[-1] if step is None and found else step
    try:
        with zipfile.ZipFile(_file(path, number)) as archive:
            kinds = _read_array(archive, 0).tolist()
            return kinds, [_read_array(archive, 1 + i) for i in range(len(kinds))]
    except Exception as error:  # NumPy does not document which
        if found != steps(path):  # it was replaced meanwhile
            return _read(path, step)
        if number not in found:
            raise FileNotFoundError(
                f"`path` must hold a checkpoint{'' if step is None else f' {step}'}, "
                f"got {path} with {found or 'none'}."
            ) from None
        before = [x for x in found if x < number]
        hint = f"`step={before[-1]}` is the one before" if before else "it is the first"
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"Checkpoint {number} in {path} is damaged or no checkpoint ({reason}); "
            f"{hint}. To go on without it, delete {_file(path, number).name}."
        ) from error


def _read_array(archive: zipfile.ZipFile, number: int) -> np.ndarray:
    with archive.open(f"arr_{number}.npy") as member:
        array = np.lib.format.read_array(member)
        # The checksum is compared at the end, which a damaged shape may not reach.
        member.read()
        return array


def _words(leaf: Any) -> jax.Array | np.ndarray:
    """Converts a leaf to an array of numbers."""
    if isinstance(leaf, bytes):
        return np.frombuffer(leaf, np.uint8)
    return trees.unwrap_keys(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _bits(array: np.ndarray) -> np.ndarray:
    """Views an array of a dtype that NumPy lacks (bfloat16, int4) as unsigned ints."""
    is_plain = array.dtype.isbuiltin == 1
    return array if is_plain else array.view(f"u{array.dtype.itemsize}")


def _read_leaf(array: np.ndarray, old: Any) -> Any:
    """Undoes `_words` and `_bits`: makes a leaf like `old`, on the same devices."""
    if isinstance(old, bytes):
        return array.tobytes()
    old = old if hasattr(old, "dtype") else np.asarray(old)
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        impl = []  # of a key, which may be only a shape and dtype
        jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), old)
        is_here = isinstance(old, jax.Array)
        words = (
            trees.unwrap_keys(old)
            if is_here
            else jax.eval_shape(trees.unwrap_keys, old)
        )
        return jax.random.wrap_key_data(_read_leaf(array, words), impl=impl[0])
    array = array.view(old.dtype)
    # Without `jax_enable_x64` jax would narrow 64 bits: they come back as NumPy arrays.
    is_wide = jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype
    if not isinstance(old, jax.Array | jax.ShapeDtypeStruct) or is_wide:
        return array
    # Copies, made by XLA: memory that NumPy owns cannot be donated.
    if old.sharding is None or not getattr(old, "committed", True):
        return jnp.copy(jnp.asarray(array))
    if old.sharding.is_fully_addressable:
        return jnp.copy(jax.device_put(array, old.sharding))
    # Each process takes its own part.
    return jax.make_array_from_callback(old.shape, old.sharding, array.__getitem__)


def _describe(name: str, tree: ArrayTree) -> list[str]:
    """Describes every leaf by path, dtype and shape; raises if it cannot be saved."""
    found = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        where = jax.tree_util.keystr(path) or "the root"
        if isinstance(leaf, bytes):
            found.append(f"{where} bytes")
            continue
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        kinds = np.number, np.bool_, jax.dtypes.prng_key
        is_masked = isinstance(leaf, np.ma.MaskedArray)  # a file has no masks
        if is_masked or not any(jnp.issubdtype(array.dtype, x) for x in kinds):
            raise ValueError(
                f"`{name}` must have numbers, arrays of numbers or booleans, typed "
                f"keys and bytes, got {checks.describe(leaf)} at {where}."
            )
        shape = ",".join(map(str, array.shape))
        found.append(f"{where} {array.dtype}[{shape}]")
    return found
