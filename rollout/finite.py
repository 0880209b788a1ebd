"""Non-finite values in what was recorded, as the whole package understands them.

A fault is a NaN or an infinity in an observation, an action or a reward, and in the
extras `log_prob`, `value` and `next_value`. In other extras, such as logits, minus
infinity says that an action is not allowed, and only a NaN or plus infinity is one.
"""

import jax
import jax.numpy as jnp

from rollout.types import Transition

_NEVER_INFINITE = ("log_prob", "value", "next_value")


def faults(trajectory: Transition) -> dict[str, jax.Array]:
    """Finds entries that are not finite, field by field.

    Args:
        trajectory: `[T, B, ...]`, or a transition, `[B, ...]`; a field that is `()` is
            not looked at.

    Returns:
        The names of its float fields, such as `extras.value`, to `[T, B]` bool.
    """
    num_axes = trajectory.mask.ndim
    fields = {
        name: getattr(trajectory, name)
        for name in ("obs", "action", "next_obs", "reward", "extras")
    }
    return {
        name: jnp.any(_is_fault(name, leaf), axis=tuple(range(num_axes, leaf.ndim)))
        for path, leaf in jax.tree.leaves_with_path(fields)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        and (name := jax.tree_util.keystr(path, simple=True, separator="."))
    }


def is_faulty(trajectory: Transition) -> jax.Array:
    """Tells in which rows something is not finite, `[T, B]` bool."""
    return sum(faults(trajectory).values(), jnp.zeros(trajectory.mask.shape, bool))


def count_faulty(trajectory: Transition) -> jax.Array:
    """Counts the rows in which an action, reward or extra is not finite, `()` int32.

    Observations are left out: whoever reads none of them should not pay for them.
    """
    bad = is_faulty(trajectory.replace(obs=(), next_obs=()))
    return jnp.sum(trajectory.mask & bad, dtype=jnp.int32)


def _is_fault(name: str, leaf: jax.Array) -> jax.Array:
    field, _, rest = name.partition(".")
    if field == "extras" and rest.rpartition(".")[2] not in _NEVER_INFINITE:
        return jnp.isnan(leaf) | (leaf == jnp.inf)
    return ~jnp.isfinite(leaf)
