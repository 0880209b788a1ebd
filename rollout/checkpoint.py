"""Saves and restores any pytree, bit for bit and atomically.

A checkpoint is a file of NumPy arrays in `path`. It is written under a temporary name
and renamed once every byte is on disk. If the process is killed, earlier checkpoints
are unchanged, and incomplete files are never read. The file contains the path, dtype
and shape of every leaf, checksums, and the version of rollout.

A folder has one writer at a time, and any number of readers.

All processes of `jax.distributed` save to and restore from one shared folder. Each
process briefly holds the whole tree in memory, and the first process writes.
"""

import collections
import contextlib
import itertools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from rollout.base import checks, files, programs, trees
from rollout.envs.types import ArrayTree
from rollout.version import __version__

_SUFFIX = ".checkpoint.npz"  # only files with this suffix are deleted


class StructureError(ValueError):
    """The leaves of a checkpoint differ from the tree to restore."""


def save(
    path: str | Path,
    tree: ArrayTree,
    *,
    step: int | None = None,
    every: int = 1,
    keep: int = 1,
) -> bool:
    """Saves a tree as a checkpoint, and deletes the oldest checkpoints.

    All processes must call it, with the same `path` and options. Every call returns
    once the checkpoint is on disk.

    Args:
        path: folder for the checkpoints of one run, on a file system of this machine; a
            leading `~` is the home folder. A missing folder is created.
        tree: any pytree of arrays of numbers, typed keys, numbers and bytes:
            `stream.state()`, the parameters, the state of an optimizer or of a buffer.
        step: number of the checkpoint, at least 0 and above all earlier numbers; None
            for the next number.
        every: interval, at least 1: the call saves only if `step` is a multiple of it.
        keep: number of newest checkpoints to keep, at least 1.

    Returns:
        Whether the tree was saved. A saved tree is on disk: no write continues in the
        background.

    Raises:
        ValueError: if `step` is not an int above all earlier numbers, or None while
            `every` is not 1; if `every` or `keep` is not an int of at least 1; if the
            tree has a leaf of another type, which the message names; inside `jit`.
        OSError: if `path` is not a folder and cannot be created.
        RuntimeError: if another process or thread of this machine is saving to the
            folder.
    """
    checks.check_outside_jit("checkpoint.save")
    every = checks.check_int("every", every)
    keep = checks.check_int("keep", keep)
    if step is not None:
        step = checks.check_int("step", step, least=0, most=None)
        if step % every:
            return False
    elif every > 1:
        raise ValueError(
            f"`step` must be an int if `every` is not 1, got None with every={every}."
        )
    specs = _describe("tree", tree)
    with _locked(path):
        existing = steps(path)
        lowest = existing[-1] + 1 if existing else 0
        step = lowest if step is None else step
        # Never replace a checkpoint: a killed process could leave neither version.
        step = checks.check_int("step", step, least=lowest, most=None)
        # All processes must call `gather`, although only the first process writes.
        leaves = [programs.gather(_words(leaf)) for leaf in jax.tree.leaves(tree)]
        arrays = [_bits(np.asarray(leaf)) for leaf in jax.device_get(leaves)]
        multihost_utils.sync_global_devices("all have listed the checkpoints")
        if jax.process_index() == 0:
            file = _file(path, step)
            for part in file.parent.glob(f"*{_SUFFIX}{files.UNFINISHED}"):
                part.unlink()  # left by a killed process
            with files.replace_file(file) as stream:
                version = np.array(__version__)
                np.savez(stream, np.array(specs), *arrays, version=version)
            # Delete old checkpoints only after the new checkpoint is on disk.
            for old in [*existing, step][:-keep]:
                _file(path, old).unlink()
        multihost_utils.sync_global_devices("the checkpoint is on disk")
    return True


def restore(path: str | Path, like: ArrayTree, *, step: int | None = None) -> ArrayTree:
    """Reads a tree that `save` wrote.

    Args:
        path: the folder passed to `save`.
        like: a tree with the saved structure, shapes and dtypes, or its
            `jax.eval_shape`. Values are not read, and bytes may have any length. A
            Python number also stands for an array of JAX's default dtype. For a
            stream, pass the `state()` of a new stream. Each restored array is placed on
            the devices and in the processes of the matching leaf.
        step: number of the checkpoint; None for the newest checkpoint.

    Returns:
        The tree, in the structure of `like`, with the saved bits.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ValueError: if `step` is not an int of at least 0; if the leaves of the
            checkpoint and `like` differ, and the message names the first one; if the
            checkpoint is damaged, and the message names the previous one.
    """
    if step is not None:
        step = checks.check_int("step", step, least=0, most=None)
    version, specs, saved = _read(path, step)
    # A Python number also stands for the array that JAX makes of it, for example
    # `step=0` in `TrainState.create` of flax, which becomes an array inside `jit`.
    expected = _describe("like", like)
    arrays = _describe("like", jax.tree.map(_narrow, like))
    pairs = itertools.zip_longest(expected, arrays, specs, fillvalue="no more")
    for like_spec, array_spec, saved_spec in pairs:
        if saved_spec not in (like_spec, array_spec):
            raise StructureError(
                f"`like` must have the leaves that were saved: {saved_spec}, "
                f"got {like_spec}. Version {version} of rollout saved the checkpoint, "
                f"and version {__version__} is installed."
            )
    # Free each array once it is converted, so that the tree is not in memory twice.
    remaining = collections.deque(saved)
    del saved
    return jax.tree.map(lambda old: _read_leaf(remaining.popleft(), old), like)


def steps(path: str | Path) -> list[int]:
    """Lists the numbers of the complete checkpoints in a folder, in ascending order.

    Ignores files that `save` did not write.
    """
    names = [x.name.removesuffix(_SUFFIX) for x in _folder(path).glob(f"*{_SUFFIX}")]
    return sorted(int(name) for name in names if name.isdecimal())


def _folder(path: str | Path) -> Path:
    """Returns the folder of a path, with `~` expanded."""
    if re.match(r"\w+:/", str(path)):  # gs://bucket would become a folder "gs:"
        raise ValueError(f"`path` must name a folder of this machine, got {path!r}.")
    return Path(path).expanduser()


def _file(path: str | Path, step: int | None) -> Path:
    return _folder(path) / f"{step}{_SUFFIX}"


@contextlib.contextmanager
def _locked(path: str | Path) -> Iterator[None]:
    """Creates the folder and locks it for a single writer until the block ends."""
    folder = _folder(path)
    if jax.process_index() > 0:  # the first process writes
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    error = RuntimeError(
        f"`path` must have one writer at a time, got {path}, to which another process "
        "or thread is saving."
    )
    with files.lock(folder, error):
        yield


def _read(
    path: str | Path, step: int | None
) -> tuple[str, list[str], list[np.ndarray]]:
    """Reads the version, the descriptions and the leaves of a checkpoint."""
    numbers = steps(path)
    number = numbers[-1] if step is None and numbers else step
    try:
        with zipfile.ZipFile(_file(path, number)) as archive:
            version = str(_read_array(archive, "version"))
            specs = _read_array(archive, "arr_0").tolist()
            names = [f"arr_{1 + i}" for i in range(len(specs))]
            return version, specs, [_read_array(archive, name) for name in names]
    except Exception as error:  # NumPy does not document the types
        if numbers != steps(path):  # replaced during the read
            return _read(path, step)
        if number not in numbers:
            raise FileNotFoundError(
                f"`path` must hold a checkpoint{'' if step is None else f' {step}'}, "
                f"got {path} with {numbers or 'none'}."
            ) from None
        older = [x for x in numbers if x < number]
        hint = f"`step={older[-1]}` is the previous one" if older else "it is the first"
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"Checkpoint {number} in {path} is damaged or not a checkpoint ({reason}); "
            f"{hint}. To continue without it, delete {_file(path, number).name}."
        ) from error


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as member:
        array = np.lib.format.read_array(member)
        # Read to the end, where `zipfile` compares the checksum, even if the shape is
        # damaged.
        member.read()
        return array


def _words(leaf: Any) -> jax.Array | np.ndarray:
    """Converts a leaf to an array of numbers."""
    if isinstance(leaf, bytes):
        return np.frombuffer(leaf, np.uint8)
    return trees.unwrap_keys(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _narrow(leaf: Any) -> Any:
    """Replaces a number of Python by the shape and dtype of JAX's array of it."""
    if isinstance(leaf, bytes) or hasattr(leaf, "dtype"):
        return leaf
    dtype = jax.dtypes.canonicalize_dtype(_as_array(leaf).dtype)
    return jax.ShapeDtypeStruct((), dtype)


def _as_array(leaf: Any) -> Any:
    """Converts Python numbers to arrays, and keeps arrays, shapes and typed keys."""
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


def _bits(array: np.ndarray) -> np.ndarray:
    """Views an array of a dtype that NumPy lacks (bfloat16, int4) as unsigned ints."""
    is_plain = array.dtype.isbuiltin == 1
    return array if is_plain else array.view(f"u{array.dtype.itemsize}")


def _read_leaf(array: np.ndarray, old: Any) -> Any:
    """Inverts `_words` and `_bits`: returns a leaf like `old`, on the same devices."""
    if isinstance(old, bytes):
        return array.tobytes()
    narrow, old = _narrow(old), _as_array(old)
    if array.dtype == narrow.dtype != old.dtype:
        old = narrow
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        impl = []  # read by tracing: `old` may be only a shape and dtype
        jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), old)
        is_array = isinstance(old, jax.Array)
        words = (
            trees.unwrap_keys(old)
            if is_array
            else jax.eval_shape(trees.unwrap_keys, old)
        )
        return jax.random.wrap_key_data(_read_leaf(array, words), impl=impl[0])
    array = array.view(old.dtype)
    # JAX narrows 64-bit types unless `jax_enable_x64` is set: return a NumPy array.
    is_wide = jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype
    if not isinstance(old, jax.Array | jax.ShapeDtypeStruct) or is_wide:
        return array
    # Copy with XLA: memory that NumPy owns cannot be donated.
    if old.sharding is None or not getattr(old, "committed", True):
        return jnp.copy(jnp.asarray(array))
    if old.sharding.is_fully_addressable:
        return jnp.copy(jax.device_put(array, old.sharding))
    # Each process places the shards of its devices.
    return jax.make_array_from_callback(old.shape, old.sharding, array.__getitem__)


def _describe(name: str, tree: ArrayTree) -> list[str]:
    """Describes every leaf by path, dtype and shape; raises if it cannot be saved."""
    descriptions = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        location = jax.tree_util.keystr(path) or "the root"
        if isinstance(leaf, bytes):
            descriptions.append(f"{location} bytes")
            continue
        array = _as_array(leaf)
        dtypes = np.number, np.bool_, jax.dtypes.prng_key
        is_masked = isinstance(leaf, np.ma.MaskedArray)  # a file has no masks
        if is_masked or not any(jnp.issubdtype(array.dtype, x) for x in dtypes):
            raise ValueError(
                f"`{name}` must have numbers, arrays of numbers or booleans, typed "
                f"keys and bytes, got {checks.describe(leaf)} at {location}."
            )
        shape = ",".join(map(str, array.shape))
        descriptions.append(f"{location} {array.dtype}[{shape}]")
    return descriptions
