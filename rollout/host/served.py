"""Rows of environments that answer at different speeds, sorted by `regroup_by_env`."""

import jax
import jax.numpy as jnp

from rollout import checks
from rollout.types import AsyncInfo, Transition


def regroup_by_env(rows: Transition) -> Transition:
    """Sorts the rows of a `HostCollector` with `num_ready` by environment and time.

    Targets that look ahead, such as `gae`, need it. Inside or outside of `jit`.

    Args:
        rows: `[T, num_ready, ...]`, in the order of the answers.

    Returns:
        `[T, B, ...]`: column b has the transitions of environment b in the order of
        time, followed by masked-out rows of zeros; `info` is that of the environment.

    Raises:
        ValueError: if `rows` are not of a collector with `num_ready`.
    """
    what = "`rows` must be of a `HostCollector` with `num_ready`, with its `info`"
    checks.kind(what, getattr(rows, "info", rows), AsyncInfo)
    rows = _by_env(rows)
    return rows.replace(info=rows.info.info)


@jax.jit
def _by_env(rows: Transition) -> Transition:
    num_rows, num_envs = rows.mask.shape[0], rows.info.num_envs
    # Masked-out ones get a column beyond the last, where `put` drops them.
    env_id = jnp.where(rows.mask, rows.info.env_id, num_envs).reshape(-1)
    # T * num_ready rows become T * B: an environment may have answered in every row.
    order = jnp.argsort(env_id, stable=True)  # stable: keeps the order of time
    env_id = env_id[order]
    # The row of a transition: how far it is behind the first one of its environment.
    first = jnp.searchsorted(env_id, env_id, side="left")
    place = (jnp.arange(env_id.size) - first, env_id)

    def put(leaf: jax.Array) -> jax.Array:
        leaf = leaf.reshape(-1, *leaf.shape[2:])[order]
        zeros = jnp.zeros((num_rows, num_envs, *leaf.shape[1:]), leaf.dtype)
        return zeros.at[place].set(leaf, mode="drop")

    return jax.tree.map(put, rows)
