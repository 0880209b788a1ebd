"""Auto-resets: starts new episodes in the done lanes, in ways equal bit for bit.

`reset_select` resets all `B` lanes and keeps the result where a lane is done: the
reference, without a loop. `reset_compact` resets only done lanes, `K` at a time, and
`reset_switch` resets none, up to `K` done lanes, or all: see
`rollout.envs.masked_update`. All are exact for any number of done lanes. `reset_auto`
chooses one of them.

All take `start_fn`, which returns fresh `Lanes` for the lane numbers it is given.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from rollout.envs import cost_estimate, masked_update, prng
from rollout.envs.types import ArrayTree, Env, LaneIndex, Lanes

_StartFn = Callable[[Env, LaneIndex], Lanes]

# Bounds of a cheap reset, see `reset_auto`.
_FEW_OPERATIONS = 5_000  # of one lane: a step of Breakout and its keys
_FEW_IN_ALL = 30_000_000  # of all lanes together
_FEW_ROUNDS = 8


def reset_select(env: Env, start_fn: _StartFn, done: jax.Array, lanes: Lanes) -> Lanes:
    """Resets every lane and keeps the result where `done`."""
    return masked_update.select(done, lambda at: start_fn(env, at), lanes)


def reset_compact(env: Env, start_fn: _StartFn, done: jax.Array, lanes: Lanes) -> Lanes:
    """Resets the done lanes only, `K` at a time, in lane order.

    A `while_loop` has no reverse-mode derivative. Derivatives pass through the lanes
    that are not done; only `reset_select` differentiates a reset with respect to `env`.
    """
    return _without_derivative(
        _of_words(masked_update.rounds), env, start_fn, done, lanes
    )


def reset_switch(env: Env, start_fn: _StartFn, done: jax.Array, lanes: Lanes) -> Lanes:
    """Resets nothing, up to `K` done lanes, or all lanes; derivatives as in compact."""
    return _without_derivative(
        _of_words(masked_update.switch), env, start_fn, done, lanes
    )


def reset_auto(env: Env, start_fn: _StartFn, done: jax.Array, lanes: Lanes) -> Lanes:
    """Chooses the reset that suits the platform the program is lowered for.

    | platform | cheap reset | costly reset |
    |---|---|---|
    | CPU | compact | compact |
    | GPU | select | switch |
    | TPU and others | select | compact |

    A reset is cheap if it takes at most 5,000 operations, about a step of Breakout, or
    30 million in all lanes together; on a GPU it must also have no loop of more than 8
    rounds. Operations are counted in its jaxpr (`rollout.envs.cost_estimate`); a loop
    of unknown length is costly. Derivatives are those of compact on every platform.
    """

    def choose(
        env: Env, start_fn: _StartFn, done: jax.Array, lanes: Lanes
    ) -> ArrayTree:
        one = jnp.zeros((1,), jnp.int32)
        operations, rounds = cost_estimate.estimate(
            lambda: prng.words(start_fn(env, one))
        )
        is_cheap = operations <= max(_FEW_OPERATIONS, _FEW_IN_ALL / done.size)
        select, switch, compact = (
            functools.partial(_of_words(way), env, start_fn, done)
            for way in (
                masked_update.select,
                masked_update.switch,
                masked_update.rounds,
            )
        )
        # On a GPU each round of a loop is a launch, and select runs it at every step.
        gpu = select if is_cheap and rounds <= _FEW_ROUNDS else switch
        other = select if is_cheap else compact
        return lax.platform_dependent(
            lanes, cpu=compact, cuda=gpu, rocm=gpu, default=other
        )

    return _without_derivative(choose, env, start_fn, done, lanes)


def _of_words(way: Callable[..., ArrayTree]) -> Callable[..., Lanes]:
    """Makes a reset of lanes whose keys are replaced by their words."""

    def reset(env: Env, start_fn: _StartFn, done: jax.Array, lanes: Lanes) -> Lanes:
        return way(done, lambda at: prng.words(start_fn(env, at)), lanes)

    return reset


def _without_derivative(
    reset: Callable[[Env, _StartFn, jax.Array, Lanes], Lanes],
    env: Env,
    start_fn: _StartFn,
    done: jax.Array,
    lanes: Lanes,
) -> Lanes:
    """Calls `reset` on words of keys; derivatives pass through lanes not done."""
    words = prng.words(lanes)
    # Nothing inside the reset depends on a differentiated value, so its `while_loop` is
    # never transposed; `_attach` adds the derivative again, outside of the loop.
    fixed = lax.stop_gradient((env, words))
    fresh = reset(fixed[0], start_fn, done, fixed[1])
    return prng.like(_attach(fresh, words, done), lanes)


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
        return prng.select(done, jnp.zeros_like(x), tangent)

    return fresh, jax.tree.map(through, fresh, tangents[1])
