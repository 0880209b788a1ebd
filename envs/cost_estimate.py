"""Estimates the cost of a function from its jaxpr, without compiling it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

_HASH = 100  # operations per random word: twenty rounds of five
_HASHES = ("random_bits", "random_fold_in", "random_split", "random_seed")
_SLICES = ("dynamic_slice", "gather", "slice")


class Work(NamedTuple):
    """Cost of one call of a function.

    Attributes:
        operations: number of computed elements, counted in every round of a loop.
        rounds: number of sequential loop rounds; infinite if unknown.
        equations: number of equations in the jaxpr, inner jaxprs included.
    """

    operations: float
    rounds: float
    equations: int


def estimate(fn: Callable[..., Any], *args: Any) -> Work:
    """Estimates the cost of `fn(*args)`; traces the function without running it."""
    return _estimate_jaxpr(jax.make_jaxpr(fn)(*args).jaxpr)


def inner_programs(eqn: Any) -> list[Any]:
    """Returns the inner jaxprs of an equation, such as the body of a `scan`."""
    jaxpr_types = core.ClosedJaxpr, core.Jaxpr
    # Primitives store jaxprs under many names: `jaxpr`, `branches`, `body_jaxpr`.
    params = list(eqn.params.values())
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, jaxpr_types))
    return [getattr(x, "jaxpr", x) for x in leaves if isinstance(x, jaxpr_types)]


def _estimate_jaxpr(jaxpr: Any) -> Work:
    operations, rounds, equations = 0.0, 0.0, len(jaxpr.eqns)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = list(map(_estimate_jaxpr, inner_programs(eqn)))
        equations += sum(work.equations for work in inner)
        if inner:
            # A loop multiplies the cost of its body by its length. A conditional costs
            # as much as its most expensive branch. A choice by platform costs as much
            # as its cheapest branch, since accelerators take the simple branch.
            loops = {"scan": eqn.params.get("length"), "while": math.inf}
            is_by_platform = eqn.params.get("branches_platforms") is not None
            branch = min if is_by_platform else max
            total, length = branch if name == "cond" else sum, loops.get(name)
            inner_rounds = total(work.rounds for work in inner)
            rounds += length * max(1.0, inner_rounds) if length else inner_rounds
            operations += (length or 1) * total(work.operations for work in inner)
            continue
        read, written = (
            [math.prod(getattr(x.aval, "shape", ())) for x in variables]
            for variables in (eqn.invars, eqn.outvars)
        )
        if name.startswith("threefry") or name in _HASHES:
            operations += _HASH * sum(written)
        elif name in _SLICES:
            operations += sum(written)
        else:  # a matrix product or a sum reads more elements than it writes
            operations += max(sum(written), *read, 0)
    return Work(operations, rounds, equations)
