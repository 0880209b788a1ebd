"""Checkpoints of any pytree: whole or not there at all, and bit for bit.

A checkpoint is a folder `path/<step>` that orbax writes under another name and renames
when every byte is on disk; so a process that is killed at any moment leaves the ones
before as they were, and what it left half written is never read.
"""

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from envs import keys
from rollout import checks

_EMPTY = np.zeros(1, np.uint8)  # orbax has no form for an array of no entries


def save(
    path: str | Path,
    tree: chex.ArrayTree,
    *,
    step: int | None = None,
    every: int = 1,
    keep: int = 1,
) -> bool:
    """Saves a tree, and forgets the oldest ones.

    Args:
        path: folder of the checkpoints of one run; it is made if it is not there.
        tree: any pytree of arrays, typed keys and numbers: `stream.state()`, the
            parameters, the state of an optimizer or of a buffer.
        step: number of the checkpoint, at least 0 and above those of the ones before;
            None for the next one.
        every: saves only where `step` is a multiple of it, at least 1.
        keep: how many to keep, the newest ones, at least 1.

    Returns:
        Whether it was saved. Then it is on disk: nothing goes on in the background.

    Raises:
        ValueError: if `step` is not an int above those of the ones before, or None
            where `every` is not 1; if `every` or `keep` is not an int of at least 1.
    """
    checks.count("every", every)
    checks.count("keep", keep)
    step = _number(steps(path), step, every)
    if step % every:
        return False
    with _open(path, keep) as manager:
        from orbax.checkpoint import args

        manager.save(step, args=args.StandardSave(_flatten(tree)))
    return True


def restore(
    path: str | Path, like: chex.ArrayTree, *, step: int | None = None
) -> chex.ArrayTree:
    """Reads a tree that `save` wrote.

    Args:
        path: the folder given to `save`.
        like: a tree of the structure, shapes and dtypes that were saved; its values
            are not read. A new stream's `state()` serves for a stream.
        step: number of the checkpoint, None for the newest one that is whole.

    Returns:
        The tree, of the structure of `like`, with the bits that were saved.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ValueError: if it holds other leaves than `like`.
    """
    found = steps(path)
    step = found[-1] if step is None and found else step
    if step not in found:
        raise FileNotFoundError(
            f"`path` must hold a checkpoint{'' if step is None else f' {step}'}, got "
            f"{path} with {found or 'none'}."
        )
    with _open(path, None) as manager:
        from orbax.checkpoint import args

        wanted = _flatten(like)
        saved = manager.restore(step, args=args.StandardRestore())
        if _kinds(saved) != _kinds(wanted):
            raise ValueError(
                f"`like` must have the leaves that were saved, {_kinds(saved)}, got "
                f"{_kinds(wanted)}."
            )
    return _unflatten(saved, like)


def steps(path: str | Path) -> list[int]:
    """The numbers of the checkpoints in a folder that are whole, ascending."""
    if not Path(path).is_dir():
        return []
    names = [entry.name for entry in Path(path).iterdir() if entry.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def _number(found: list[int], step: int | None, every: int) -> int:
    lowest = found[-1] + 1 if found else 0
    if step is None and every > 1:
        raise ValueError(f"`every` counts by `step`, got None with every={every}.")
    if step is None:
        return lowest
    # Replacing one would leave a moment with neither.
    if isinstance(step, bool) or not isinstance(step, int) or step < lowest:
        raise ValueError(f"`step` must be an int of at least {lowest}, got {step!r}.")
    return step


def _open(path: str | Path, keep: int | None) -> Any:
    import orbax.checkpoint as ocp  # takes long to import

    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False, create=keep is not None
    )
    return ocp.CheckpointManager(Path(path).absolute(), options=options)


def _flatten(tree: chex.ArrayTree) -> dict[str, np.ndarray]:
    """The leaves as plain arrays, by their position: names alone need not differ."""
    leaves = jax.device_get(jax.tree.leaves(keys.words(_arrays(tree))))
    arrays = [np.asarray(leaf) for leaf in leaves]
    return {
        f"{number:05d}": array if array.size else _EMPTY
        for number, array in enumerate(arrays)
    }


def _unflatten(saved: dict[str, np.ndarray], like: chex.ArrayTree) -> chex.ArrayTree:
    words = keys.words(_arrays(like))
    arrays = iter([array for _, array in sorted(saved.items())])

    def read(old: chex.Array) -> chex.Array:
        array = next(arrays)
        if not old.size:
            return old
        return np.asarray(array) if isinstance(old, np.ndarray) else jnp.asarray(array)

    return keys.like(jax.tree.map(read, words), _arrays(like))


def _arrays(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Numbers become NumPy arrays; arrays stay what they are."""
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array | np.ndarray) else np.asarray(x), tree
    )


def _kinds(flat: dict[str, np.ndarray]) -> list[str]:
    return [f"{x.dtype}{list(x.shape)}" for _, x in sorted(flat.items())]
