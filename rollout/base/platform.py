"""Chooses implementations by platform, with bitwise equal results.

The platform is the target of the compiled program, never the default backend of the
process.

On a GPU launches are costly. A loop of unknown length is also costly, since the host
reads the predicate before every round while the GPU waits. On a GPU, `steps_while`
therefore checks the predicate once per block of steps, `choose` selects an
implementation without loops, and `scan` computes several rows per iteration, which is
also faster on a TPU. On a CPU, loops of a few rounds are cheap. `to_host` fetches
results for a loop in Python, and `blank_on` makes zeros on devices.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout.base import programs, trees
from rollout.base.jaxprs import estimate_cost
from rollout.base.types import ArrayTree

BLOCK = 8  # steps between two reads of the predicate on a GPU
# A step of this many equations is not unrolled: unrolling would save no launches, and
# XLA would take three times as long to compile. CartPole has 900 equations, SMAX
# 10,000, and the ant of brax 29,000.
_LARGE = 15_000

_State = TypeVar("_State", bound=ArrayTree)
_Row = TypeVar("_Row", bound=ArrayTree)


def choose(
    loop_fn: Callable[..., ArrayTree],
    straight_fn: Callable[..., ArrayTree],
    *args: ArrayTree,
) -> ArrayTree:
    """Applies `straight_fn` to `args` on a GPU, and `loop_fn` everywhere else.

    Both must return the same bits. The program is compiled for a platform that may
    differ from the default platform of the process.
    """
    return lax.platform_dependent(
        *args, cuda=straight_fn, rocm=straight_fn, default=loop_fn
    )


def write_if(
    flag: jax.Array,
    write_fn: Callable[..., ArrayTree],
    memory: ArrayTree,
    *args: ArrayTree,
) -> ArrayTree:
    """Applies `write_fn` to `memory` if `flag`, `()` bool, in place.

    This is a loop of zero or one round: a conditional would copy the memory.
    """

    def body(loop: tuple[jax.Array, ArrayTree]) -> tuple[jax.Array, ArrayTree]:
        return jnp.zeros((), bool), write_fn(loop[1], *args)

    return lax.while_loop(lambda loop: loop[0], body, (flag, memory))[1]


def scan(
    step: Callable[[_State, Any], tuple[_State, _Row]],
    start: _State,
    rows: ArrayTree,
    *,
    gpu: int,
    other: int,
    reverse: bool = False,
) -> tuple[_State, _Row]:
    """Scans like `lax.scan`, bitwise equal, and unrolls on accelerators.

    Every launch on a GPU and every operation on a TPU has a fixed cost. In an unrolled
    iteration, XLA fuses the operations of several rows. On a CPU one row per iteration
    is as fast and compiles faster. The platform is the target of the program, and
    `step` is traced once.

    Args:
        step: function to scan, as in `lax.scan`.
        start: initial carry of `step`.
        rows: `[T, ...]`, inputs of `step`.
        gpu: rows per iteration on a GPU, unless `step` is large.
        other: rows per iteration on other accelerators; a CPU takes one.
        reverse: whether the last row comes first.
    """
    scan = functools.partial(lax.scan, step, reverse=reverse)
    config: Any = jax.config
    if config.jax_disable_jit:  # for debugging, with values instead of tracers
        return scan(start, rows)
    # This traces `step`, and the scans below reuse the trace.
    is_large = estimate_cost(scan, start, rows).equations >= _LARGE
    gpu = 1 if is_large else gpu
    unrolled = {n: functools.partial(scan, unroll=n) for n in {1, gpu, other}}
    # JAX differentiates and transposes every branch, so make each branch only once.
    branches = {
        name: unrolled[n]
        for name, n in (("cpu", 1), ("cuda", gpu), ("rocm", gpu))
        if n != other
    }
    return lax.platform_dependent(start, rows, default=unrolled[other], **branches)


def steps_while(
    cond_fn: Callable[[_State], jax.Array],
    step: Callable[[_State, jax.Array], _State],
    state: _State,
) -> _State:
    """Takes steps while `cond_fn` is True; the result is the same on every platform.

    Args:
        cond_fn: maps the state to `()` bool, True if the loop continues.
        step: maps `(state, go)` to the next state. `go` is `()` bool. If it is False,
            the loop has ended and the step must return the state unchanged, for example
            with `where_active`.
        state: any pytree; it may hold typed keys.
    """
    # Jitted, so that both loops trace it once; inlined, since XLA:CPU rounds
    # differently in a separate function.
    jitted_step = jax.jit(step, inline=True)

    def loop_over_steps(state: _State) -> _State:
        return lax.while_loop(
            cond_fn, lambda state: jitted_step(state, _always(cond_fn(state))), state
        )

    def loop_over_blocks(state: _State) -> _State:
        def block(state: _State) -> _State:
            return lax.fori_loop(
                0, BLOCK, lambda _, state: jitted_step(state, cond_fn(state)), state
            )

        return lax.while_loop(cond_fn, block, state)

    return choose(loop_over_steps, loop_over_blocks, state)


@jax.custom_batching.custom_vmap
def _always(flag: jax.Array) -> jax.Array:
    """Returns True, so that XLA removes `where_active`; under `vmap` `flag`."""
    return jnp.ones_like(flag)


@_always.def_vmap
def _always_batched(size: int, is_mapped: list, flag: jax.Array) -> tuple:
    del size
    return flag, is_mapped[0]


def where_active(go: jax.Array, new: _State, old: _State) -> _State:
    """Returns `new` if `go`, else `old`; see `steps_while`."""
    return jax.tree.map(
        lambda new, old: old if new is old else trees.select(go, new, old), new, old
    )


def to_host(tree: ArrayTree) -> ArrayTree:
    """Converts JAX arrays to NumPy, on a CPU without a copy."""
    leaves, structure = jax.tree.flatten(tree)
    first = next((x for x in leaves if isinstance(x, jax.Array)), None)
    # Check the devices of the arrays, not JAX's default device.
    if first is not None and any(x.platform != "cpu" for x in first.devices()):
        return jax.device_get(tree)  # starts all copies before it waits
    return structure.unflatten([np.asarray(x) for x in leaves])


def blank_on(shapes: ArrayTree, sharding: Any) -> ArrayTree:
    """Makes zeros of these shapes and dtypes with a sharding, or None."""
    return _blank_program(shapes, sharding)()


@programs.shared
def _blank_program(shapes: ArrayTree, sharding: Any) -> Callable[[], ArrayTree]:
    return jax.jit(lambda: trees.blank(shapes), out_shardings=sharding)
