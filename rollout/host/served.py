"""`regroup_by_env`: sorts the transitions of asynchronous environments."""

import jax
import jax.numpy as jnp

from rollout import checks
from rollout.types import AsyncInfo, Transition


def regroup_by_env(rows: Transition) -> Transition:
    """Sorts the rows of a `HostCollector` with `num_ready` by environment and time.

    Call it before you compute targets that look ahead, such as `gae`. It works inside
    and outside of `jit`.

    Args:
        rows: `[T, num_ready, ...]` transitions, in the order of the answers.

    Returns:
        `[T, B, ...]` transitions. Column b has the transitions of environment b in
        order of time, followed by masked-out rows of zeros. `info` is the info of the
        environment, without the `AsyncInfo`.

    Raises:
        ValueError: if `rows` are not from a collector with `num_ready`.
    """
    message = "`rows` must be of a `HostCollector` with `num_ready`, with its `info`"
    checks.kind(message, getattr(rows, "info", rows), AsyncInfo)
    rows = _by_env(rows)
    return rows.replace(info=rows.info.info)


@jax.jit
def _by_env(rows: Transition) -> Transition:
    num_rows, num_envs = rows.mask.shape[0], rows.info.num_envs
    # Move masked-out rows to column B, which `put` drops.
    env_id = jnp.where(rows.mask, rows.info.env_id, num_envs).reshape(-1)
    # The result needs T rows: an environment may have answered in every row.
    order = jnp.argsort(env_id, stable=True)  # stable: keeps the order of time
    env_id = env_id[order]
    # Row of a transition: its rank among the transitions of the environment.
    first = jnp.searchsorted(env_id, env_id, side="left")
    index = (jnp.arange(env_id.size) - first, env_id)

    def put(leaf: jax.Array) -> jax.Array:
        leaf = leaf.reshape(-1, *leaf.shape[2:])[order]
        zeros = jnp.zeros((num_rows, num_envs, *leaf.shape[1:]), leaf.dtype)
        return zeros.at[index].set(leaf, mode="drop")

    return jax.tree.map(put, rows)
