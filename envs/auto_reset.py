"""Auto-resets: starts new episodes in the done lanes, in ways equal bit for bit.

`"select"` resets all `B` lanes and keeps the result where a lane is done: the
reference, without a loop. `"compact"` resets only done lanes, `K` at a time, in lane
order. `"auto"` chooses by the platform that the program is lowered for:

| platform | cheap reset | costly reset |
|---|---|---|
| CPU | compact | compact |
| GPU | select | switch |
| TPU and others | select | compact |

`switch` resets no lane, up to `K` done ones, or all; see `rollout.envs.masked_update`,
which has the rule for a cheap one. All ways are exact for any number of done lanes.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from rollout.envs import masked_update, trees
from rollout.envs.types import ArrayTree, Env, LaneIndex, Lanes


def reset(
    way: str,
    env: Env,
    start_fn: Callable[[Env, LaneIndex], Lanes],
    done: jax.Array,
    lanes: Lanes,
) -> Lanes:
    """Starts new episodes in the done lanes.

    A `while_loop` has no reverse-mode derivative. Derivatives pass through the lanes
    that are not done; only `"select"` differentiates a reset with respect to `env`.

    Args:
        way: a name in `BY_NAME`.
        env: parameters of the environments, which `start_fn` takes.
        start_fn: maps an index of `K` lanes to fresh ones, `[K, ...]`.
        done: `[B]` bool, the lanes to reset.
        lanes: the lanes as they are now.
    """
    if way == "select":
        return BY_NAME[way](done, functools.partial(start_fn, env), lanes)
    # Words, not keys: jax's checker of key reuse takes a loop or a branch that returns
    # a key for a use of it.
    words = trees.unwrap_keys(lanes)
    # Nothing inside the reset depends on a differentiated value, so its `while_loop` is
    # never transposed; `_attach` adds the derivative again, outside of the loop.
    fixed_env, fixed_words = lax.stop_gradient((env, words))
    replace = masked_update.merged(BY_NAME[way])
    fresh = replace(
        done, lambda at: trees.unwrap_keys(start_fn(fixed_env, at)), fixed_words
    )
    return trees.wrap_keys(_attach(fresh, words, done), lanes)


BY_NAME = {
    "auto": masked_update.by_platform,
    "compact": masked_update.rounds,
    "select": masked_update.select,
}


@jax.custom_jvp
def _attach(fresh: ArrayTree, lanes: ArrayTree, done: jax.Array) -> ArrayTree:
    """Returns `fresh`, with its derivative as a function of `lanes`."""
    del lanes, done  # unused: only the derivative needs them
    return fresh


@_attach.defjvp
def _attach_jvp(primals: tuple, tangents: tuple) -> tuple:
    fresh, _, done = primals

    # Identity in lanes that are not done, constant in those that were reset.
    def through(x: jax.Array, tangent: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return tangent  # of an integer: float0, which `select` does not take
        return trees.select(done, jnp.zeros_like(x), tangent)

    return fresh, jax.tree.map(through, fresh, tangents[1])
