"""Finds NaN and infinities in transitions, by the one rule of the whole package.

Observations, actions, rewards and the extras `log_prob`, `value` and `next_value` must
be finite. In other extras, such as logits, minus infinity marks an action that is not
allowed, so only NaN and plus infinity count there.
"""

import jax
import jax.numpy as jnp

from rollout.types import Transition

_NEVER_INFINITE = ("log_prob", "value", "next_value")


def nonfinite(trajectory: Transition) -> dict[str, jax.Array]:
    """Finds entries that are not finite, field by field.

    Args:
        trajectory: `[T, B, ...]`, or a transition, `[B, ...]`; a field that is `()` is
            skipped.

    Returns:
        The names of its float fields, such as `extras.value`, to `[T, B]` bool.
    """
    fields = {
        name: getattr(trajectory, name)
        for name in ("obs", "action", "next_obs", "reward", "extras")
    }
    found = {}
    for path, leaf in jax.tree.leaves_with_path(fields):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        bad, parts = ~jnp.isfinite(leaf), name.split(".")
        if parts[0] == "extras" and parts[-1] not in _NEVER_INFINITE:
            bad = jnp.isnan(leaf) | (leaf == jnp.inf)
        axes = range(trajectory.mask.ndim, leaf.ndim)
        found[name] = jnp.any(bad, axis=tuple(axes))
    return found


def is_nonfinite(trajectory: Transition) -> jax.Array:
    """Finds the rows in which something is not finite, `[T, B]` bool."""
    return sum(nonfinite(trajectory).values(), jnp.zeros(trajectory.mask.shape, bool))


def count_nonfinite(trajectory: Transition) -> jax.Array:
    """Counts the rows in which an action, reward or extra is not finite, `()` int32.

    Skips observations: a program that reads none of them should not pay for them.
    """
    bad = is_nonfinite(trajectory.replace(obs=(), next_obs=()))
    return jnp.sum(trajectory.mask & bad, dtype=jnp.int32)
