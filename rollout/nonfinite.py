"""Finds NaN and infinities in transitions, by the one rule of the whole package.

Observations, actions, rewards and final values must be finite. In extras, such as
logits, minus infinity marks an invalid action, so only NaN and plus infinity count
there. In accumulated values only NaN counts: a minimum starts at infinity.
"""

import jax
import jax.numpy as jnp

from rollout.types import Transition

_FIELDS = "obs", "action", "next_obs", "reward", "extras", "final_value", "accumulated"


def nonfinite(trajectory: Transition) -> dict[str, jax.Array]:
    """Finds entries that are not finite, field by field.

    Args:
        trajectory: `[T, B, ...]`, or a transition, `[B, ...]`; a field that is `()` is
            skipped.

    Returns:
        The names of its float fields, such as `extras.value`, to `[T, B]` bool.
    """
    fields = {name: getattr(trajectory, name) for name in _FIELDS}
    found = {}
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
        found[name] = jnp.any(bad, axis=tuple(axes))
    return found


def is_nonfinite(trajectory: Transition) -> jax.Array:
    """Finds the rows in which something is not finite, `[T, B]` bool."""
    return sum(nonfinite(trajectory).values(), jnp.zeros(trajectory.mask.shape, bool))


def count_nonfinite(trajectory: Transition) -> jax.Array:
    """Counts the rows in which an action, reward or extra is not finite, `()` int32.

    Skips the other fields: a program that reads none of them should not pay for them.
    """
    unread = {"obs": (), "next_obs": (), "final_value": (), "accumulated": ()}
    bad = is_nonfinite(trajectory.replace(**unread))
    return jnp.sum(trajectory.mask & bad, dtype=jnp.int32)
