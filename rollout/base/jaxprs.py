"""Reads jaxprs: the cost of a function, and the values that it closes over."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

from rollout.base import trees
from rollout.base.types import ArrayTree

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


def estimate_cost(fn: Callable[..., Any], *args: Any) -> Work:
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
        input_sizes, output_sizes = (
            [math.prod(getattr(x.aval, "shape", ())) for x in variables]
            for variables in (eqn.invars, eqn.outvars)
        )
        if name.startswith("threefry") or name in _HASHES:
            operations += _HASH * sum(output_sizes)
        elif name in _SLICES:
            operations += sum(output_sizes)
        else:  # a matrix product or a sum reads more elements than it writes
            operations += max(sum(output_sizes), *input_sizes, 0)
    return Work(operations, rounds, equations)


def hoist(
    fn: Callable[..., ArrayTree], *args: ArrayTree
) -> tuple[Callable[..., ArrayTree], list[jax.Array]]:
    """Converts the values that `fn` closes over to an explicit first argument.

    Use it for `custom_jvp` and `custom_vmap`, which reject functions that close over
    differentiated or mapped values.

    Returns:
        The converted function and the list of values. The list has words instead of
        typed keys.
    """
    program, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    structure = jax.tree.structure(shape)
    consts = jax.eval_shape(lambda: program.consts)

    def hoisted(values: list[jax.Array], *args: ArrayTree) -> ArrayTree:
        values = trees.wrap_keys(values, trees.blank(consts))
        flat_fn = core.jaxpr_as_fun(core.ClosedJaxpr(program.jaxpr, values))
        return structure.unflatten(flat_fn(*jax.tree.leaves(args)))

    return hoisted, trees.unwrap_keys(program.consts)
