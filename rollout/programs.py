"""Lets equal objects share compiled programs.

jax finds a compiled program by what it was made of: functions, and objects that hold
functions. Two policies made by equal calls would hold two functions that jax cannot
know to be the same. `shared` returns the first of equal objects; `static` is what a
user's function becomes as a static argument of `jit`.
"""

import functools
import hashlib
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from rollout import checks, multihost

Fn = TypeVar("Fn", bound=Callable[..., Any])

_MOST = 256  # objects of each kind that are kept


def shared(make: Fn) -> Fn:
    """Returns a function that makes one object for equal arguments.

    Functions are equal if they are the same; arrays if they have the same type, shape,
    dtype, bits and devices. The last 256 objects are kept. While jax traces, and for
    arguments without a hash that are no pytrees, every call makes a new object.
    """

    @functools.lru_cache(_MOST)
    def made(call: "_Call") -> Any:
        return make(*call.args, **call.options)

    @functools.wraps(make)
    def get(*args: Any, **options: Any) -> Any:
        if not checks.is_tracing():
            try:
                return made(_Call(args, options))
            except _NoHashError:
                pass
        return make(*args, **options)

    return cast(Fn, get)


def static(fn: Any, *args: Any) -> Any:
    """Returns a user's function as a static argument of `jit`, or None.

    None if it has no hash, or if it may read tracers, also by a bound method whose
    object has others at the next call: they must not stay in the cache of `jit`.

    Args:
        fn: the function. A method of an object with a hash becomes the first one of an
            equal object.
        *args: what `fn` will be called with.
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
        except TypeError:  # an object without a hash: the method has one by identity
            pass
    return fn


_method = functools.lru_cache(_MOST)(types.MethodType)


class _NoHashError(TypeError):
    pass


class _Call:
    """Arguments of a call, equal to others with the same values."""

    def __init__(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.args, self.options = args, options
        leaves, structure = jax.tree.flatten((args, options))
        # jax 0.10 and 0.11 take trees for equal that differ in a class only, and give
        # them other hashes.
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
    """Returns a value that only an equal leaf has."""
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        if (
            isinstance(leaf, Tracer)
            or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            or multihost.is_elsewhere(leaf)
        ):
            raise _NoHashError
        # A digest is hashed and compared faster than the bits.
        digest = hashlib.sha256(np.asarray(leaf).tobytes()).digest()
        where = [getattr(leaf, name, None) for name in ("weak_type", "sharding")]
        return type(leaf), leaf.shape, leaf.dtype, digest, *where
    # By its text, 0.0 is not -0.0, and not 0 either.
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf
