"""Estimates the work of a function from its jaxpr, before anything is compiled."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

_HASH = 100  # operations that make one random word: twenty rounds of five
_HASHES = ("random_bits", "random_fold_in", "random_split", "random_seed")
_SLICES = ("dynamic_slice", "gather", "slice")


class Work(NamedTuple):
    """Work of one call of a function.

    Attributes:
        operations: elements that are computed, those of loops in every round.
        rounds: rounds of loops, one after the other; infinite if unknown.
        equations: operations of the program as it is written, each once.
    """

    operations: float
    rounds: float
    equations: int


def estimate(fn: Callable[..., Any], *args: Any) -> Work:
    """Estimates the work of `fn(*args)`, which is traced and not run."""
    return _of(jax.make_jaxpr(fn)(*args).jaxpr)


def inner_programs(eqn: Any) -> list[Any]:
    """Returns the programs in an equation: of a scan, a `cond`, a jitted function."""
    kinds = core.ClosedJaxpr, core.Jaxpr
    # Primitives keep programs under many names: `jaxpr`, `branches`, `body_jaxpr`.
    params = list(eqn.params.values())
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, kinds))
    return [getattr(x, "jaxpr", x) for x in leaves if isinstance(x, kinds)]


def _of(jaxpr: Any) -> Work:
    operations, rounds, equations = 0.0, 0.0, len(jaxpr.eqns)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = list(map(_of, inner_programs(eqn)))
        equations += sum(part.equations for part in inner)
        if inner:
            # Loops multiply, and their rounds come one after the other. The costliest
            # branch of a conditional counts, and the cheapest one of a choice by
            # platform, since accelerators take the plain one.
            loops = {"scan": eqn.params.get("length"), "while": math.inf}
            is_by_platform = eqn.params.get("branches_platforms") is not None
            branch = min if is_by_platform else max
            total, times = branch if name == "cond" else sum, loops.get(name)
            rounds_inside = total(part.rounds for part in inner)
            rounds += times * max(1.0, rounds_inside) if times else rounds_inside
            operations += (times or 1) * total(part.operations for part in inner)
            continue
        read, written = (
            [math.prod(getattr(x.aval, "shape", ())) for x in variables]
            for variables in (eqn.invars, eqn.outvars)
        )
        if name.startswith("threefry") or name in _HASHES:
            operations += _HASH * sum(written)
        elif name in _SLICES:
            operations += sum(written)
        else:  # a product of matrices or a sum reads more than it writes
            operations += max(sum(written), *read, 0)
    return Work(operations, rounds, equations)
