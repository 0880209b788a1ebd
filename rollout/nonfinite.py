"""Finds NaN and infinity in transitions: the rule for all checks of the package.

Observations, actions, rewards and final values must be finite. In extras, such as
logits, minus infinity marks an invalid action, so only NaN and plus infinity count
there. In accumulated values only NaN counts: a minimum starts at infinity.
"""

import jax
import jax.numpy as jnp

from rollout.types import Transition

_FIELDS = "obs", "action", "next_obs", "reward", "extras", "final_value", "accumulated"


def nonfinite(trajectory: Transition) -> dict[str, jax.Array]:
    """Finds the rows with NaN or infinity, by field.

    Args:
        trajectory: `[T, B, ...]`, or a transition, `[B, ...]`; empty fields, `()`, are
            skipped.

    Returns:
        The names of float fields, such as `extras.value`, to `[T, B]` bool.
    """
    fields = {name: getattr(trajectory, name) for name in _FIELDS}
    flags = {}
    for path, leaf in jax.tree.leaves_with_path(fields):
        # Integers and keys are always finite.
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        bad, field = ~jnp.isfinite(leaf), name.split(".")[0]
        if field == "extras":
            bad = jnp.isnan(leaf) | (leaf == jnp.inf)
        if field == "accumulated":
            bad = jnp.isnan(leaf)
        axes = range(trajectory.mask.ndim, leaf.ndim)
        flags[name] = jnp.any(bad, axis=tuple(axes))
    return flags


def is_nonfinite(trajectory: Transition) -> jax.Array:
    """Finds the rows with NaN or infinity in any field, `[T, B]` bool."""
    return sum(nonfinite(trajectory).values(), jnp.zeros(trajectory.mask.shape, bool))


def count_nonfinite(trajectory: Transition) -> jax.Array:
    """Counts the rows in which an action, reward or extra is not finite, `()` int32.

    Skips all other fields, so that a program need not compute unused ones.
    """
    unread = {"obs": (), "next_obs": (), "final_value": (), "accumulated": ()}
    bad = is_nonfinite(trajectory.replace(**unread))
    return jnp.sum(trajectory.mask & bad, dtype=jnp.int32)
