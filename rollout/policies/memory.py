"""Replays recurrent policies over recorded rows, and resets their state."""

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

    The outputs equal the policy's outputs if the parameters are the parameters of the
    collection, up to the rounding of a different compiled program. `jax.grad`
    differentiates through all rows, back to `state`. Layers that read only the outputs,
    such as heads, are faster outside of `unroll`, applied to all rows at once.

    Args:
        core: function `(state, input)` of one row, `[B, ...]`, that returns `(state,
            output)`.
        state: state of the policy before the first row, `[B, ...]`, for example the
            first row of the states that the policy recorded.
        inputs: a pytree of `[T, B, ...]`, for example the observations.
        first: `[T, B]` bool, True at the first row of an episode: `Transition.first`.
            The state is reset to `init` before such a row, except for its `Persistent`
            parts.
        init: function of `num_envs` that returns the initial state: the `init_fn` of
            the `recurrent_policy`. The state must not contain an `EpisodeKey`, since
            the keys of later episodes are not recorded.
        acting: `[T, B]` bool, for example `acting` of an agent's transitions. Rows with
            False leave the state unchanged. None is the same as True everywhere.

    Returns:
        The state after the last row, and the outputs, `[T, B, ...]`.
    """
    initial_state = jax.tree.map(jnp.asarray, init(first.shape[1]))

    def step(state: ArrayTree, row: Any) -> tuple[ArrayTree, ArrayTree]:
        x, first, acting = row
        # Reset before `core`: the first row of an episode reads the initial state.
        state = restart(first, initial_state, state)
        new_state, output = core(state, x)
        if acting is not None:
            new_state = trees.select(acting, new_state, state)
        return new_state, output

    return jax.lax.scan(step, state, (inputs, first, acting))


def restart(restarts: jax.Array, initial: ArrayTree, state: ArrayTree) -> ArrayTree:
    """Resets lanes to `initial` if `restarts`, except for `Persistent` parts."""

    def choose(initial: ArrayTree, state: ArrayTree) -> ArrayTree:
        if isinstance(state, Persistent):
            return state
        return trees.select(restarts, initial, state)

    is_persistent = lambda x: isinstance(x, Persistent)  # noqa: E731
    return jax.tree.map(choose, initial, state, is_leaf=is_persistent)
