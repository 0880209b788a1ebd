"""Where a batch lands: on the device, in host memory, or by a sharding."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rollout.stream.types import Placement


def place(tree: chex.ArrayTree, placement: Placement) -> chex.ArrayTree:
    """Puts a batch there; elsewhere than on the device it is a copy.

    Typed keys have no form in host memory and stay on the device.
    """
    if isinstance(placement, jax.sharding.Sharding):
        # The rows are soon written to again, and `device_put` may hand out their own
        # memory, also with `may_alias=False`: where it replicates, on their device.
        copied = jax.tree.map(jnp.copy, tree)
        return jax.block_until_ready(jax.device_put(copied, placement))
    return jax.tree.map(_to_host, tree) if placement == "host" else tree


def _to_host(x: jax.Array) -> np.ndarray | jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.copy(x)
    return np.array(x)  # a copy: a view would be overwritten with the next batch
