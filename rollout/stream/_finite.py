"""What of a transition is finite whatever happens: told from the program, unrun.

Most observations that are large are images, made of flags or small integers by a
conversion that gives no NaN and no infinity; so it would be a waste to read them again.
The proof goes along the jaxpr of a step with one bit per array, "surely finite". What
it does not know it holds for not proven, and that is then looked at in every step.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from rollout.collector import Collector
from rollout.stream import _faults
from rollout.types import Carry

# Finite if all that goes in is.
_KEEPING = frozenset(
    (
        "abs",
        "broadcast_in_dim",
        "ceil",
        "clamp",
        "concatenate",
        "copy",
        "cos",
        "dynamic_slice",
        "dynamic_update_slice",
        "erf",
        "expand_dims",
        "floor",
        "logistic",
        "max",
        "min",
        "neg",
        "pad",
        "reshape",
        "rev",
        "round",
        "scatter",
        "select_n",
        "sign",
        "sin",
        "slice",
        "squeeze",
        "stop_gradient",
        "tanh",
        "transpose",
    )
)
_CALLS = frozenset(
    (
        "checkpoint",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "jit",
        "pjit",
    )
)


def proved(collector: Collector, carry: Carry, params: Any) -> frozenset[str]:
    """Finds the fields that no step can make infinite or NaN.

    Args:
        collector: policy and environments.
        carry: a carry of its `init`.
        params: parameters of the policy.

    Returns:
        Names of `_faults.checked`. What a step hands to the next counts as finite if
        it is after `init`, and after every step that finds it so. Nothing is known of
        the arrays in `collector` and `params`: another stream may run the same program
        with others.
    """
    unknown = jax.tree.map(lambda _: False, (collector, params))

    def init(collector: Collector, key: chex.PRNGKey) -> Carry:
        return collector.init(key)

    def step(collector: Collector, params: Any, carry: Carry) -> Any:
        after, transition = collector.step(carry, params)
        return after, _faults.checked(transition)

    carry_flags = finite(init, (collector, carry.key), (unknown[0], True))
    while True:
        flags = *unknown, carry_flags
        after, checked = finite(step, (collector, params, carry), flags)
        kept = jax.tree.map(operator.and_, carry_flags, after)
        if kept == carry_flags:
            return frozenset(name for name, flag in checked.items() if flag)
        carry_flags = kept


def finite(fn: Any, args: tuple[Any, ...], flags: Any) -> Any:
    """Tells which outputs of `fn` are surely finite.

    Args:
        fn: a function of arrays to a tree of arrays.
        args: what it takes.
        flags: the tree of `args`, a bool per leaf: whether it is finite.

    Returns:
        The tree of the output, a bool per leaf.
    """
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    leaves = _walk(program, jax.tree.leaves(flags))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _walk(program: core.ClosedJaxpr, flags: Sequence[bool]) -> list[bool]:
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, map(_is_finite, program.consts), strict=True))
    known |= dict(zip(jaxpr.invars, flags, strict=True))

    def read(x: core.Var | core.Literal) -> bool:
        if _is_exact(x.aval):
            return True
        return _is_finite(x.val) if isinstance(x, core.Literal) else known[x]

    for equation in jaxpr.eqns:
        flags = _judge(equation, [read(x) for x in equation.invars])
        known |= dict(zip(equation.outvars, flags, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _judge(equation: core.JaxprEqn, flags: list[bool]) -> list[bool]:
    """Tells which outputs of one equation are finite."""
    name, params = equation.primitive.name, equation.params
    if name in _CALLS:
        body = params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"]
        closed = body if hasattr(body, "consts") else core.ClosedJaxpr(body, ())
        return _walk(closed, flags)
    if name == "optimization_barrier":
        return flags
    if name == "cond":
        branches = [_walk(branch, flags[1:]) for branch in params["branches"]]
        return [all(of_branches) for of_branches in zip(*branches, strict=True)]
    if name == "while":
        consts = flags[params["cond_nconsts"] :][: params["body_nconsts"]]
        start = params["cond_nconsts"] + params["body_nconsts"]
        return _settle(params["body_jaxpr"], consts, flags[start:], [])
    if name == "scan":
        # By their shapes, since the names of these numbers differ between jax 0.10
        # and 0.11: what is stacked has one axis more outside than inside.
        body = params["jaxpr"]
        stop = _num_alike(equation.invars, body.jaxpr.invars)
        start = stop - _num_alike(equation.outvars, body.jaxpr.outvars)
        return _settle(body, flags[:start], flags[start:stop], flags[stop:])
    return [_keeps(equation, flags)] * len(equation.outvars)


def _num_alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(x.aval.ndim == y.aval.ndim for x, y in pairs)


def _settle(
    body: core.ClosedJaxpr, consts: list[bool], carry: list[bool], rest: list[bool]
) -> list[bool]:
    """Of a loop: what stays finite however often the body runs."""
    while True:
        flags = _walk(body, [*consts, *carry, *rest])
        kept = [x and y for x, y in zip(carry, flags, strict=False)]
        if kept == carry:
            return [*carry, *flags[len(carry) :]]
        carry = kept


def _keeps(equation: core.JaxprEqn, flags: list[bool]) -> bool:
    """Tells whether an equation without a body makes finite numbers."""
    name, params, inputs = equation.primitive.name, equation.params, equation.invars
    if name == "iota":
        return True
    if not all(flags):
        return False
    if name == "convert_element_type":
        return _holds(equation.outvars[0].aval.dtype, inputs[0].aval.dtype)
    if name == "gather":
        fills = params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
        return not fills or _is_finite(params["fill_value"])
    if name == "mul":
        return any(_size(x, np.max) <= 1 for x in inputs)
    if name == "div":
        return _size(inputs[1], np.min) >= 1
    return name in _KEEPING


def _size(x: core.Var | core.Literal, most: Callable[[np.ndarray], float]) -> float:
    """The largest, or smallest, size of a number that the program gives; else NaN."""
    return float(most(np.abs(x.val))) if isinstance(x, core.Literal) else np.nan


def _holds(new: np.dtype, old: np.dtype) -> bool:
    """Tells whether every finite number of one dtype is finite in another."""
    if not jnp.issubdtype(new, jnp.floating):
        return False
    if old == np.dtype(bool):
        return True
    most = jnp.finfo if jnp.issubdtype(old, jnp.inexact) else jnp.iinfo
    return float(most(old).max) <= float(jnp.finfo(new).max)


def _is_exact(aval: Any) -> bool:
    return not jnp.issubdtype(aval.dtype, jnp.inexact)


def _is_finite(x: Any) -> bool:
    if x is None or isinstance(x, jax.core.Tracer):
        return False
    if _is_exact(jax.typeof(x)):
        return True
    return bool(np.isfinite(np.asarray(x)).all())
