"""The arrays that host environments write to, one slot for each environment.

Observations are trees of dicts and tuples. The functions here walk them without jax,
because they run in every step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rollout import checks
from rollout.envs.host.types import HostStep
from rollout.envs.spaces import Dict, Tuple, as_space, narrow, space_of
from rollout.envs.types import AnySpace, ArrayTree

WriteFn = Callable[[int, Any], None]

_NUMBERS = frozenset({float, int, np.float32, np.float64})
_FLAGS = frozenset({bool, np.bool_})


class StepArrays(NamedTuple):
    """Memory for the answers of `B` environments and for their actions."""

    obs: ArrayTree  # [B, ...]
    reward: np.ndarray  # [B]
    terminated: np.ndarray  # [B]
    truncated: np.ndarray  # [B]
    info: ArrayTree  # [B, ...]
    action: ArrayTree  # [B, ...]


class Layout(NamedTuple):
    """The spaces that decide the structure, shapes and dtypes of `StepArrays`."""

    observation_space: AnySpace
    action_space: AnySpace
    info: Dict

    def make(
        self, num_envs: int, empty: Callable[[tuple[int, ...], Any], np.ndarray]
    ) -> StepArrays:
        """Makes the arrays with `empty(shape, dtype)`."""
        return StepArrays(
            obs=_arrays(self.observation_space, num_envs, empty),
            reward=empty((num_envs,), np.dtype(np.float32)),
            terminated=empty((num_envs,), np.dtype(bool)),
            truncated=empty((num_envs,), np.dtype(bool)),
            info=_arrays(self.info, num_envs, empty),
            action=_arrays(self.action_space, num_envs, empty),
        )


def make_layout(
    spaces: tuple[Any, Any],
    observe_info: Mapping[str, Any] | None,
    record_info: Mapping[str, Any] | None,
) -> Layout:
    """Makes the layout of environments with these spaces, in Gymnasium's terms."""
    obs, action = map(as_space, spaces)
    return Layout(with_info(obs, observe_info), action, space_like(record_info or {}))


def answer_all(arrays: StepArrays, broken: Mapping[int, BaseException]) -> HostStep:
    """Returns the step of all environments: views of their memory, except `faulty`."""
    faulty = np.zeros(len(arrays.reward), bool)
    if broken:
        faulty[list(broken)] = True
    return HostStep(
        obs=arrays.obs,
        reward=arrays.reward,
        terminated=arrays.terminated,
        truncated=arrays.truncated,
        faulty=faulty,
        info=arrays.info,
        causes=dict(broken),
    )


def answer(
    arrays: StepArrays, answered: Sequence[tuple[int, BaseException | None]]
) -> tuple[HostStep, np.ndarray]:
    """Returns the step of the environments that answered, and their numbers."""
    ids = np.asarray([number for number, _ in answered], np.int32)
    causes = {number: cause for number, cause in answered if cause is not None}
    step = HostStep(
        obs=pick(arrays.obs, ids),
        reward=arrays.reward[ids],
        terminated=arrays.terminated[ids],
        truncated=arrays.truncated[ids],
        faulty=np.asarray([cause is not None for _, cause in answered]),
        info=pick(arrays.info, ids),
        causes=causes,
    )
    return step, ids


def with_info(space: AnySpace, observe_info: Mapping[str, Any] | None) -> AnySpace:
    """Returns the space of observations with keys of `info` next to them."""
    if not observe_info:
        return space
    return Dict({"obs": space, "info": space_like(observe_info)})


def space_like(example: Any) -> AnySpace:
    """Returns the space of an example's shapes and dtypes, in numbers of 32 bits."""
    if isinstance(example, Mapping):
        return Dict({name: space_like(part) for name, part in example.items()})
    example = np.asarray(example)
    if example.dtype.kind not in "biuf":
        raise ValueError(
            "`observe_info` and `record_info` must map keys of `info` to examples, "
            f"numbers or arrays, got {example.dtype}."
        )
    return space_of(jax.ShapeDtypeStruct(example.shape, narrow(example.dtype)))


def pick(tree: ArrayTree, index: Any) -> ArrayTree:
    """Indexes every array; the results are views if `index` is a number or a slice."""
    if isinstance(tree, dict):
        return {name: pick(part, index) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(pick(part, index) for part in tree)
    return tree[index]


def assign(
    tree: ArrayTree, index: Any, values: ArrayTree, name: str = "values"
) -> None:
    """Writes `values` to slots of every array; raises if their shapes differ."""
    if isinstance(tree, dict):
        for key, part in tree.items():
            assign(part, index, values[key], name)
    elif isinstance(tree, tuple):
        for part, value in zip(tree, values, strict=True):
            assign(part, index, value, name)
    else:
        values, shape = np.asarray(values), tree[index].shape
        if values.shape != shape:  # NumPy would broadcast it
            raise ValueError(
                f"`{name}` must have shape {shape}, got shape {values.shape}."
            )
        tree[index] = values


def writer(space: AnySpace, arrays: ArrayTree, name: str) -> WriteFn:
    """Makes a function that writes one element to a slot, or raises if it is none."""
    if isinstance(space, Dict):
        parts = {
            key: writer(part, arrays[key], f"{name}[{key!r}]")
            for key, part in space.spaces.items()
        }

        def write_dict(number: int, value: Any) -> None:
            for key, write in parts.items():
                if key not in value:
                    raise KeyError(f"{name} without {key!r}")
                write(number, value[key])

        return write_dict
    if isinstance(space, Tuple):
        fns = [
            writer(part, arrays[at], f"{name}[{at}]")
            for at, part in enumerate(space.spaces)
        ]

        def write_tuple(number: int, value: Any) -> None:
            for write, part in zip(fns, value, strict=True):
                write(number, part)

        return write_tuple
    return _leaf_writer(arrays, name)


def narrowed(values: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """Casts to the dtype of a space; raises if it does not hold an integer."""
    if values.dtype == dtype:
        return values
    # "same_kind" also narrows int64 to int32, which would wrap: that is checked below.
    if not np.can_cast(values.dtype, dtype, "same_kind"):
        raise TypeError(f"{name} must have dtype {dtype}, got {values.dtype}")
    if np.dtype(dtype).kind in "iu" and values.size:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        least, most = int(values.min()), int(values.max())
        if least < low or most > high:
            raise ValueError(
                f"{name} must be from {low} to {high}, as numbers have 32 bits, got "
                f"{most if most > high else least}"
            )
    return values.astype(dtype)


def number(value: Any) -> Any:
    """Returns a reward; raises if it is not a number."""
    if type(value) in _NUMBERS:
        return value
    array = np.asarray(value)
    if array.shape != () or array.dtype.kind not in "biuf":
        raise TypeError(f"reward must be a number, got {checks.describe(value)}")
    return array


def flag(name: str, value: Any) -> Any:
    """Returns a flag; raises if it is not a bool."""
    if type(value) in _FLAGS:
        return value
    array = np.asarray(value)
    if array.shape != () or array.dtype != bool:
        raise TypeError(f"{name} must be a bool, got {checks.describe(value)}")
    return array


def _leaf_writer(arrays: np.ndarray, name: str) -> WriteFn:
    shape, dtype = arrays.shape[1:], arrays.dtype

    # Runs once per environment, step and leaf, so it converts only where it must.
    def write(number: int, value: Any) -> None:
        if type(value) is not np.ndarray:
            value = np.asarray(value)
        if value.shape != shape:  # NumPy would broadcast it
            raise ValueError(f"{name} must have shape {shape}, got {value.shape}")
        if value.dtype != dtype:
            value = narrowed(value, dtype, name)
        arrays[number] = value

    return write


def _arrays(
    space: AnySpace, num_envs: int, empty: Callable[[tuple[int, ...], Any], np.ndarray]
) -> ArrayTree:
    if isinstance(space, Dict):
        parts = space.spaces.items()
        return {name: _arrays(part, num_envs, empty) for name, part in parts}
    if isinstance(space, Tuple):
        return tuple(_arrays(part, num_envs, empty) for part in space.spaces)
    return empty((num_envs, *space.shape), np.dtype(space.dtype))
