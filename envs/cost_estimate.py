"""Estimates the work of a function from its jaxpr, before anything is compiled."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core

_HASH = 100  # operations that make one random word: twenty rounds of five
_CURVE = 10  # operations of a function such as a sine, roughly
_CURVES = ("sin", "cos", "tan", "exp", "log", "pow", "erf", "lgamma")


class Work(NamedTuple):
    """Work of one call of a function.

    Attributes:
        operations: elements that are computed, those of loops in every round.
        rounds: rounds of loops, one after the other; infinite if unknown.
    """

    operations: float
    rounds: float


def estimate(fn: Callable[..., Any], *args: Any) -> Work:
    """Estimates the work of `fn(*args)`, which is traced and not run."""
    return _of(jax.make_jaxpr(fn)(*args).jaxpr)


def _of(jaxpr: Any) -> Work:
    operations, rounds = 0.0, 0.0
    for eqn in jaxpr.eqns:
        inner = [_of(part) for part in _parts(eqn.params)]
        name, times = eqn.primitive.name, 1.0
        # Loops multiply, and their rounds come one after the other. Of the branches of
        # a conditional the costliest counts.
        if name == "scan":
            times = float(eqn.params["length"])
        elif name == "while":
            times = math.inf
        if times != 1.0:
            rounds += times * max(1.0, sum(part.rounds for part in inner))
            operations += times * sum(part.operations for part in inner)
        elif inner and name == "cond":
            rounds += max(part.rounds for part in inner)
            operations += max(part.operations for part in inner)
        elif inner:
            rounds += sum(part.rounds for part in inner)
            operations += sum(part.operations for part in inner)
        else:
            operations += _of_one(eqn)
    return Work(operations, rounds)


def _of_one(eqn: Any) -> float:
    """Counts the elements that one operation computes, or reads to compute fewer."""
    name = eqn.primitive.name
    written = sum(_size(x) for x in eqn.outvars)
    if name.startswith(("threefry", "random_")) and name not in _FREE:
        return _HASH * written
    if name.startswith(_CURVES):
        return _CURVE * written
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return written * math.prod(shape[axis] for axis in contracted)
    if name == "sort":
        return written * max(1.0, math.log2(max(written, 2.0)))
    if name.startswith(("reduce", "arg", "cum")):
        return max(written, *(_size(x) for x in eqn.invars))
    return written


_FREE = ("random_wrap", "random_unwrap")


def _size(variable: Any) -> float:
    return float(math.prod(getattr(variable.aval, "shape", ())))


def _parts(params: dict[str, Any]) -> Iterator[Any]:
    """Yields the jaxprs within an operation."""
    for value in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr):
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.ClosedJaxpr | core.Jaxpr)
