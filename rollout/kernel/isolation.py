"""Isolates an environment step from the surrounding program."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import numpy as np
from jax import lax
from jax.core import Tracer, eval_jaxpr
from jax.interpreters import partial_eval

from rollout.base import trees
from rollout.base.jaxprs import hoist
from rollout.envs.types import ArrayTree, EnvStep

_Step = Callable[[chex.PRNGKey, ArrayTree, ArrayTree], EnvStep]


def step_once(
    step: _Step,
    step_keys: chex.PRNGKey,
    state: ArrayTree,
    action: ArrayTree,
    *,
    counter: jax.Array,
) -> EnvStep:
    """Computes `step(step_keys, state, action)` once, isolated from surrounding code.

    XLA fuses a step into each of its consumers (the next state, the reward, the flags,
    the recorded fields) and computes it once per consumer. This is slower, and rounding
    depends on the consumer. `lax.optimization_barrier` prevents the fusion, but XLA:CPU
    before jaxlib 0.11 removes barriers before it fuses. There, a conditional has the
    same effect: its predicate is always true, but not constant for XLA. On a TPU only
    the inputs pass a barrier, since fusing a step with its consumers saves cycles.

    If both flags depend on no argument, as in a task that never ends, they are
    constants whose values may be read while tracing.

    `counter` is any `()` int32 whose value is unknown at compile time.
    """
    # Jitted, so that the functions below trace it once; inlined, since XLA:CPU rounds
    # differently in a separate function.
    jitted_step = jax.jit(step, inline=True)

    def step_with_barriers(*operands: ArrayTree) -> EnvStep:
        keys, inputs = operands[0], trees.barrier(operands[1:])
        result = jitted_step(keys, *inputs)
        # Leave `info` outside the barrier, so that XLA removes an unused `info`.
        output = lax.platform_dependent(
            result.replace(info=()), tpu=lambda result: result, default=trees.barrier
        )
        return output.replace(info=result.info)

    def step_in_conditional(*operands: ArrayTree) -> EnvStep:
        shapes = jax.eval_shape(jitted_step, *operands)
        hoisted, closed_over = hoist(jitted_step, *operands)

        # Pass raw key data: the key-reuse checker treats `custom_jvp` as using keys.
        def run_step(closed_over: list, *words: ArrayTree) -> EnvStep:
            return hoisted(closed_over, *trees.wrap_keys(words, operands))

        def skip_step(_: list, *words: ArrayTree) -> EnvStep:
            _, state, _ = trees.wrap_keys(words, operands)
            return trees.blank(shapes.replace(state=())).replace(state=state)

        # Differentiate without the conditional, which would fill residuals with zeros
        # in `skip_step`. The stored residuals also prevent the fusion.
        @jax.custom_jvp
        def isolated_step(flag: jax.Array, *words: ArrayTree) -> EnvStep:
            return lax.cond(flag, run_step, skip_step, *words)

        @isolated_step.defjvp
        def _(primals: tuple, tangents: tuple) -> tuple[EnvStep, EnvStep]:
            return jax.jvp(run_step, primals[1:], tangents[1:])

        return isolated_step(
            (counter | 1) != 0, closed_over, *trees.unwrap_keys(operands)
        )

    operands = (step_keys, state, action)
    if jax.__version_info__ >= (0, 11):
        result = step_with_barriers(*operands)
    else:
        result = lax.platform_dependent(
            *operands, cpu=step_in_conditional, default=step_with_barriers
        )
    return result.replace(**_constant_flags(jitted_step.trace(*operands)))


def is_endless(step: Any) -> bool:
    """Returns whether both flags are constant and False, also while tracing."""
    flags = step.terminated, step.truncated
    return not any(isinstance(x, Tracer) or np.asarray(x).any() for x in flags)


def _constant_flags(step: Any) -> dict[str, jax.Array]:
    """Returns both flags of a traced step if they are constant, else an empty dict."""
    names = ("terminated", "truncated")
    leaves, structure = jax.tree.flatten(step.out_info)
    numbered = structure.unflatten(range(len(leaves)))
    flag_indices = numbered.terminated, numbered.truncated
    jaxpr, used_consts, used_inputs = partial_eval.dce_jaxpr_consts(
        step.jaxpr.jaxpr, [i in flag_indices for i in range(len(leaves))]
    )
    if any(used_consts) or any(used_inputs) or jaxpr.effects:
        return {}
    with jax.ensure_compile_time_eval():
        return dict(zip(names, eval_jaxpr(jaxpr, ()), strict=True))
