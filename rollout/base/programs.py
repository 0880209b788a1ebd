"""Memoizes factories, and compares the programs of several processes.

JAX looks up compiled programs by function object. A factory that defines a function
returns a new object at every call, and JAX compiles again. `shared` returns the same
object for equal calls; `static` converts a user's function to a static argument of
`jit`. `compare_processes` raises unless all processes of a run have equal programs.
"""

import functools
import hashlib
import types
import zlib
from collections.abc import Callable
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
    same type, shape, dtype, bits and devices. The last 256 objects are cached. While
    JAX traces, and for arguments that are neither hashable nor pytrees, every call
    returns a new object.
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
    if isinstance(fn, types.MethodType):
        try:
            return _method(fn.__func__, fn.__self__)
        except TypeError:  # not a hashable object: methods hash by identity
            pass
    return fn


_method = functools.lru_cache(_CACHE_SIZE)(types.MethodType)


class _NoHashError(TypeError):
    pass


class _Call:
    """Arguments of a call, which are equal if their values are equal."""

    def __init__(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.args, self.options = args, options
        leaves, structure = jax.tree.flatten((args, options))
        # In JAX 0.10 and 0.11, trees that differ only in a class compare equal but have
        # different hashes.
        values = *map(_value, leaves), structure
        try:
            self._values = *values, hash(structure)
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
    # Compare floats by text: 0.0 differs from -0.0 and from 0.
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf
