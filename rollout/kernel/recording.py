"""Records transitions: accumulated values, `record_fn`, masks, and packed flags."""

import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rollout import checks
from rollout.envs import trees
from rollout.envs.types import ArrayTree, strong
from rollout.types import Accumulator, Accumulators, RecordFn, Transition, check_policy

# Fields that a `record_fn` must not change: statistics and episodes read them.
_BOOKKEEPING = (
    *("terminated", "truncated", "mask", "episode_id"),
    *("episode_return", "episode_length", "accumulated"),
)


def checked_parts(collector: Any) -> Accumulators:
    """Validates the options of a collector; returns the accumulators as a tuple."""
    check_policy(collector.policy)
    if collector.record_fn is not None:
        checks.function("record_fn", collector.record_fn, "transition")
    value = collector.accumulators
    rule = "`accumulators` must map names to `Accumulator`s"
    # A static field of a pytree must be hashable: store a tuple, not a dict.
    items = tuple(value.items()) if isinstance(value, Mapping) else value
    if isinstance(items, Accumulator) or not isinstance(items, tuple):
        raise ValueError(f"{rule}, got {checks.describe(value)}.")
    for name, accumulator in items:
        if not isinstance(name, str) or not isinstance(accumulator, Accumulator):
            raise ValueError(f"{rule}, got {name!r}: {checks.describe(accumulator)}.")
    return items


def accumulate_nothing(accumulators: Accumulators, num_envs: int) -> ArrayTree:
    """Returns the accumulated values before an episode's first step, `[B, ...]`."""
    return strong({name: x.init(num_envs) for name, x in accumulators} or ())


def accumulate(
    accumulators: Accumulators, accumulated: ArrayTree, transition: Transition
) -> Transition:
    """Adds the accumulated values after a step to its transition."""
    values = {name: x.update(accumulated[name], transition) for name, x in accumulators}
    for name, value in values.items():
        message = f"The accumulator `{name}` must return a value like its input"
        checks.same(message, accumulated[name], value)
    # Strong types, as before the first step: otherwise the carry's types change.
    return transition.replace(accumulated=strong(values or ()))


def record(record_fn: RecordFn | None, transition: Transition) -> Transition:
    """Applies `record_fn`, which must not change lanes or bookkeeping fields."""
    if record_fn is None:
        return transition
    recorded = record_fn(transition)
    checks.kind("`record_fn` must return a `Transition`", recorded, Transition)
    for name, field in vars(recorded).items():
        original = vars(transition)[name]
        # Compare identities: tracers have no values to compare.
        if name in _BOOKKEEPING and field is not original:
            raise ValueError(
                f"`record_fn` must leave `{name}` as it is, since statistics read it. "
                "Store derived values in `extras`."
            )
        if field is None and original is not None:
            raise ValueError(
                f"`record_fn` must set a dropped field to `()`, got `{name}=None`."
            )
    lanes = transition.mask.shape
    checks.leading_axes("`record_fn` must return leaves", recorded, lanes)
    return recorded


def pack(row: Transition) -> tuple[Transition, jax.Array]:
    """Packs a transition for stacking: both flags in one array, and no mask.

    XLA:CPU pays for every array that a step writes. No lane is idle, so all rows count.
    """
    flags = pack_flags(row.terminated, row.truncated)
    return row.replace(terminated=(), truncated=(), mask=()), flags


def pack_flags(*flags: jax.Array) -> jax.Array:
    """Packs up to eight flags into one uint8 array."""
    shifted = (flag.astype(jnp.uint8) << bit for bit, flag in enumerate(flags))
    return functools.reduce(operator.add, shifted)


def unpack_flags(packed: jax.Array, num_flags: int) -> tuple[jax.Array, ...]:
    """Inverts `pack_flags`."""
    return tuple((packed & (1 << bit)) != 0 for bit in range(num_flags))


def mask_out(transition: Transition) -> Transition:
    """Zeroes the lanes whose `mask` is False."""
    return trees.select(transition.mask, transition, trees.blank(transition))
