"""Saves and restores any pytree: bit for bit, and whole or not at all.

A checkpoint is a folder `path/<step>` that orbax writes under another name and renames
once every byte is on disk. So a process may be killed at any moment: earlier
checkpoints stay as they were, and half-written files are never read. A manifest holds
the dtype, shape and checksum of every leaf, and marks the folder as ours: no other is
ever deleted.

With `jax.distributed` all processes save to and restore from one shared folder. Each
briefly holds the whole tree in memory, and the first one writes.
"""

import itertools
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout import checks, multihost
from rollout.envs import prng
from rollout.envs.types import ArrayTree

_EMPTY = np.zeros(1, np.uint8)  # orbax cannot write an array of size 0
_BYTES = b"\n"  # prepended to bytes, so that these are not empty either
_TREE, _MANIFEST = "tree", "rollout_manifest"  # the two parts of a checkpoint
_UNFINISHED = "orbax-checkpoint-tmp"  # in the names of half-written folders


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
        path: folder for the checkpoints of one run and nothing else; it is made if it
            does not exist.
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
            there is anything else in the folder; if the tree has no leaf, or a leaf of
            another kind, which the message names.
    """
    every = checks.int_between("every", every)
    keep = checks.int_between("keep", keep)
    found = steps(path)
    _check_folder(Path(path), found)
    step = _number(found, step, every)
    if step % every:
        return False
    kinds = _describe("tree", tree)
    if not kinds:
        raise ValueError(f"`tree` must have a leaf to save, got {tree!r}.")
    leaves = _flatten(tree)
    manifest = [
        {**kind, "checksum": _checksum(leaf)}
        for kind, leaf in zip(kinds, leaves.values(), strict=True)
    ]
    with _open(path, create=True) as manager:
        from orbax.checkpoint import args

        parts = {
            _TREE: args.PyTreeSave(leaves),
            _MANIFEST: args.JsonSave({"leaves": manifest}),
        }
        manager.save(step, args=args.Composite(**parts))
    # Only now that the new one is on disk: a kill in between leaves one too many.
    if jax.process_index() == 0:
        _delete_old(Path(path), [*found, step][:-keep])
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
    found = steps(path)
    if step is not None:
        step = checks.int_between("step", step, least=0, most=None)
    step = found[-1] if step is None and found else step
    if step not in found:
        raise FileNotFoundError(
            f"`path` must hold a checkpoint{'' if step is None else f' {step}'}, got "
            f"{path} with {found or 'none'}."
        )
    saved, manifest = _read(Path(path), step, found)
    wanted = _describe("like", like)
    for want, got in itertools.zip_longest(wanted, manifest, fillvalue={}):
        if not want or want != {name: got.get(name) for name in want}:
            raise ValueError(
                f"`like` must have the leaves that were saved: {_text(got)}, got "
                f"{_text(want)}."
            )
    return _unflatten(saved, like)


def steps(path: str | Path) -> list[int]:
    """Lists the numbers of the whole checkpoints in a folder, ascending.

    Folders that `save` did not write are left out, whatever their names.
    """
    if not Path(path).is_dir():
        return []
    entries = [entry for entry in Path(path).iterdir() if entry.name.isdecimal()]
    return sorted(int(x.name) for x in entries if (x / _MANIFEST).is_dir())


def _check_folder(path: Path, found: list[int]) -> None:
    """Raises if the folder has other files: checkpoints are deleted by number."""
    ours = {str(step) for step in found}
    entries = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    others = [x for x in entries if x not in ours and _UNFINISHED not in x]
    others = [x for x in others if not x.startswith(".")]  # a file manager's
    if others:
        raise ValueError(
            "`path` must be a folder with nothing in it but checkpoints of this "
            f"version, got {path} with {others[0]!r}."
        )


def _read(path: Path, step: int, found: list[int]) -> tuple[dict, list[dict]]:
    """Reads the leaves of a checkpoint and its manifest; raises if it is damaged."""
    try:
        with _open(path, create=False) as manager:
            from orbax.checkpoint import args

            parts = {_TREE: args.PyTreeRestore(), _MANIFEST: args.JsonRestore()}
            read = manager.restore(step, args=args.Composite(**parts))
        saved, manifest = read[_TREE], read[_MANIFEST]["leaves"]
        # Damaged bytes may still be read without an error, as other numbers.
        sums = [_checksum(leaf) for _, leaf in sorted(saved.items())]
        if sums != [leaf["checksum"] for leaf in manifest]:
            raise ValueError("a checksum does not agree")
    except Exception as error:  # orbax does not document which
        before = [x for x in found if x < step]
        hint = (
            f"`step={before[-1]}` is the one before" if before else "there is no other"
        )
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"Checkpoint {step} in {path} is damaged ({reason}); {hint}."
        ) from error
    return saved, manifest


def _number(found: list[int], step: int | None, every: int) -> int:
    lowest = found[-1] + 1 if found else 0
    if step is None and every > 1:
        raise ValueError(
            f"`step` must be an int if `every` is not 1, got None with every={every}."
        )
    if step is None:
        return lowest
    # To replace a checkpoint would leave a moment with neither.
    return checks.int_between("step", step, least=lowest, most=None)


def _delete_old(path: Path, old: list[int]) -> None:
    """Deletes checkpoints, and the half-written ones of killed processes.

    Each is first renamed to a half-written one: a kill while its files are deleted must
    not leave a folder that looks like somebody else's.
    """
    # Two phases: rename all, then delete every folder of such a name, also those that a
    # process left when it was killed in either phase.
    for step in old:
        (path / str(step)).rename(path / f"{step}.{_UNFINISHED}-old")
    for entry in path.iterdir():
        number, _, rest = entry.name.partition(".")
        if number.isdecimal() and rest.startswith(_UNFINISHED):
            shutil.rmtree(entry)


def _open(path: str | Path, *, create: bool) -> Any:
    import orbax.checkpoint as ocp  # takes long to import

    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False, create=create
    )
    return ocp.CheckpointManager(Path(path).absolute(), options=options)


def _flatten(tree: ArrayTree) -> dict[str, np.ndarray]:
    """Returns the leaves as plain arrays, by position: paths need not be unique."""
    leaves = [multihost.gather(_words(leaf)) for leaf in jax.tree.leaves(tree)]
    arrays = [_bits(np.asarray(leaf)) for leaf in jax.device_get(leaves)]
    return {
        f"{number:05d}": array if array.size else _EMPTY
        for number, array in enumerate(arrays)
    }


def _checksum(leaf: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(leaf).data)


def _words(leaf: Any) -> jax.Array | np.ndarray:
    """Converts a leaf to an array of numbers."""
    if isinstance(leaf, bytes):
        return np.frombuffer(_BYTES + leaf, np.uint8)
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    return prng.words(leaf)


def _bits(array: np.ndarray) -> np.ndarray:
    """Views an array of a dtype that NumPy lacks (bfloat16, int4) as unsigned ints."""
    is_plain = array.dtype.isbuiltin == 1
    return array if is_plain else array.view(f"u{array.dtype.itemsize}")


def _unflatten(saved: dict[str, np.ndarray], like: ArrayTree) -> ArrayTree:
    names = iter(sorted(saved))
    # Each is dropped as soon as it is read: a large tree is not in memory twice.
    return jax.tree.map(lambda old: _read_leaf(saved.pop(next(names)), old), like)


def _read_leaf(array: np.ndarray, old: Any) -> Any:
    """Undoes `_words` and `_bits`: makes a leaf like `old`, on the same devices."""
    if isinstance(old, bytes):
        return array.tobytes()[len(_BYTES) :]
    old = old if hasattr(old, "dtype") else np.asarray(old)
    if _is_key(old):
        is_here = isinstance(old, jax.Array)
        words = prng.words(old) if is_here else jax.eval_shape(prng.words, old)
        return jax.random.wrap_key_data(_read_leaf(array, words), impl=_impl(old))
    if not old.size:
        return _place(np.zeros(old.shape, old.dtype), old)
    return _place(np.asarray(array).view(old.dtype), old)


def _impl(key: Any) -> Any:
    """Returns the implementation of a key, which may be only a shape and dtype."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def _place(array: np.ndarray, old: Any) -> Any:
    """Puts an array where `old` lies: on the host, or on its devices."""
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


def _describe(name: str, tree: ArrayTree) -> list[dict[str, Any]]:
    """Returns the path, dtype and shape of every leaf."""
    return [
        {"path": jax.tree_util.keystr(path), **_kind(name, path, leaf)}
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]


def _kind(name: str, path: tuple[Any, ...], leaf: Any) -> dict[str, Any]:
    """Returns the dtype and shape of a leaf; raises if it cannot be saved."""
    if isinstance(leaf, bytes):
        return {"dtype": "bytes", "shape": []}
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    kind = {"dtype": str(array.dtype), "shape": list(array.shape)}
    kinds = np.number, np.bool_, jax.dtypes.prng_key
    if not any(jnp.issubdtype(array.dtype, x) for x in kinds):
        raise ValueError(
            f"`{name}` must have numbers, arrays of numbers or booleans, typed keys "
            f"and bytes, got {checks.describe(leaf)} at "
            f"{jax.tree_util.keystr(path) or 'the root'}."
        )
    return kind


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _text(leaf: dict[str, Any]) -> str:
    if not leaf:
        return "no more"
    return f"{leaf['path'] or 'the root'} {leaf['dtype']}{leaf['shape']}"
