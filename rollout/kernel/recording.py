"""Records transitions: what of a row is kept, and how it is stored."""

import functools
import operator

import jax
import jax.numpy as jnp

from rollout import checks
from rollout.envs import prng
from rollout.types import RecordFn, Transition

# What a `record_fn` must leave alone: statistics and returned episodes read these.
_BOOKKEEPING = (
    *("terminated", "truncated", "mask", "episode_id"),
    *("episode_return", "episode_length", "accumulated"),
)


def record(record_fn: RecordFn | None, transition: Transition) -> Transition:
    """Applies `record_fn`, which must leave the lanes and the kernel's bookkeeping."""
    if record_fn is None:
        return transition
    recorded = record_fn(transition)
    checks.kind("`record_fn` must return a `Transition`", recorded, Transition)
    for name, field in vars(recorded).items():
        given = getattr(transition, name)
        if name in _BOOKKEEPING and field is not given:
            raise ValueError(
                f"`record_fn` must leave `{name}` as it is, since the statistics read "
                "it; put a value derived from it into `extras`."
            )
        if field is None and given is not None:
            raise ValueError(
                f"`record_fn` must drop a field by `()`, got `{name}=None`."
            )
    lanes = transition.mask.shape
    checks.leading_axes("`record_fn` must return leaves", recorded, lanes)
    return recorded


def pack(row: Transition) -> tuple[Transition, jax.Array]:
    """Packs a transition for stacking: both flags in one array, and no mask.

    XLA:CPU pays for every array that a step writes, and no lane is idle.
    """
    flags = pack_flags(row.terminated, row.truncated)
    return row.replace(terminated=(), truncated=(), mask=()), flags


def pack_flags(*flags: jax.Array) -> jax.Array:
    """Packs up to eight flags into one uint8 array."""
    shifted = (flag.astype(jnp.uint8) << bit for bit, flag in enumerate(flags))
    return functools.reduce(operator.add, shifted)


def unpack_flags(packed: jax.Array, num_flags: int) -> tuple[jax.Array, ...]:
    """Undoes `pack_flags`."""
    return tuple((packed & (1 << bit)) != 0 for bit in range(num_flags))


def mask_out(transition: Transition) -> Transition:
    """Zeroes the masked-out lanes, whose `mask` is False."""
    return prng.select(transition.mask, transition, prng.blank(transition))
