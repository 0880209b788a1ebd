"""Auto-reset: starts new episodes in the done lanes.

All methods return the same bits, for any number of done lanes. `"select"` resets all
`B` lanes and selects the result in the done lanes: the reference method, without a
loop. `"compact"` resets only done lanes, `K` at a time, in lane order. `"auto"` chooses
by the platform that the program is lowered for:

| platform | cheap reset | costly reset |
|---|---|---|
| CPU | compact | compact |
| GPU | select | switch |
| TPU and others | select | compact |

`switch` resets no lane, up to `K` done lanes, or all lanes. See
`rollout.envs.masked_update`, which also defines a cheap reset.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from rollout.envs import masked_update, trees
from rollout.envs.types import ArrayTree, Env, LaneIndex, Lanes


def reset(
    method: str,
    env: Env,
    start_fn: Callable[[Env, LaneIndex], Lanes],
    done: jax.Array,
    lanes: Lanes,
) -> Lanes:
    """Starts new episodes in the done lanes.

    Derivatives pass through all lanes except the done lanes. A `while_loop` has no
    reverse-mode derivative, so only `"select"` differentiates a reset with respect to
    `env`.

    Args:
        method: a name in `BY_NAME`.
        env: parameters of the environments, passed to `start_fn`.
        start_fn: maps an index of `K` lanes to new lanes, `[K, ...]`.
        done: `[B]` bool, the lanes to reset.
        lanes: the current lanes.
    """
    if method == "select":
        return BY_NAME[method](done, functools.partial(start_fn, env), lanes)
    # Pass key words instead of typed keys: the key-reuse checker treats a key that a
    # loop or a branch returns as consumed.
    words = trees.unwrap_keys(lanes)
    # The reset does not depend on differentiated values, so the `while_loop` is never
    # transposed. `_attach` adds the derivative outside the loop.
    fixed_env, fixed_words = lax.stop_gradient((env, words))
    replace = masked_update.merged(BY_NAME[method])
    fresh = replace(
        done, lambda lane: trees.unwrap_keys(start_fn(fixed_env, lane)), fixed_words
    )
    return trees.wrap_keys(_attach(fresh, words, done), lanes)


BY_NAME = {
    "auto": masked_update.by_platform,
    "compact": masked_update.rounds,
    "select": masked_update.select,
}


@jax.custom_jvp
def _attach(fresh: ArrayTree, lanes: ArrayTree, done: jax.Array) -> ArrayTree:
    """Returns `fresh` and defines its derivative with respect to `lanes`."""
    del lanes, done  # read only by the derivative
    return fresh


@_attach.defjvp
def _attach_jvp(primals: tuple, tangents: tuple) -> tuple:
    fresh, _, done = primals

    # Reset lanes are constant: set the tangent to zero. All other lanes keep it.
    def mask_tangent(x: jax.Array, tangent: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return tangent  # an integer has a float0 tangent, which `select` rejects
        return trees.select(done, jnp.zeros_like(x), tangent)

    return fresh, jax.tree.map(mask_tangent, fresh, tangents[1])
