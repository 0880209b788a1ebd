"""Folds `step` over T steps of every lane, with an implementation per platform."""

from collections.abc import Callable
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
from jax import lax

from rollout.base import platform, trees
from rollout.envs.types import ArrayTree
from rollout.kernel import keys
from rollout.kernel.state import pack, roots_of, unpack_flags
from rollout.kernel.step import step
from rollout.types import Carry, KernelSpec, Transition

Acc = TypeVar("Acc")
Out = TypeVar("Out")

# Steps per iteration on a GPU: 2 steps save launches; 4 steps save few more and take
# longer to compile. A TPU takes 1 step: 2 steps save cycles only for large
# observations, and need more memory.
_GPU_UNROLL = 2


def collect_steps(
    spec: KernelSpec, carry: Carry, params: Any, num_steps: int, **ends: Any
) -> tuple[Carry, Transition]:
    """Stacks `num_steps` recorded transitions, `[T, B, ...]`.

    `ends` holds the options of `scan_steps` that end episodes.
    """

    def stack(carry: Carry, acc: tuple[()], row: Transition) -> tuple[tuple[()], Any]:
        return acc, _writable(pack(row), carry.step)

    folded = scan_steps(spec, carry, params, num_steps, stack, (), **ends)
    carry, _, (rows, flags) = folded
    terminated, truncated = unpack_flags(flags, 2)
    # No lane is idle, so create the mask after the loop.
    mask = jnp.ones(flags.shape, bool)
    return carry, rows.replace(terminated=terminated, truncated=truncated, mask=mask)


def scan_steps(
    spec: KernelSpec,
    carry: Carry,
    params: Any,
    num_steps: int,
    fn: Callable[[Carry, Acc, Transition], tuple[Acc, Out]],
    acc: Acc,
    *,
    limit: int | None = None,
    cut_last: bool = False,
) -> tuple[Carry, Acc, Out]:
    """Takes `num_steps` steps in every lane, and scans `fn` over the recorded rows.

    `fn` maps the carry before the step, `acc` and the row to the next `acc` and an
    output; the outputs are stacked, `[T, ...]`. Episodes are truncated after `limit`
    steps, and in the last row if `cut_last`.
    """
    roots = roots_of(spec, carry)
    last = carry.step + num_steps - 1

    def body(
        state: tuple[Carry, Acc], policy_key: chex.PRNGKey
    ) -> tuple[tuple[Carry, Acc], Out]:
        carry, acc = state

        def truncate(row: Transition) -> jax.Array:
            flag = jnp.zeros_like(row.truncated)
            if limit is not None:
                flag = row.episode_length >= limit
            # An episode that ends in the last row keeps its flags.
            return flag | ((carry.step == last) & ~row.done) if cut_last else flag

        # On a CPU, hashing a key in the loop is faster than reading it from memory.
        # Other platforms hash the keys of all steps before the loop to save launches.
        with jax.named_scope("policy"):
            policy_key = lax.platform_dependent(
                policy_key,
                cpu=lambda _: keys.at_step(roots.policy, carry.step),
                default=lambda hashed: hashed,
            )
        next_carry, row = step(
            spec,
            carry,
            params,
            roots,
            policy_key=policy_key,
            cut_fn=truncate if cut_last or limit is not None else None,
        )
        acc, output = fn(carry, acc, row)
        return (next_carry, acc), output

    # Count steps from the carry: two calls of T/2 steps then equal one call of T steps.
    steps = carry.step + jnp.arange(num_steps, dtype=jnp.int32)
    policy_keys = keys.at_step(roots.policy, steps)
    (carry, acc), outputs = platform.scan(
        body, (carry, acc), policy_keys, gpu=_GPU_UNROLL, other=1
    )
    return carry, acc, outputs


def _writable(row: ArrayTree, counter: jax.Array) -> ArrayTree:
    """Makes the row writable in a CUDA graph; `counter` is any `()` int32 of the loop.

    XLA copies an unchanged array, such as an observation. A CUDA graph cannot contain
    this copy, so the copy splits the step into separate launches. A CUDA graph can
    contain a select. Its predicate is always true, but not constant for XLA.
    """
    return platform.choose(
        lambda row: row,
        lambda row: trees.select((counter | 1) != 0, row, trees.blank(row)),
        row,
    )
