"""The arrays that host environments write to, with one slot per environment.

Elements of a space are trees of dicts and tuples. `SpaceLeaves` computes the paths of
the arrays in such a tree once per space. All other functions work on flat lists of
arrays, without jax, because they run at every step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import SequenceKey

from rollout.envs.host.types import HostStep
from rollout.envs.spaces import (
    Composite,
    Dict,
    Discrete,
    Repeated,
    Space,
    as_space,
    narrow,
    space_of,
)
from rollout.envs.types import AnySpace, ArrayTree

WriteFn = Callable[[int, Any], None]
EmptyFn = Callable[[tuple[int, ...], Any], np.ndarray]


class SpaceLeaves:
    """The arrays in the elements of a space.

    Attributes:
        paths: the keys that lead to each array; `[()]` if an element is an array.
        is_single: whether an element is an array itself.
        names: the name of each array in messages, for example `obs['image']`.
        spaces: the space of each array.
        space: the space of an element.
    """

    def __init__(self, space: AnySpace, name: str) -> None:
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(
            _expand(space), is_leaf=lambda x: isinstance(x, Space)
        )
        self._name, self.space = name, space
        # In paths of jax, a dict key has the attribute `key`, a tuple index has `idx`.
        self.paths: list[tuple[Any, ...]] = [
            tuple(x.idx if isinstance(x, SequenceKey) else x.key for x in path)
            for path, _ in leaves
        ]
        self.is_single = self.paths == [()]
        self.names = [name + jax.tree_util.keystr(path) for path, _ in leaves]
        self.spaces = [leaf for _, leaf in leaves]

    def flatten(self, tree: ArrayTree) -> list[Any]:
        """Returns the arrays of an element; raises `KeyError` if one is missing."""
        # jax would not treat Gymnasium's `OrderedDict` as a dict.
        leaves = []
        for path in self.paths:
            leaf = tree
            for depth, key in enumerate(path):
                try:
                    leaf = leaf[key]
                except (KeyError, IndexError, TypeError):
                    parent = "".join(f"[{x!r}]" for x in path[:depth])
                    raise KeyError(f"{self._name}{parent} without {key!r}") from None
            leaves.append(leaf)
        return leaves

    def unflatten(self, leaves: Sequence[Any]) -> ArrayTree:
        """Builds an element from its arrays."""
        return self._structure.unflatten(leaves)

    def map(self, fn: Callable[[Any], Any], tree: ArrayTree) -> ArrayTree:
        """Applies a function to the arrays of an element."""
        return self._structure.unflatten([fn(leaf) for leaf in self.flatten(tree)])


class Layout(NamedTuple):
    """The arrays of the observations, actions and infos of environments."""

    obs: SpaceLeaves
    action: SpaceLeaves
    info: SpaceLeaves


def make_layout(
    spaces: tuple[Any, Any],
    observe_info: Mapping[str, Any] | None,
    record_info: Mapping[str, Any] | None,
) -> Layout:
    """Returns the layout of environments with these observation and action spaces."""
    obs, action = map(as_space, spaces)
    if observe_info:
        obs = Dict({"obs": obs, "info": space_like(observe_info)})
    info = space_like(record_info or {})
    return Layout(
        SpaceLeaves(obs, "obs"),
        SpaceLeaves(action, "action"),
        SpaceLeaves(info, "info"),
    )


class StepArrays:
    """Memory for the outputs and the actions of `B` environments.

    Attributes:
        obs, info, action: `[B, ...]` arrays in the order of `SpaceLeaves`.
        reward, terminated, truncated: `[B]` arrays.
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
        """Returns the step of all environments as views, or of a subset as copies.

        Args:
            broken: exception of each faulty environment, by index.
            ids: `[K]` int32, indices of the environments; None for all.
        """
        faulty = np.zeros(len(self.reward), bool)
        # The rows of faulty environments contain stale values.
        if broken:
            faulty[list(broken)] = True
        flags = self.terminated, self.truncated, faulty
        fields: Any = self.obs_tree, self.reward, *flags, self.info_tree
        if ids is not None:
            fields = jax.tree.map(lambda x: x[ids], fields)
            broken = {i: broken[i] for i in ids.tolist() if i in broken}
        return HostStep(*fields, causes=dict(broken))


def place_rows(tree: ArrayTree, index: Any, rows: ArrayTree) -> None:
    """Writes rows into the arrays of a tree, in place."""
    # The leaves are NumPy arrays, so writing to a leaf changes the tree.
    for array, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(rows), strict=True):
        array[index] = leaf


def leaf_at(tree: Any, path: Sequence[Any]) -> Any:
    """Returns the array at a path of `SpaceLeaves`."""
    for key in path:
        tree = tree[key]
    return tree


def space_like(example: Any) -> AnySpace:
    """Returns a space with the shapes and 32-bit dtypes of an example."""
    if isinstance(example, Mapping):
        parts = {name: space_like(part) for name, part in example.items()}
        # An empty `Dict` raises, because observations and actions must not be empty.
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
    """Writes one value to `array[index]` of every array; raises if a shape differs."""
    for array, value in zip(arrays, values, strict=True):
        value, shape = np.asarray(value), array[index].shape
        if value.shape != shape:  # NumPy would broadcast it
            raise ValueError(
                f"`{name}` must have shape {shape}, got shape {value.shape}."
            )
        array[index] = value


def writer(parts: SpaceLeaves, arrays: Sequence[np.ndarray]) -> WriteFn:
    """Returns a function that writes one element to a slot and checks its arrays."""
    fns = [leaf_writer(*pair) for pair in zip(arrays, parts.names, strict=True)]
    if parts.is_single:
        return fns[0]

    def write(number: int, tree: ArrayTree) -> None:
        for fn, leaf in zip(fns, parts.flatten(tree), strict=True):
            fn(number, leaf)

    return write


def leaf_writer(array: np.ndarray, name: str) -> WriteFn:
    """Returns a function that writes one value to a slot of an array and checks it."""
    shape, dtype = array.shape[1:], array.dtype

    # Convert only if necessary: `write` runs per environment, step and leaf.
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
    # "same_kind" also permits int64 to int32. The range is checked below.
    if not np.can_cast(values.dtype, dtype, "same_kind"):
        raise TypeError(f"{name} must have dtype {dtype}, got {values.dtype}")
    if np.dtype(dtype).kind in "iu" and values.size:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        # Compare as Python integers: int64 may not fit the dtype of the space.
        min_value, max_value = int(values.min()), int(values.max())
        if min_value < low or max_value > high:
            raise ValueError(
                f"{name} must be from {low} to {high}, since jax uses 32 bits, got "
                f"{max_value if max_value > high else min_value}"
            )
    if np.dtype(dtype).kind == "f" and values.dtype.kind in "iu" and values.size:
        largest = 2 ** (np.finfo(dtype).nmant + 1)
        value = max(int(values.max()), -int(values.min()))
        if value > largest:
            raise ValueError(
                f"{name} must be integers of at most {largest}, since {dtype} rounds "
                f"larger integers, got {value}"
            )
    return values.astype(dtype)


def _expand(space: AnySpace) -> Any:
    """Returns a tree with the space of each array."""
    is_space = lambda x: isinstance(x, Space)  # noqa: E731
    if isinstance(space, Repeated):
        parts = _expand(space.space)
        return jax.tree.map(lambda x: Repeated(x, space.num), parts, is_leaf=is_space)
    if not isinstance(space, Composite):
        return space
    return jax.tree.map(_expand, space.spaces, is_leaf=is_space)


def batched_action(space: Any) -> Callable[[ArrayTree], Any]:
    """Returns a function that converts `[B, ...]` actions to Gymnasium's dtypes.

    The function takes a tree with the structure of `as_space(space)` and returns a
    copy, because environments store actions and some write to them.

    Args:
        space: action space of a single environment, of Gymnasium or of this package.
    """
    parts, dtypes = SpaceLeaves(as_space(space), "action"), []
    if isinstance(space, Space):
        dtypes = [np.dtype(leaf.dtype) for leaf in parts.spaces]
    # Read dtypes from Gymnasium's spaces: `as_space` narrows them to 32 bits.
    for path in () if dtypes else parts.paths:
        leaf: Any = space
        for key in path:
            leaf = getattr(leaf, "spaces", leaf)[key]
        dtypes.append(np.dtype(leaf.dtype))
    if parts.is_single:
        return lambda action: np.array(action, dtypes[0])

    def batch(action: ArrayTree) -> Any:
        leaves = map(np.array, parts.flatten(action), dtypes)
        return parts.unflatten(list(leaves))

    return batch


def split_action(space: Any) -> Callable[[ArrayTree], Sequence[Any]]:
    """Returns a function that splits `[B, ...]` actions into `B` Gymnasium actions.

    Each action is valid for `gymnasium.Env.step`: a NumPy scalar for `Discrete`, and
    otherwise an array in the dtype of the space, a dict or a tuple.

    Args:
        space: action space of a single environment, as in `batched_action`.
    """
    parts, batch = SpaceLeaves(as_space(space), "action"), batched_action(space)
    if isinstance(parts.space, Discrete):  # a fast path for the most common case
        return lambda action: list(batch(action))

    def split(action: ArrayTree) -> Sequence[Any]:
        leaves = parts.flatten(batch(action))
        columns = [
            list(leaf) if isinstance(part, Discrete) else list(map(np.asarray, leaf))
            for leaf, part in zip(leaves, parts.spaces, strict=True)
        ]
        if parts.is_single:
            return columns[0]
        return [parts.unflatten(row) for row in zip(*columns, strict=True)]

    return split
