"""Gradient steps on shuffled minibatches of a trajectory, inside `jit` or outside."""

import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from rollout import checks, programs
from rollout.envs.types import ArrayTree


def scan_minibatches(
    update_fn: Callable[[Any, Any], tuple[Any, Any]],
    init: ArrayTree,
    key: chex.PRNGKey,
    tree: ArrayTree,
    num_minibatches: int,
    epochs: int = 1,
    *,
    axis: int | None = None,
) -> tuple[Any, Any]:
    """Scans an update over shuffled minibatches, with one in memory at a time.

        learner, losses = scan_minibatches(update, learner, key, (t, gae), 4, epochs=4)

    Every step is in exactly one minibatch of each epoch, and each epoch is shuffled
    again. Masked-out steps come along, with their `mask`. Where lanes are sharded over
    devices, call it under `jax.shard_map`, so that steps stay on their device:
    docs/devices.md has the program.

    Args:
        update_fn: `(carry, minibatch) -> (carry, output)`, as the function of a
            `jax.lax.scan`. Outside of `jit`, another function object compiles again.
            A minibatch is `tree` with leaves `[T * B / M, ...]`; with
            axis 1 `[T, B / M, ...]`, with axis 0 `[T / M, ...]`.
        init: the first carry, such as `(params, opt_state)`.
        key: one typed key.
        tree: any pytree of `[T, B, ...]`, such as `(trajectory, advantages)`.
        num_minibatches: M, minibatches of an epoch, at least 1; it must divide the
            number of items to shuffle.
        epochs: E, at least 1.
        axis: None shuffles all `T * B` steps; 1 shuffles whole lanes, for recurrent
            policies, where T may differ between leaves: an initial state of the lanes
            is `[1, B, ...]`; 0 shuffles the leading axis of any tree.

    Returns:
        The last carry, and the outputs `[E * M, ...]`.

    Raises:
        ValueError: if a count is not an int of at least 1, if `axis` is any other
            value, if the leaves differ in the shuffled axes, or if M does not divide
            their size.
    """
    checks.typed_key(key)
    num_minibatches = checks.int_between("num_minibatches", num_minibatches)
    epochs = checks.int_between("epochs", epochs)
    if axis not in (None, 0, 1) or isinstance(axis, bool):
        raise ValueError(f"`axis` must be None, 0 or 1, got {axis!r}.")
    num_items = _count_items(tree, axis)
    if num_items % num_minibatches:
        raise ValueError(
            f"`num_minibatches` must divide the {num_items} items, got "
            f"{num_minibatches}."
        )
    known = programs.static(update_fn, init, key, tree)
    scan: Any = _scan if known is None else _scan_jitted
    fn = known or update_fn
    return scan(fn, init, key, tree, num_minibatches, epochs, axis, num_items)


def _scan(
    update_fn: Callable[[Any, Any], tuple[Any, Any]],
    init: ArrayTree,
    key: chex.PRNGKey,
    tree: ArrayTree,
    num_minibatches: int,
    epochs: int,
    axis: int | None,
    num_items: int,
) -> tuple[Any, Any]:
    shuffle = jax.vmap(lambda key: jax.random.permutation(key, num_items))
    order = shuffle(jax.random.split(key, epochs))
    order = order.reshape(epochs * num_minibatches, -1)  # each epoch is cut in M
    if axis is None:
        tree = jax.tree.map(lambda x: jnp.reshape(x, (-1, *jnp.shape(x)[2:])), tree)

    def step(carry: Any, items: jax.Array) -> tuple[Any, Any]:
        take = lambda x: jnp.take(x, items, axis=axis or 0, mode="clip")  # noqa: E731
        return update_fn(carry, jax.tree.map(take, tree))

    return jax.lax.scan(step, init, order)


_scan_jitted = jax.jit(_scan, static_argnums=(0, 4, 5, 6, 7))


def _count_items(tree: ArrayTree, axis: int | None) -> int:
    """Counts the items to shuffle; raises if the leaves disagree."""
    first, last = (0, 2) if axis is None else (axis, axis + 1)
    counts = {jnp.shape(x)[first:last] for x in jax.tree.leaves(tree)}
    if len(counts) != 1 or len(min(counts)) != last - first:
        what = "`[T, ...]`" if axis == 0 else "`[T, B, ...]`"
        shapes = sorted({jnp.shape(x) for x in jax.tree.leaves(tree)})
        got = ", ".join(map(str, shapes)) or "none"
        raise ValueError(
            f"`tree` must have leaves {what} with equal shuffled axes, got {got}."
        )
    return math.prod(min(counts))
