"""The arrays that host environments write to, one slot for each environment.

Elements of a space are trees of dicts and tuples. `Parts` reads from the space, once,
where in such a tree its arrays are; everything else here works on flat lists of them,
without jax, because it runs in every step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rollout.envs.host.types import HostStep
from rollout.envs.spaces import Composite, Dict, Space, as_space, narrow, space_of
from rollout.envs.types import AnySpace, ArrayTree

WriteFn = Callable[[int, Any], None]
EmptyFn = Callable[[tuple[int, ...], Any], np.ndarray]


class Parts:
    """The arrays in the elements of a space.

    Attributes:
        paths: the keys that lead to each array; `[()]` if an element is an array.
        is_single: whether an element is an array itself.
        names: of each array, for messages, such as `obs['image']`.
        spaces: the space of each array.
        space: that of an element.
    """

    def __init__(self, space: AnySpace, name: str) -> None:
        found, self._structure = jax.tree_util.tree_flatten_with_path(
            _expand(space), is_leaf=lambda x: isinstance(x, Space)
        )
        self._name, self.space = name, space
        # The keys of jax's paths: `key` of a dict, `idx` of a tuple.
        self.paths: list[tuple[Any, ...]] = [
            tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path)
            for path, _ in found
        ]
        self.is_single = self.paths == [()]
        self.names = [name + jax.tree_util.keystr(path) for path, _ in found]
        self.spaces = [leaf for _, leaf in found]

    def flatten(self, tree: ArrayTree) -> list[Any]:
        """Returns the arrays of an element; raises `KeyError` if one is not there."""
        # Not by jax, to which an `OrderedDict`, as Gymnasium has them, is no dict.
        leaves = []
        for path in self.paths:
            leaf = tree
            for at, key in enumerate(path):
                try:
                    leaf = leaf[key]
                except (KeyError, IndexError):
                    where = "".join(f"[{x!r}]" for x in path[:at])
                    raise KeyError(f"{self._name}{where} without {key!r}") from None
            leaves.append(leaf)
        return leaves

    def unflatten(self, leaves: Sequence[Any]) -> ArrayTree:
        """Makes an element of its arrays."""
        return self._structure.unflatten(leaves)

    def map(self, fn: Callable[[Any], Any], tree: ArrayTree) -> ArrayTree:
        """Maps the arrays of an element."""
        return self._structure.unflatten([fn(leaf) for leaf in self.flatten(tree)])


class Layout(NamedTuple):
    """The arrays of what environments take and return."""

    obs: Parts
    action: Parts
    info: Parts


def make_layout(
    spaces: tuple[Any, Any],
    observe_info: Mapping[str, Any] | None,
    record_info: Mapping[str, Any] | None,
) -> Layout:
    """Makes the layout of environments with these spaces, in Gymnasium's terms."""
    obs, action = map(as_space, spaces)
    if observe_info:
        obs = Dict({"obs": obs, "info": space_like(observe_info)})
    info = space_like(record_info or {})
    return Layout(Parts(obs, "obs"), Parts(action, "action"), Parts(info, "info"))


class StepArrays:
    """Memory for the answers of `B` environments and for their actions.

    Attributes:
        obs, info, action: `[B, ...]` arrays, those of `Parts`.
        reward, terminated, truncated: `[B]`.
        obs_tree, info_tree: `[B, ...]`, the same arrays as elements of their spaces.
    """

    def __init__(
        self, layout: Layout, num_envs: int, empty: EmptyFn = np.zeros
    ) -> None:
        self._layout = layout
        self.obs, self.info, self.action = (
            [empty((num_envs, *x.shape), np.dtype(x.dtype)) for x in parts.spaces]
            for parts in (layout.obs, layout.info, layout.action)
        )
        self.reward = empty((num_envs,), np.dtype(np.float32))
        self.terminated = empty((num_envs,), np.dtype(bool))
        self.truncated = empty((num_envs,), np.dtype(bool))
        self.obs_tree = layout.obs.unflatten(self.obs)
        self.info_tree = layout.info.unflatten(self.info)

    def answer(
        self, broken: Mapping[int, BaseException], ids: np.ndarray | None = None
    ) -> HostStep:
        """Returns the step of some environments, or of all: then views, but `faulty`.

        Args:
            broken: the cause of each faulty environment, by its number.
            ids: `[K]` int32, the numbers of the environments; None for all.
        """
        faulty = np.zeros(len(self.reward), bool)
        # The arrays keep what a faulty environment wrote last: it means nothing.
        if broken:
            faulty[list(broken)] = True
        flags = self.terminated, self.truncated, faulty
        fields: Any = self.obs_tree, self.reward, *flags, self.info_tree
        if ids is not None:
            fields = jax.tree.map(lambda x: x[ids], fields)
            broken = {at: broken[at] for at in ids.tolist() if at in broken}
        return HostStep(*fields, causes=dict(broken))


def place_rows(tree: ArrayTree, where: Any, rows: ArrayTree) -> None:
    """Writes rows into the arrays of a tree, in place."""
    # The leaves are the arrays themselves, so that the tree has the new rows.
    for array, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(rows), strict=True):
        array[where] = leaf


def leaf_at(tree: Any, path: Sequence[Any]) -> Any:
    """Returns the array to which a path of `Parts` leads."""
    for key in path:
        tree = tree[key]
    return tree


def space_like(example: Any) -> AnySpace:
    """Returns the space of an example's shapes and dtypes, in numbers of 32 bits."""
    if isinstance(example, Mapping):
        parts = {name: space_like(part) for name, part in example.items()}
        # `Dict` refuses to be empty, as a space of observations or actions must not be.
        return Dict(parts) if parts else Composite(parts)
    example = np.asarray(example)
    if example.dtype.kind not in "biuf":
        raise ValueError(
            "`observe_info` and `record_info` must map keys of `info` to examples, "
            f"numbers or arrays, got {example.dtype}."
        )
    return space_of(jax.ShapeDtypeStruct(example.shape, narrow(example.dtype)))


def assign(
    arrays: Sequence[np.ndarray], index: Any, values: Sequence[Any], name: str
) -> None:
    """Writes `values` to slots of every array; raises if their shapes differ."""
    for array, value in zip(arrays, values, strict=True):
        value, shape = np.asarray(value), array[index].shape
        if value.shape != shape:  # NumPy would broadcast it
            raise ValueError(
                f"`{name}` must have shape {shape}, got shape {value.shape}."
            )
        array[index] = value


def writer(parts: Parts, arrays: Sequence[np.ndarray]) -> WriteFn:
    """Makes a function that writes one element to a slot, or raises if it is none."""
    fns = [leaf_writer(*pair) for pair in zip(arrays, parts.names, strict=True)]
    if parts.is_single:
        return fns[0]

    def write(number: int, tree: ArrayTree) -> None:
        for fn, leaf in zip(fns, parts.flatten(tree), strict=True):
            fn(number, leaf)

    return write


def leaf_writer(array: np.ndarray, name: str) -> WriteFn:
    """Makes a function that writes one value to a slot of an array."""
    shape, dtype = array.shape[1:], array.dtype

    # Runs once per environment, step and leaf, so it converts only where it must.
    def write(number: int, value: Any) -> None:
        if type(value) is not np.ndarray:
            value = np.asarray(value)
        if value.shape != shape:  # NumPy would broadcast it
            raise ValueError(f"{name} must have shape {shape}, got {value.shape}")
        if value.dtype != dtype:
            value = narrowed(value, dtype, name)
        array[number] = value

    return write


def narrowed(values: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """Casts to the dtype of a space; raises if it cannot represent an integer."""
    if values.dtype == dtype:
        return values
    # "same_kind" also narrows int64 to int32, which would wrap: that is checked below.
    if not np.can_cast(values.dtype, dtype, "same_kind"):
        raise TypeError(f"{name} must have dtype {dtype}, got {values.dtype}")
    if np.dtype(dtype).kind in "iu" and values.size:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        # Python's integers, since int64 numbers may not fit the dtype of the space.
        least, most = int(values.min()), int(values.max())
        if least < low or most > high:
            raise ValueError(
                f"{name} must be from {low} to {high}, as numbers have 32 bits, got "
                f"{most if most > high else least}"
            )
    if np.dtype(dtype).kind == "f" and values.dtype.kind in "iu" and values.size:
        largest = 2 ** (np.finfo(dtype).nmant + 1)
        value = max(int(values.max()), -int(values.min()))
        if value > largest:
            raise ValueError(
                f"{name} must be integers of at most {largest}, as {dtype} rounds "
                f"larger ones, got {value}"
            )
    return values.astype(dtype)


def _expand(space: AnySpace) -> Any:
    """Returns the tree of the spaces of all arrays."""
    if not isinstance(space, Composite):
        return space
    return jax.tree.map(_expand, space.spaces, is_leaf=lambda x: isinstance(x, Space))
