"""The buffer contracts: what a buffer keeps and what a sample is."""

import chex
import jax
from flax import struct


@struct.dataclass(kw_only=True)
class RingState:
    """A ring of rows per lane.

    Attributes:
        experience: `[N, B, ...]`, row `[n, i]` is slot n of lane i; any pytree, in the
            dtypes it came in.
        head: `[B]` int32, the slot that each lane writes next.
        size: `[B]` int32, rows that each lane holds, at most N.
    """

    experience: chex.ArrayTree  # [N, B, ...]
    head: jax.Array  # [B]
    size: jax.Array  # [B]


@struct.dataclass(kw_only=True)
class Batch:
    """A sample of `S` rows.

    Attributes:
        experience: `[S, ...]`, the rows.
        indices: `[S]` int32, where they lie: slot n of lane i is number `n * B + i`.
        weights: `[S]` float32, importance weights; ones where rows are drawn evenly.
    """

    experience: chex.ArrayTree  # [S, ...]
    indices: jax.Array  # [S]
    weights: jax.Array  # [S]
