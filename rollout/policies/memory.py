"""The memory of a recurrent policy: its restart, and its replay over recorded rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rollout.envs import trees
from rollout.envs.types import ArrayTree
from rollout.types import Persistent


def unroll(
    core: Callable[[Any, Any], tuple[Any, Any]],
    state: ArrayTree,
    inputs: ArrayTree,
    first: jax.Array,
    init: Callable[[int], ArrayTree],
    *,
    acting: jax.Array | None = None,
) -> tuple[ArrayTree, ArrayTree]:
    """Runs a recurrent network over the rows of a trajectory, as the collector did.

    Under the parameters that collected, it computes what the policy computed, to the
    rounding of another program; `jax.grad` passes through it, back to `state`. What a
    network computes from the outputs alone, such as its heads, is faster outside, over
    all rows at once.

    Args:
        core: `(state, input)` of one row, `[B, ...]`, to `(state, output)`.
        state: that of the policy before the first row, `[B, ...]`, such as the first
            row of what the policy recorded.
        inputs: a pytree of `[T, B, ...]`, such as the observations.
        first: `[T, B]` bool, True where a row begins an episode: `Transition.first`.
            There the state is that of `init` before the row is read, except for its
            `Persistent` parts.
        init: that of the `recurrent_policy`. It has no `EpisodeKey`, for the keys of
            later episodes are not known.
        acting: `[T, B]` bool, or None for True everywhere; where False, the row leaves
            the state as it is: `acting` of an agent's transitions.

    Returns:
        The state after the last row, and the outputs, `[T, B, ...]`.
    """
    fresh = jax.tree.map(jnp.asarray, init(first.shape[1]))

    def step(state: ArrayTree, row: Any) -> tuple[ArrayTree, ArrayTree]:
        x, first, acting = row
        # Before the row is read: the first one of an episode sees the state of `init`.
        before = restart(first, fresh, state)
        after, output = core(before, x)
        return after if acting is None else trees.select(acting, after, before), output

    return jax.lax.scan(step, state, (inputs, first, acting))


def restart(restarts: jax.Array, fresh: ArrayTree, state: ArrayTree) -> ArrayTree:
    """Takes `fresh` where `restarts`, except for the `Persistent` parts of `state`."""

    def choose(fresh: ArrayTree, state: ArrayTree) -> ArrayTree:
        if isinstance(state, Persistent):
            return state
        return trees.select(restarts, fresh, state)

    return jax.tree.map(
        choose, fresh, state, is_leaf=lambda x: isinstance(x, Persistent)
    )
