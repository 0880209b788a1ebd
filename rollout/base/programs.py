"""Memoizes factories, and compares the programs of several processes.

JAX looks up compiled programs by function object. A factory that defines a function
returns a new object at every call, and JAX compiles again. `shared` returns the same
object for equal calls; `Static` and `static` convert objects and functions to static
arguments of `jit`. Static data is compared with the types of its numbers, since 1, 1.0
and True are equal in Python. `compare_processes` raises unless all processes of a run
have equal programs.
"""

import functools
import hashlib
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils

from rollout.base import checks

Fn = TypeVar("Fn", bound=Callable[..., Any])

_CACHE_SIZE = 256  # cached objects per factory


def compare_processes(name: str, facts: dict[str, object]) -> None:
    """Raises if the facts of any two processes differ. All processes must call it.

    Each call waits for all processes.

    Raises:
        ValueError: in every process, if any two processes differ.
    """
    # Compare checksums, since processes can exchange only arrays of equal shapes.
    words = [zlib.crc32(str(fact).encode()) for fact in facts.values()]
    all_words = multihost_utils.process_allgather(np.array(words, np.uint32))
    for index, (label, fact) in enumerate(facts.items()):
        mismatches = np.flatnonzero(all_words[:, index] != words[index])
        if mismatches.size:
            raise ValueError(
                f"`{name}` must be the same in all processes, got {label} {fact} in "
                f"this process and another value in process {mismatches[0]}."
            )


def is_elsewhere(x: Any) -> bool:
    """Returns whether a part of an array is only in other processes."""
    is_local = not isinstance(x, jax.Array) or x.is_fully_addressable
    return not (is_local or x.is_fully_replicated)


def gather(x: Any) -> Any:
    """Gathers an array as NumPy if parts are elsewhere; all processes must call it."""
    return multihost_utils.process_allgather(x, tiled=True) if is_elsewhere(x) else x


def shared(make: Fn) -> Fn:
    """Memoizes a factory: calls with equal arguments return the same object.

    Functions are equal if they are the same object; arrays are equal if they have the
    same type, shape, dtype, bits and devices; numbers also have the same type. The last
    256 objects are cached. While JAX traces, and for arguments that are neither
    hashable nor pytrees, every call returns a new object.
    """

    @functools.lru_cache(_CACHE_SIZE)
    def cached(call: "_Call") -> Any:
        return make(*call.args, **call.options)

    @functools.wraps(make)
    def get(*args: Any, **options: Any) -> Any:
        if not checks.is_tracing():
            try:
                return cached(_Call(args, options))
            except _NoHashError:
                pass
        return make(*args, **options)

    return cast(Fn, get)


def static(fn: Any, *args: Any) -> Any:
    """Returns a user's function as a static argument of `jit`, or None.

    Returns None if the function is not hashable, or if it may close over tracers,
    including tracers in the object of a bound method: tracers must not stay in the
    cache of `jit`.

    Args:
        fn: the function. A method of a hashable object is replaced by the cached method
            of an equal object.
        *args: arguments of the call of `fn`.
    """
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
    if is_traced or checks.is_tracing():
        return None
    try:
        hash(fn)
    except TypeError:
        return None
    if isinstance(fn, types.FunctionType):
        return fn
    try:
        return Static(fn)
    except TypeError:  # not a method of a hashable object: methods hash by identity
        return fn


class Static:
    """An object as a static argument of `jit`, also a function.

    Equal objects are different arguments if the types of their numbers differ. A method
    is compared by its object, which must be hashable.

    Attributes:
        value: the object, which is hashable.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        if isinstance(value, types.MethodType):
            value = value.__func__, value.__self__
        self._key = value, _number_types(value)
        self._hash = hash(self._key)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Calls the function."""
        return self.value(*args, **options)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key


def hash_of_types(*trees: Any, static: Any = ()) -> int:
    """Returns a hash of the structure of trees that includes types.

    Two kinds of trees have different hashes, but the jit cache treats them as equal:

    - trees that differ only in the class of a dataclass
      (`jax.tree_util.register_dataclass`): jax 0.10 and 0.11 consider them equal, and
      the jit cache of jax 0.10 compares only a few bits of their hashes before;
    - trees that differ only in the type of a number in a static field, such as 1 and
      1.0, or in the sign of a zero.

    Therefore all objects that contain an environment, for example a collector or the
    result of `vectorize`, store this hash as static data. Otherwise `jit` could run the
    program of another environment.

    Args:
        *trees: pytrees, whose leaves are ignored.
        static: further static data.
    """
    structure = jax.tree.structure(trees)
    return hash((structure, _number_types((structure, static))))


def _number_types(value: Any) -> Any:
    """Returns hashable data that differs between equal static data of other types."""
    if isinstance(value, jax.tree_util.PyTreeDef):
        node = value.node_data()
        children = tuple(map(_number_types, value.children()))
        return (children, _number_types(node[1])) if node else ()
    if isinstance(value, bool | int | float | complex | np.generic):
        return type(value), repr(value)  # 0.0 differs from -0.0
    if isinstance(value, tuple | list):
        return tuple(map(_number_types, value))
    if isinstance(value, Mapping):
        return tuple(map(_number_types, value.values()))
    if isinstance(value, types.FunctionType | type):
        return ()
    # Fields of a dataclass. The parent of a flax module refers back to the module.
    names = [x for x in getattr(value, "__dataclass_fields__", ()) if x != "parent"]
    return tuple(_number_types(getattr(value, x, None)) for x in names)


class _NoHashError(TypeError):
    pass


class _Call:
    """Arguments of a call, which are equal if their values are equal."""

    def __init__(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.args, self.options = args, options
        leaves, structure = jax.tree.flatten((args, options))
        values = *map(_value, leaves), structure
        try:
            self._values = *values, hash_of_types(args, options)
            self._hash = hash(self._values)
        except TypeError as error:
            raise _NoHashError from error

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self._values == other._values


def _value(leaf: Any) -> Any:
    """Returns a hashable value that differs between unequal leaves."""
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        if (
            isinstance(leaf, Tracer)
            or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            or is_elsewhere(leaf)
        ):
            raise _NoHashError
        # Hashing and comparing a digest is faster than comparing the bits.
        digest = hashlib.sha256(np.asarray(leaf).tobytes()).digest()
        placement = [getattr(leaf, name, None) for name in ("weak_type", "sharding")]
        return type(leaf), leaf.shape, leaf.dtype, digest, *placement
    return type(leaf), leaf, _number_types(leaf)
